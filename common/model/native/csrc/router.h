// The router of an MoE layer: scores, the choice of experts, their weights, and the row that tells the choice.
#pragma once

#include "linear.h"
#include "norm.h"

namespace moerelay {

enum class Scoring : int { kSoftmax = 0, kSigmoid = 1, kChosenSoftmax = 2 };

struct RouterRules {
  Scoring scoring;
  bool normalize;
  float normalize_eps;
  float scale;
  int top_k;
  int num_groups;
  int num_groups_kept;
  int num_group_scores;
  const float* correction;  // [E], added for the choice only, or null
};

// `count` indices of the largest values, best first, of equal ones the lower first. What is taken becomes NaN in place.
inline void take_best(float* values, int size, int count, int32_t* best) {
  for (int k = 0; k < count; ++k) {
    int place = -1;
    for (int i = 0; i < size; ++i)
      if (!std::isnan(values[i]) && (place < 0 || values[i] > values[place])) place = i;
    // No number is left: the ids stay legal and distinct all the same.
    for (int i = 0; place < 0 && i < size; ++i)
      if (std::find(best, best + k, i) == best + k) place = i;
    best[k] = place;
    values[place] = std::nanf("");
  }
}

inline void softmax(float* values, int size) {
  float highest = values[0], total = 0;
  for (int i = 1; i < size; ++i) highest = std::max(highest, values[i]);
  Floats sums = {};
  for (int i = 0; i < size; i += kLanes) {
    const int count = size - i;
    Floats v = exp(load(values + i, count) - highest);
    for (int lane = count; lane < kLanes; ++lane) v[lane] = 0;
    sums += v;
    store(values + i, v, count);
  }
  total = sum(sums);
  for (int i = 0; i < size; ++i) values[i] /= total;
}

// Experts outside the best groups become NaN, which is never chosen.
inline void keep_best_groups(const RouterRules& rules, float* ranking, int num_experts, std::vector<float>& space) {
  const int size = num_experts / rules.num_groups;
  std::vector<float> group_scores(rules.num_groups);
  std::vector<int32_t> best(std::max(rules.num_group_scores, rules.num_groups_kept));
  for (int group = 0; group < rules.num_groups; ++group) {
    const float* own = ranking + group * size;
    space.assign(own, own + size);
    take_best(space.data(), size, rules.num_group_scores, best.data());
    group_scores[group] = own[best[0]];
    for (int i = 1; i < rules.num_group_scores; ++i) group_scores[group] += own[best[i]];
  }
  take_best(group_scores.data(), rules.num_groups, rules.num_groups_kept, best.data());
  for (int group = 0; group < rules.num_groups; ++group)
    if (std::find(best.begin(), best.begin() + rules.num_groups_kept, group) == best.begin() + rules.num_groups_kept)
      std::fill(ranking + group * size, ranking + (group + 1) * size, std::nanf(""));
}

// One token: `scores` are its logits [E]; ids and weights [top_k].
inline void choose(const RouterRules& rules, float* scores, int num_experts, int32_t* ids, float* weights) {
  if (rules.scoring == Scoring::kSoftmax) softmax(scores, num_experts);
  if (rules.scoring == Scoring::kSigmoid)
    for (int i = 0; i < num_experts; i += kLanes)
      store(scores + i, 1.0f / (exp(-load(scores + i, num_experts - i)) + 1.0f), num_experts - i);
  static thread_local std::vector<float> ranking, space;
  ranking.assign(scores, scores + num_experts);
  if (rules.correction != nullptr)
    for (int i = 0; i < num_experts; ++i) ranking[i] += rules.correction[i];
  // Whoever is not comparable could have been the best: what comes of it must not look like a result.
  const bool is_sound = std::none_of(ranking.begin(), ranking.end(), [](float value) { return std::isnan(value); });
  if (rules.num_groups_kept < rules.num_groups) keep_best_groups(rules, ranking.data(), num_experts, space);
  take_best(ranking.data(), num_experts, rules.top_k, ids);
  for (int k = 0; k < rules.top_k; ++k) weights[k] = scores[ids[k]];
  if (rules.scoring == Scoring::kChosenSoftmax) softmax(weights, rules.top_k);
  if (rules.normalize) {
    float total = weights[0];
    for (int k = 1; k < rules.top_k; ++k) total += weights[k];
    for (int k = 0; k < rules.top_k; ++k) weights[k] /= total + rules.normalize_eps;
  }
  for (int k = 0; k < rules.top_k; ++k) weights[k] *= is_sound ? rules.scale : std::nanf("");
}

// A token's routing row in one layer; rows of a layer lie `row_bytes` apart.
struct RowsOut {
  uint8_t* first;  // null: nobody wants rows
  int64_t row_bytes;
  int id_bytes;  // 1, 2 or 4

  void write(int64_t token, const int32_t* ids, int top_k) const {
    if (first == nullptr) return;
    for (int k = 0; k < top_k; ++k)  // the low bytes, which come first
      std::memcpy(first + token * row_bytes + int64_t{k} * id_bytes, ids + k, id_bytes);
  }
};

// x [T, H] to ids and fp32 weights [T, top_k]. T is the model's type, W that of the router's weight.
template <typename T, typename W>
void route(const RouterRules& rules, const PackedWeight<W>& weight, const W* bias, const T* x, int num_tokens,
           int32_t* ids, float* weights, const RowsOut& rows_out) {
  const int num_experts = weight.num_outputs, hidden = weight.num_inputs;
  share((num_tokens + kTileRows - 1) / kTileRows, 1, [&](int tile) {
    static thread_local std::vector<float> logits;
    static thread_local std::vector<W> converted;
    const int first = tile * kTileRows, count = std::min(kTileRows, num_tokens - first);
    logits.resize(size_t{kTileRows} * num_experts);
    const W* rows[kTileRows];
    for (int row = 0; row < count; ++row) {
      const T* from = x + int64_t{first + row} * hidden;
      if constexpr (std::is_same_v<T, W>) {
        rows[row] = from;
      } else {
        converted.resize(size_t{kTileRows} * hidden);
        W* to = converted.data() + size_t{1} * row * hidden;
        for (int i = 0; i < hidden; i += kLanes) store(to + i, load(from + i, hidden - i), hidden - i);
        rows[row] = to;
      }
    }
    for (int panel = 0; panel < weight.num_panels(); panel += kTilePanels)
      product(rows, count, weight, panel, [&](int row, int p, Floats sums) {
        const int width = weight.width(p);
        store(logits.data() + row * num_experts + p * kLanes, with_bias(sums, bias, p, width), width);
      });
    for (int row = 0; row < count; ++row) {
      const int64_t token = first + row;
      int32_t* own = ids + token * rules.top_k;
      choose(rules, logits.data() + row * num_experts, num_experts, own, weights + token * rules.top_k);
      rows_out.write(token, own, rules.top_k);
    }
  });
}

}  // namespace moerelay

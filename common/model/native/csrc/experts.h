// The experts of an MoE layer: each computes the rows of the tokens that chose it, wherever those stand in the batch.
//
// Letters: T tokens, H hidden size, F expert width, K experts per token.
#pragma once

#include "buffer.h"
#include "linear.h"
#include "norm.h"

namespace moerelay {

enum class Activation : int { kSwiglu = 0, kClampedSwiglu = 1 };

template <typename T>
struct Experts {
  // Per expert: gate and up panels in turns, [2 F, H] packed; then [H, F] packed.
  std::vector<const char*> gate_up, down;
  int hidden;
  int width;
  const T* gate_bias;  // [experts, F] each, and [experts, H], or null
  const T* up_bias;
  const T* down_bias;
  Activation activation;
  float alpha;
  float limit;

  // Of an expert whose width is no multiple of 16 the last panels are filled up with zeros.
  int num_panels() const { return (width + kLanes - 1) / kLanes; }
  PackedWeight<T> gate_up_of(int expert) const { return {gate_up[expert], 2 * num_panels() * kLanes, hidden}; }
  PackedWeight<T> down_of(int expert) const { return {down[expert], hidden, width}; }

  // Both are what a T holds; computed in fp32, rounded by whoever stores it.
  Floats activate(Floats gate, Floats up) const {
    if (activation == Activation::kSwiglu) return gate / (exp(-gate) + 1.0f) * up;
    gate = min(gate, splat(limit));
    up = max(min(up, splat(limit)), splat(-limit));
    return gate / (exp(-alpha * gate) + 1.0f) * (up + 1.0f);
  }
};

// The rows of one expert: pair numbers are token · K + place.
struct Assignment {
  int expert;
  int first;
  int count;
};

// Pairs ordered by expert, and where each expert's begin.
inline std::vector<Assignment> assign(const int32_t* ids, int num_pairs, int num_experts, int* pairs) {
  std::vector<int> ends(num_experts + 1);
  for (int pair = 0; pair < num_pairs; ++pair) ++ends[ids[pair] + 1];
  for (int expert = 0; expert < num_experts; ++expert) ends[expert + 1] += ends[expert];
  std::vector<Assignment> used;
  for (int expert = 0; expert < num_experts; ++expert)
    if (const int count = ends[expert + 1] - ends[expert]) used.push_back({expert, ends[expert], count});
  for (int pair = 0; pair < num_pairs; ++pair) pairs[ends[ids[pair]]++] = pair;
  return used;
}

// y [T, H] = Σ over K, in the order of the choice, of weight · expert(x); ids and fp32 weights [T, K].
template <typename T>
void apply_experts(const Experts<T>& experts, const T* x, const int32_t* ids, const float* weights, int num_tokens,
                   int top_k, T* y) {
  const int num_pairs = num_tokens * top_k, hidden = experts.hidden, width = experts.width;
  static thread_local Buffer<int> pairs;
  static thread_local Buffer<const T*> inputs, middles;
  static thread_local Buffer<T> middle, outputs;
  // The threads of the team see the caller's buffers through these.
  int* pair_of = pairs.fit(num_pairs);
  const T **input = inputs.fit(num_pairs), **hidden_rows = middles.fit(num_pairs);
  T* middle_data = middle.fit(size_t{1} * num_pairs * width);
  T* output_data = outputs.fit(size_t{1} * num_pairs * hidden);
  const std::vector<Assignment> used = assign(ids, num_pairs, int(experts.gate_up.size()), pair_of);
  for (int row = 0; row < num_pairs; ++row) {
    input[row] = x + int64_t{pair_of[row] / top_k} * hidden;
    hidden_rows[row] = middle_data + size_t{1} * row * width;
  }
  const int gate_units = experts.num_panels(), num_used = int(used.size());
  const int down_units = (experts.down_of(0).num_panels() + kTilePanels - 1) / kTilePanels;
  share(num_used * gate_units, 8, [&](int unit) {
    const Assignment own = used[unit / gate_units];
    const int panel = unit % gate_units, count = std::min(kLanes, width - panel * kLanes);
    const int64_t bias = int64_t{own.expert} * width + panel * kLanes;
    const T* gate_bias = experts.gate_bias ? experts.gate_bias + bias : nullptr;
    const T* up_bias = experts.up_bias ? experts.up_bias + bias : nullptr;
    tiles_of<T, 2>(input + own.first, 0, own.count, experts.gate_up_of(own.expert), 2 * panel,
                   [&](int row, const Floats(&sums)[2]) {
                     Floats gate = rounded_to<T>(with_bias(sums[0], gate_bias, 0, count));
                     Floats up = rounded_to<T>(with_bias(sums[1], up_bias, 0, count));
                     T* to = middle_data + size_t{1} * (own.first + row) * width + panel * kLanes;
                     store(to, experts.activate(gate, up), count);
                   });
  });
  share(num_used * down_units, 8, [&](int unit) {
    const Assignment own = used[unit / down_units];
    const PackedWeight<T> weight = experts.down_of(own.expert);
    const T* bias = experts.down_bias ? experts.down_bias + int64_t{own.expert} * hidden : nullptr;
    product(hidden_rows + own.first, own.count, weight, unit % down_units * kTilePanels,
            [&](int row, int panel, Floats sums) {
              const int count = weight.width(panel);
              T* to = output_data + size_t{1} * pair_of[own.first + row] * hidden + panel * kLanes;
              store(to, with_bias(sums, bias, panel, count), count);
            });
  });
  share(num_tokens, rows_worth_sharing(int64_t{top_k} * hidden), [&](int token) {
    const T* own = output_data + size_t{1} * token * top_k * hidden;
    const float* factors = weights + int64_t{token} * top_k;
    for (int i = 0; i < hidden; i += kLanes) {
      Floats total = load(own + i, hidden - i) * factors[0];
      for (int k = 1; k < top_k; ++k) total += load(own + size_t{1} * k * hidden + i, hidden - i) * factors[k];
      store(y + int64_t{token} * hidden + i, total, hidden - i);
    }
  });
}

}  // namespace moerelay

// Attention over the paged cache, in tiles of keys that start at absolute multiples of kTileKeys.
//
// The softmax is computed online (Milakov & Gimelshein, arXiv 1805.02867; FlashAttention, arXiv 2205.14135). A query
// goes through the same tiles and additions whether it is computed alone, in a chunk or beside other sequences: tiles
// in which it sees no key are left out for it, and keys that it does not see weigh exactly nothing.
#pragma once

#include <cmath>

#include "buffer.h"
#include "linear.h"

namespace moerelay {

constexpr int kTileKeys = 128;
constexpr int kKeyPanels = kTileKeys / kLanes;
// Query rows that share the packed keys and values of a tile.
constexpr int kQueryRows = 96;

// One sequence of a batch: its queries are consecutive tokens of the batch, and consecutive positions.
struct Queries {
  int64_t first_token;
  int64_t num_tokens;
  int64_t start;  // position of the first one
  int64_t table;  // where its block ids begin in the table
};

template <typename T>
struct Attention {
  int num_heads;
  int num_kv_heads;
  int key_dim;
  int value_dim;
  int block_shift;     // blocks have 2^block_shift slots
  int64_t window;      // keys that a query sees, itself included; 0: all
  const float* sinks;  // [num_heads] or null

  const T* q;  // [tokens, num_heads, key_dim], scaled
  const T* keys;    // [slots, num_kv_heads, key_dim]
  const T* values;  // rows as those of the keys, of which value_dim elements count
  const int32_t* block_table;
  T* out;  // [tokens, num_heads, value_dim]

  int group() const { return num_heads / num_kv_heads; }
  int num_rows(const Queries& queries) const { return int(queries.num_tokens) * group(); }

  int64_t cache_row(const Queries& queries, int64_t position, int kv_head) const {
    const int64_t block = block_table[queries.table + (position >> block_shift)];
    const int64_t slot = (block << block_shift) + (position & ((int64_t{1} << block_shift) - 1));
    return (slot * num_kv_heads + kv_head) * key_dim;
  }
};

// What one thread works with.
template <typename T>
struct Workspace {
  Buffer<char> keys, values;
  Buffer<T> weights;
  Buffer<float> scores, output;
  std::vector<T> zeros;
  const T *queries[kQueryRows], *weight_rows[kQueryRows];
  float highest[kQueryRows], total[kQueryRows], rescale[kQueryRows];

  // Of one tile and one KV head, packed.
  static size_t key_bytes(const Attention<T>& a) { return size_t{kTileKeys} * a.key_dim * sizeof(T); }
  static size_t value_bytes(const Attention<T>& a) { return size_t{kTileKeys} * (a.value_dim + kLanes) * sizeof(T); }

  void fit(const Attention<T>& a, int num_kv_heads) {
    keys.fit(num_kv_heads * key_bytes(a));
    values.fit(num_kv_heads * value_bytes(a));
    weights.fit(kQueryRows * kTileKeys);
    scores.fit(kQueryRows * kTileKeys);
    output.fit(size_t{kQueryRows} * (a.value_dim + kLanes));
    zeros.resize(a.key_dim);
    for (int row = 0; row < kQueryRows; ++row) weight_rows[row] = weights.data() + row * kTileKeys;
  }
};

// Values of the tile as the weight of a product whose inputs are keys: [⌈V / 16⌉][keys / W][16][W].
template <typename T>
void pack_values(const T* const* rows, int num_keys, int value_dim, char* to);

template <>
inline void pack_values<float>(const float* const* rows, int num_keys, int value_dim, char* to) {
  for (int dim = 0; dim < value_dim; dim += kLanes)
    for (int key = 0; key < num_keys; ++key, to += 64) {
      Floats v = load(rows[key] + dim, value_dim - dim);
      std::memcpy(to, &v, 64);
    }
}

template <>
inline void pack_values<bf16>(const bf16* const* rows, int num_keys, int value_dim, char* to) {
  for (int dim = 0; dim < value_dim; dim += kLanes)
    for (int key = 0; key < num_keys; key += 2, to += 64) {
      Words low = as<Words>(load(rows[key] + dim, value_dim - dim)) >> 16;
      Words both = low | as<Words>(load(rows[key + 1] + dim, value_dim - dim));
      std::memcpy(to, &both, 64);
    }
}

// Rows of one sequence and some consecutive KV heads, head by head; a row is a query head of a token, tokens first.
template <typename T>
class RowBlock {
 public:
  // `num_rows` of each head, from its row `first` on; no more than kQueryRows in all.
  RowBlock(const Attention<T>& attention, const Queries& queries, int kv_head, int num_kv_heads, int first,
           int num_rows, Workspace<T>& space)
      : a_(attention),
        queries_(queries),
        kv_head_(kv_head),
        num_kv_heads_(num_kv_heads),
        first_(first),
        num_rows_(num_rows),
        space_(space) {
    for (int row = 0; row < num_all(); ++row) space_.queries[row] = a_.q + vector(row) * a_.key_dim;
  }

  void run() {
    clear();
    const int64_t last = position(num_rows_ - 1);
    const int64_t first = a_.window ? std::max<int64_t>(0, position(0) - a_.window + 1) : 0;
    for (int64_t key = first / kTileKeys * kTileKeys; key <= last; key += kTileKeys) add_tile(key);
    finish();
  }

 private:
  int num_all() const { return num_kv_heads_ * num_rows_; }
  int64_t token(int row) const { return (first_ + row % num_rows_) / a_.group(); }
  int64_t position(int row) const { return queries_.start + token(row); }
  int head(int row) const {
    return (kv_head_ + row / num_rows_) * a_.group() + (first_ + row % num_rows_) % a_.group();
  }
  // Index of the row's query, and of its output, in [tokens, heads].
  int64_t vector(int row) const { return (queries_.first_token + token(row)) * a_.num_heads + head(row); }

  void clear() {
    for (int row = 0; row < num_all(); ++row) {
      // A sink is a key whose value is zero. Without one the maximum starts finite, so that nothing becomes NaN.
      space_.highest[row] = a_.sinks == nullptr ? -1e30f : a_.sinks[head(row)];
      space_.total[row] = a_.sinks == nullptr ? 0.0f : 1.0f;
    }
    std::fill(output_row(0), output_row(num_all()), 0.0f);
  }

  void add_tile(int64_t first_key) {
    // Earlier rows see nothing of the tile yet, and later ones nothing any more.
    int first_row = 0, end_row = num_rows_;
    while (position(first_row) < first_key) ++first_row;
    while (a_.window && position(end_row - 1) - a_.window >= first_key + kTileKeys - 1) --end_row;
    if (first_row >= end_row) return;
    pack(first_key);
    for (int h = 0; h < num_kv_heads_; ++h) {
      const int begin = h * num_rows_ + first_row, end = h * num_rows_ + end_row;
      score(h, begin, end);
      for (int row = begin; row < end; ++row) soften(row, first_key);
      accumulate(h, begin, end);
    }
  }

  // Keys and values of the tile. The cache has the keys of a slot side by side, so the heads are read together.
  void pack(int64_t first_key) {
    const int64_t num_known = queries_.start + queries_.num_tokens - first_key;
    // Whole panels; what is behind the last key weighs nothing, so that their number shows in no result.
    num_panels_ = int(std::min<int64_t>(kKeyPanels, (num_known + kLanes - 1) / kLanes));
    int64_t cached[kTileKeys];
    for (int i = 0; i < std::min<int64_t>(num_keys(), num_known); ++i)
      cached[i] = a_.cache_row(queries_, first_key + i, kv_head_);
    const auto row = [&](const T* cache, int h, int i) {
      return i < num_known ? cache + cached[i] + h * a_.key_dim : space_.zeros.data();
    };
    const T* rows[kTileKeys];
    for (int panel = 0; panel < num_panels_; ++panel)
      for (int h = 0; h < num_kv_heads_; ++h) {
        for (int i = 0; i < kLanes; ++i) rows[i] = row(a_.keys, h, panel * kLanes + i);
        pack_panel(rows, kLanes, a_.key_dim, keys(h) + panel * key_weight(h).panel_bytes());
      }
    for (int h = 0; h < num_kv_heads_; ++h) {
      for (int i = 0; i < num_keys(); ++i) rows[i] = row(a_.values, h, i);
      pack_values<T>(rows, num_keys(), a_.value_dim, values(h));
    }
  }

  int num_keys() const { return num_panels_ * kLanes; }
  char* keys(int h) const { return space_.keys.data() + h * Workspace<T>::key_bytes(a_); }
  char* values(int h) const { return space_.values.data() + h * Workspace<T>::value_bytes(a_); }
  PackedWeight<T> key_weight(int h) const { return {keys(h), num_keys(), a_.key_dim}; }
  PackedWeight<T> value_weight(int h) const { return {values(h), a_.value_dim, num_keys()}; }

  void score(int h, int first_row, int end_row) {
    const PackedWeight<T> weight = key_weight(h);
    for (int panel = 0; panel < num_panels_; panel += kTilePanels)
      product(space_.queries + first_row, end_row - first_row, weight, panel, [&](int row, int p, Floats sums) {
        store(space_.scores.data() + (first_row + row) * kTileKeys + p * kLanes, sums);
      });
  }

  // Scores to weights, and what the row's earlier tiles are to be rescaled by.
  void soften(int row, int64_t first_key) {
    const int64_t last = position(row) - first_key;
    const int64_t first = a_.window ? last - a_.window + 1 : 0;
    float* scores = space_.scores.data() + row * kTileKeys;
    for (int64_t i = std::max<int64_t>(0, last + 1); i < num_keys(); ++i) scores[i] = -INFINITY;
    for (int64_t i = 0; i < first; ++i) scores[i] = -INFINITY;
    Floats best = splat(space_.highest[row]);
    for (int i = 0; i < num_keys(); i += kLanes) best = max(best, load(scores + i));
    const float highest_now = highest(best);
    Floats total = {};
    for (int i = 0; i < num_keys(); i += kLanes) {
      Floats weight = exp(load(scores + i) - highest_now);
      total += weight;
      store(space_.weights.data() + row * kTileKeys + i, weight);
    }
    space_.rescale[row] = exp(splat(space_.highest[row] - highest_now))[0];
    space_.total[row] = space_.total[row] * space_.rescale[row] + sum(total);
    space_.highest[row] = highest_now;
  }

  void accumulate(int h, int first_row, int end_row) {
    const PackedWeight<T> weight = value_weight(h);
    for (int panel = 0; panel < weight.num_panels(); panel += kTilePanels)
      product(space_.weight_rows + first_row, end_row - first_row, weight, panel, [&](int row, int p, Floats sums) {
        float* output = output_row(first_row + row) + p * kLanes;
        store(output, load(output) * space_.rescale[first_row + row] + sums);
      });
  }

  float* output_row(int row) const { return space_.output.data() + size_t{1} * row * (a_.value_dim + kLanes); }

  void finish() {
    for (int row = 0; row < num_all(); ++row) {
      T* to = a_.out + vector(row) * a_.value_dim;
      for (int dim = 0; dim < a_.value_dim; dim += kLanes)
        // A sum that underflowed to -0 would show how many keys weighed nothing; + 0 makes both zeros one.
        store(to + dim, load(output_row(row) + dim) / space_.total[row] + 0.0f, a_.value_dim - dim);
    }
  }

  const Attention<T>& a_;
  const Queries& queries_;
  const int kv_head_, num_kv_heads_, first_, num_rows_;
  int num_panels_ = 0;  // of keys in the present tile
  Workspace<T>& space_;
};

}  // namespace moerelay

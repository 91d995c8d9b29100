// From the fused product of queries, keys and values to what attention reads: norm, bound, rotation, scale, cache.
#pragma once

#include "norm.h"

namespace moerelay {

enum class HeadNorm : int { kNone = 0, kHead = 1, kAll = 2 };

template <typename T>
struct Heads {
  int num_heads;
  int num_kv_heads;
  int dim;
  int rotary_dim;
  HeadNorm norm;
  const float* norm_weight;  // [num_heads + num_kv_heads, dim] or null
  float eps;
  float bound;  // of absolute values; 0: none
  float scale;  // of queries
  const float* cos;  // [positions, rotary_dim / 2]
  const float* sin;

  int num_all() const { return num_heads + 2 * num_kv_heads; }
};

// The pairs (i, i + R) of one head turned by the angles of its position; computed in place.
inline void rotate(float* head, int num_pairs, const float* cos, const float* sin) {
  for (int i = 0; i < num_pairs; i += kLanes) {
    const int count = num_pairs - i;
    Floats a = load(head + i, count), b = load(head + num_pairs + i, count);
    Floats c = load(cos + i, count), s = load(sin + i, count);
    store(head + i, a * c - b * s, count);
    store(head + num_pairs + i, b * c + a * s, count);
  }
}

// One token's heads [(N + 2 G), D]: queries go to `q` [N, D], keys and values to its slot of the cache, each [G, D].
template <typename T>
void split_heads(const Heads<T>& h, const T* heads, int64_t position, T* q, T* key, T* value, float* space) {
  const int num_qk = (h.num_heads + h.num_kv_heads) * h.dim, num_v = h.num_kv_heads * h.dim;
  for (int i = 0; i < num_qk; i += kLanes) store(space + i, load(heads + i, num_qk - i), num_qk - i);
  const int per_norm_q = h.norm == HeadNorm::kAll ? h.num_heads * h.dim : h.dim;
  const int per_norm_k = h.norm == HeadNorm::kAll ? h.num_kv_heads * h.dim : h.dim;
  if (h.norm != HeadNorm::kNone)
    for (int from = 0; from < num_qk;) {
      const int size = from < h.num_heads * h.dim ? per_norm_q : per_norm_k;
      normalize(space + from, h.norm_weight + from, size, h.eps, space + from);
      from += size;
    }
  if (h.bound > 0)
    for (int i = 0; i < num_qk; i += kLanes) {
      Floats v = max(min(load(space + i, num_qk - i), splat(h.bound)), splat(-h.bound));
      store(space + i, v, num_qk - i);
    }
  const int num_pairs = h.rotary_dim / 2;
  for (int head = 0; head < h.num_heads + h.num_kv_heads; ++head)
    rotate(space + head * h.dim, num_pairs, h.cos + position * num_pairs, h.sin + position * num_pairs);
  const int num_q = h.num_heads * h.dim;
  for (int i = 0; i < num_q; i += kLanes) store(q + i, load(space + i, num_q - i) * h.scale, num_q - i);
  for (int i = 0; i < num_v; i += kLanes) {
    store(key + i, load(space + num_q + i, num_v - i), num_v - i);
    Floats v = load(heads + num_qk + i, num_v - i);
    if (h.bound > 0) v = max(min(v, splat(h.bound)), splat(-h.bound));
    store(value + i, v, num_v - i);
  }
}

// All tokens: heads [T, N + 2 G, D]; positions and slots [T]; q [T, N, D]; keys and values [slots, G, D].
template <typename T>
void split_heads(const Heads<T>& h, const T* heads, const int64_t* positions, const int64_t* slots, int num_tokens,
                 T* q, T* keys, T* values) {
  const int64_t row = int64_t{h.num_all()} * h.dim, cached = int64_t{h.num_kv_heads} * h.dim;
  share(num_tokens, rows_worth_sharing(row), [&](int t) {
    static thread_local std::vector<float> space;
    space.resize((h.num_heads + h.num_kv_heads) * h.dim);
    split_heads(h, heads + t * row, positions[t], q + int64_t{t} * h.num_heads * h.dim, keys + slots[t] * cached,
                values + slots[t] * cached, space.data());
  });
}

}  // namespace moerelay

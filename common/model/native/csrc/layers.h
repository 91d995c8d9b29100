// All layers of a decoder in one call, for models of grouped-query attention and experts in every layer.
//
// The very functions that the single calls use, in the same order: what is saved is the way through Python, and the
// interpreter's lock being given up and taken again between them, for which other threads of the process are waiting.
#pragma once

#include <functional>

#include "attend.h"
#include "buffer.h"
#include "experts.h"
#include "heads.h"
#include "router.h"

namespace moerelay {

template <typename T>
struct Linear {
  PackedWeight<T> weight;
  const T* bias;

  void operator()(const T* x, int num_rows, T* y) const { linear(x, weight.num_inputs, num_rows, weight, bias, y); }
};

// A router of either weight type: which of the two stands in the layer, not in its type.
template <typename T>
using AnyRouter = std::function<void(const T* x, int num_tokens, int32_t* ids, float* weights, const RowsOut& rows)>;

template <typename T>
struct Layer {
  const T* input_norm;
  const T* feed_forward_norm;
  Linear<T> qkv;
  Heads<T> heads;
  Linear<T> out;
  int64_t window;
  const float* sinks;
  AnyRouter<T> route;
  int top_k;
  Experts<T> experts;
};

// What is the same in every layer of one forward pass.
template <typename T>
struct Pass {
  int num_tokens;
  const int64_t* positions;
  const int64_t* slots;
  const float* cos;
  const float* sin;
  int block_shift;
  const int32_t* block_table;
  const Queries* sequences;
  int num_sequences;
  T* kv;  // [layers, 2, slots, G, D]
  int64_t plane_elements;
  RowsOut rows;  // of layer 0; those of the next begin `layer_row_bytes` behind
  int64_t layer_row_bytes;
};

// x [tokens, hidden], in place.
template <typename T>
void run_layers(const std::vector<Layer<T>>& layers, float eps, const Pass<T>& pass, T* x) {
  static thread_local Buffer<T> normed, fused, queries, attended, delta;
  static thread_local Buffer<int32_t> ids;
  static thread_local Buffer<float> weights;
  const size_t num_tokens = pass.num_tokens;
  const int hidden = layers[0].experts.hidden;
  normed.fit(num_tokens * hidden);
  delta.fit(num_tokens * hidden);
  const T* added = nullptr;
  T* kv = pass.kv;
  RowsOut rows = pass.rows;
  for (const Layer<T>& layer : layers) {
    Heads<T> heads = layer.heads;
    heads.cos = pass.cos;
    heads.sin = pass.sin;
    fused.fit(num_tokens * layer.qkv.weight.num_outputs);
    queries.fit(num_tokens * layer.out.weight.num_inputs);
    attended.fit(num_tokens * layer.out.weight.num_inputs);
    ids.fit(num_tokens * layer.top_k);
    weights.fit(num_tokens * layer.top_k);

    add_norm(x, added, layer.input_norm, eps, pass.num_tokens, hidden, normed.data());
    layer.qkv(normed.data(), pass.num_tokens, fused.data());
    T* values = kv + pass.plane_elements;
    split_heads(heads, fused.data(), pass.positions, pass.slots, pass.num_tokens, queries.data(), kv, values);
    attend(Attention<T>{heads.num_heads, heads.num_kv_heads, heads.dim, heads.dim, pass.block_shift, layer.window,
                        layer.sinks, queries.data(), kv, values, pass.block_table, attended.data()},
           pass.sequences, pass.num_sequences);
    layer.out(attended.data(), pass.num_tokens, delta.data());

    add_norm(x, delta.data(), layer.feed_forward_norm, eps, pass.num_tokens, hidden, normed.data());
    layer.route(normed.data(), pass.num_tokens, ids.data(), weights.data(), rows);
    apply_experts(layer.experts, normed.data(), ids.data(), weights.data(), pass.num_tokens, layer.top_k, delta.data());
    added = delta.data();
    kv += 2 * pass.plane_elements;
    if (rows.first != nullptr) rows.first += pass.layer_row_bytes;
  }
  for (size_t i = 0; i < num_tokens * hidden; i += kLanes) {
    const int count = int(std::min<size_t>(kLanes, num_tokens * hidden - i));
    store(x + i, load(x + i, count) + load(added + i, count), count);
  }
}

}  // namespace moerelay

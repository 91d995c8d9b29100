// y = x · weightᵀ for weights packed so that a product reads them in one stream.
//
// A packed weight [N, K] is [⌈N / 16⌉][K / W][16][W]: panels of 16 outputs (zeros behind the last one), in each of
// them word after word of W inputs (two bf16, one float) for all 16 outputs: 64 bytes per step. An output is accumulated in
// fp32 over its inputs in order, whatever the number of rows, the tile or the thread: that makes rows independent of
// their batch, bit for bit.
//
// Letters: M rows, N outputs, K inputs, R rows and C panels of one tile.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "team.h"
#include "vec.h"

namespace moerelay {

// R × C sums, C panels of weights and one row's word are to fit the registers: AVX-512 has 32 that take a vector, AVX2 16
// that take half of one. The loops below are unrolled as often as these say.
constexpr int kTilePanels = 2;
#if defined(__AVX512F__)
constexpr int kTileRows = 12;
#else
constexpr int kTileRows = 2;
#endif

template <typename T>
struct PackedWeight {
  const char* data;
  int num_outputs;
  int num_inputs;

  int num_words() const { return num_inputs / kPerWord<T>; }
  int num_panels() const { return (num_outputs + kLanes - 1) / kLanes; }
  size_t panel_bytes() const { return size_t{64} * num_words(); }
  const char* panel(int index) const { return data + panel_bytes() * index; }
  // Outputs of a panel that exist.
  int width(int panel) const { return std::min(kLanes, num_outputs - panel * kLanes); }
};

// Rows of one matrix that follow each other at a distance of `stride` elements, by their addresses.
template <typename T>
std::vector<const T*> rows_of(const T* first, int num_rows, int64_t stride) {
  std::vector<const T*> rows(num_rows);
  for (int row = 0; row < num_rows; ++row) rows[row] = first + row * stride;
  return rows;
}

// 16 rows of 16 words, the other way round.
inline void transpose(Words (&v)[16]) {
  Words t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = __builtin_shufflevector(v[i], v[i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
    t[i + 1] = __builtin_shufflevector(v[i], v[i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      v[i + 2 * j] = __builtin_shufflevector(t[i + j], t[i + 2 + j], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13,
                                             28, 29);
      v[i + 2 * j + 1] = __builtin_shufflevector(t[i + j], t[i + 2 + j], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14,
                                                 15, 30, 31);
    }
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 4; ++j) {
      t[i + j] = __builtin_shufflevector(v[i + j], v[i + 4 + j], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26,
                                         27);
      t[i + 4 + j] = __builtin_shufflevector(v[i + j], v[i + 4 + j], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29,
                                             30, 31);
    }
  for (int j = 0; j < 8; ++j) {
    v[j] = __builtin_shufflevector(t[j], t[8 + j], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    v[8 + j] = __builtin_shufflevector(t[j], t[8 + j], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
}

// `count` words of a row from word `first` on; zeros behind them.
template <typename T>
inline Words load_some(const T* row, int first, int count) {
  const char* from = reinterpret_cast<const char*>(row) + size_t{4} * first;
  if (count == kLanes) return load_words(from);
  Words v = {};
  std::memcpy(&v, from, size_t{4} * count);
  return v;
}

// One panel from the rows of its outputs, fewer than 16 in the last one.
template <typename T>
void pack_panel(const T* const* rows, int num_rows, int num_inputs, char* to) {
  const int num_words = num_inputs / kPerWord<T>;
  for (int first = 0; first < num_words; first += kLanes) {
    const int count = std::min(kLanes, num_words - first);
    Words v[kLanes];
    for (int row = 0; row < kLanes; ++row) v[row] = row < num_rows ? load_some(rows[row], first, count) : Words{};
    transpose(v);
    std::memcpy(to + size_t{64} * first, v, size_t{64} * count);
  }
}

// Sums of a tile, and the weights of one step, by the registers that they fill.
template <int R, int C>
using TileSums = PartFloats[R][C * kParts];
template <int C>
using TileStep = PartWords[C * kParts];

// Word `k` of C panels.
template <int C>
inline __attribute__((always_inline)) void load_step(const char* w, size_t panel_bytes, size_t k, TileStep<C>& step) {
#pragma GCC unroll 8
  for (int i = 0; i < C * kParts; ++i)
    std::memcpy(&step[i], w + i / kParts * panel_bytes + 64 * k + i % kParts * kPartBytes, kPartBytes);
}

template <int R, int C, typename Add>
inline __attribute__((always_inline)) void add_step(const uint32_t (&words)[R], const TileStep<C>& step,
                                                    TileSums<R, C>& sums, Add&& add) {
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    const PartWords a = PartWords{} + words[r];
#pragma GCC unroll 8
    for (int i = 0; i < C * kParts; ++i) sums[r][i] = add(sums[r][i], a, step[i]);
  }
}

// Words that an instruction takes as they are: floats, and pairs where there is one for them.
template <typename T, int R, int C>
inline __attribute__((always_inline)) void add_words(const char* const (&x)[R], const char* w, size_t panel_bytes,
                                                     size_t num_words, TileSums<R, C>& sums) {
  for (size_t k = 0; k < num_words; ++k) {
    TileStep<C> step;
    load_step<C>(w, panel_bytes, k, step);
    uint32_t words[R];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) std::memcpy(&words[r], x[r] + 4 * k, 4);
    if constexpr (std::is_same_v<T, float>) {
      add_step<R, C>(words, step, sums, add_product);
    } else {
      add_step<R, C>(words, step, sums, add_pair_product);
    }
  }
}

// Pairs of R rows as floats, so many words at a time that they stay in the nearest cache.
template <int R>
struct Widened {
  static constexpr size_t kNumWords = 128;

  alignas(64) uint32_t upper[R][kNumWords], lower[R][kNumWords];

  // `count` words of each row from word `first` on; zeros up to whole vectors.
  void fill(const char* const (&x)[R], size_t first, size_t count) {
    for (int r = 0; r < R; ++r) {
      const bf16* row = reinterpret_cast<const bf16*>(x[r]);
      for (size_t k = 0; k < count; k += kLanes) {
        const Words pairs = load_some(row, int(first + k), int(std::min<size_t>(kLanes, count - k)));
        const Words above = pairs & 0xffff0000u, below = pairs << 16;
        std::memcpy(upper[r] + k, &above, 64);
        std::memcpy(lower[r] + k, &below, 64);
      }
    }
  }
};

// Pairs without an instruction for them: one product for each half, in the order of that instruction.
template <int R, int C>
inline __attribute__((always_inline)) void add_halves(const char* const (&x)[R], const char* w, size_t panel_bytes,
                                                      size_t num_words, TileSums<R, C>& sums) {
  Widened<R> rows;
  for (size_t first = 0; first < num_words; first += rows.kNumWords) {
    const size_t count = std::min(rows.kNumWords, num_words - first);
    rows.fill(x, first, count);
    for (size_t k = 0; k < count; ++k) {
      TileStep<C> step;
      uint32_t words[R];
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) words[r] = rows.upper[r][k];
      load_step<C>(w, panel_bytes, first + k, step);
#pragma GCC unroll 8
      for (int i = 0; i < C * kParts; ++i) step[i] &= 0xffff0000u;
      add_step<R, C>(words, step, sums, add_product);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) words[r] = rows.lower[r][k];
      load_step<C>(w, panel_bytes, first + k, step);
#pragma GCC unroll 8
      for (int i = 0; i < C * kParts; ++i) step[i] <<= 16;
      add_step<R, C>(words, step, sums, add_product);
    }
  }
}

// R rows times C consecutive panels. Rows are given by their addresses, so that they may lie anywhere.
template <typename T, int R, int C>
inline __attribute__((always_inline)) void tile(const T* const* rows, const PackedWeight<T>& weight, int panel,
                                                Floats (&acc)[R][C]) {
  const char* x[R];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) x[r] = reinterpret_cast<const char*>(rows[r]);
  TileSums<R, C> sums;
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int i = 0; i < C * kParts; ++i) sums[r][i] = PartFloats{};
  if constexpr (std::is_same_v<T, float> || kTakesPairs) {
    add_words<T, R, C>(x, weight.panel(panel), weight.panel_bytes(), weight.num_words(), sums);
  } else {
    add_halves<R, C>(x, weight.panel(panel), weight.panel_bytes(), weight.num_words(), sums);
  }
  static_assert(sizeof acc == sizeof sums);
  std::memcpy(&acc, &sums, sizeof acc);
}

// All rows from `first` on times C panels, in tiles of R rows and one smaller one.
template <typename T, int C, int R = kTileRows, typename Finish>
inline void tiles_of(const T* const* rows, int first, int num_rows, const PackedWeight<T>& weight, int panel,
                     Finish&& finish) {
  for (; num_rows - first >= R; first += R) {
    Floats acc[R][C];
    tile<T, R, C>(rows + first, weight, panel, acc);
    for (int r = 0; r < R; ++r) finish(first + r, acc[r]);
  }
  if constexpr (R > 1) {
    if (first < num_rows) tiles_of<T, C, R - 1>(rows, first, num_rows, weight, panel, finish);
  }
}

// Calls `finish(row, panel, sums)` for each row and each of the panels [panel, panel + kTilePanels) that there are.
template <typename T, typename Finish>
inline void product(const T* const* rows, int num_rows, const PackedWeight<T>& weight, int panel, Finish&& finish) {
  if (panel + 1 < weight.num_panels()) {
    tiles_of<T, 2>(rows, 0, num_rows, weight, panel, [&](int row, const Floats(&sums)[2]) {
      finish(row, panel, sums[0]);
      finish(row, panel + 1, sums[1]);
    });
  } else {
    tiles_of<T, 1>(rows, 0, num_rows, weight, panel,
                   [&](int row, const Floats(&sums)[1]) { finish(row, panel, sums[0]); });
  }
}

// The sums of a panel as a T, and a bias added to what they were rounded to.
template <typename T>
inline Floats with_bias(Floats sums, const T* bias, int panel, int width) {
  Floats rounded = rounded_to<T>(sums);
  return bias == nullptr ? rounded : rounded + load(bias + panel * kLanes, width);
}

// y [M, N] from rows of K inputs; `bias` is [N] or null.
template <typename T>
void linear(const T* x, int64_t x_stride, int num_rows, const PackedWeight<T>& weight, const T* bias, T* y) {
  if (num_rows == 0) return;
  const std::vector<const T*> rows = rows_of(x, num_rows, x_stride);
  const int num_units = (weight.num_panels() + kTilePanels - 1) / kTilePanels;
  share(num_units, std::max(1, num_units / 32), [&](int unit) {
    product(rows.data(), num_rows, weight, unit * kTilePanels, [&](int row, int panel, Floats sums) {
      const int width = weight.width(panel);
      store(y + int64_t{row} * weight.num_outputs + panel * kLanes, with_bias(sums, bias, panel, width), width);
    });
  });
}

}  // namespace moerelay

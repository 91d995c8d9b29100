// Root-mean-square norms. Sums of squares are taken over the lanes in one fixed order, so a row's bits are its own.
#pragma once

#include <cmath>

#include "team.h"
#include "vec.h"

namespace moerelay {

// Rows of `size` elements with too little work to be shared among threads: they are taken together.
inline int rows_worth_sharing(int64_t size) { return int(std::max<int64_t>(1, (1 << 14) / size)); }

template <typename T>
float inverse_rms(const T* x, int size, float eps) {
  Floats squares = {};
  for (int i = 0; i < size; i += kLanes) {
    Floats v = load(x + i, size - i);
    squares = fma(v, v, squares);
  }
  return 1.0f / std::sqrt(sum(squares) / float(size) + eps);
}

// to = x / rms(x) · weight, computed in fp32 and rounded once.
template <typename T>
void normalize(const T* x, const T* weight, int size, float eps, T* to) {
  const float scale = inverse_rms(x, size, eps);
  for (int i = 0; i < size; i += kLanes)
    store(to + i, load(x + i, size - i) * scale * load(weight + i, size - i), size - i);
}

// x += delta (if given), in place, then to = norm(x), for rows [M, H] that follow each other.
template <typename T>
void add_norm(T* x, const T* delta, const T* weight, float eps, int num_rows, int size, T* to) {
  share(num_rows, rows_worth_sharing(size), [&](int row) {
    T* own = x + int64_t{row} * size;
    if (delta != nullptr)
      for (int i = 0; i < size; i += kLanes)
        store(own + i, load(own + i, size - i) + load(delta + int64_t{row} * size + i, size - i), size - i);
    normalize(own, weight, size, eps, to + int64_t{row} * size);
  });
}

}  // namespace moerelay

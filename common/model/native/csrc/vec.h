// Vectors of 16 floats, and the two element types that weights and activations have.
//
// The same source is compiled once per instruction set (see setup.py). Only `fma` and the products name instructions;
// everything else is written in the compilers' portable vector extension. Nothing here is allowed to be contracted or
// reordered (-ffp-contract=off, no fast-math): a row's bits must not depend on which template computed it.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moerelay {

static_assert(std::endian::native == std::endian::little, "words and routing rows are put together low byte first");

constexpr int kLanes = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

// What one register holds: a vector, or a part of it. The loop of a product, in which all time is spent, says so itself;
// compilers put vectors that are larger than a register into memory.
#if defined(__AVX512F__)
constexpr int kParts = 1;
#elif defined(__AVX__)
constexpr int kParts = 2;
#else
constexpr int kParts = 4;
#endif
constexpr int kPartBytes = 64 / kParts;

typedef float PartFloats __attribute__((vector_size(kPartBytes)));
typedef uint32_t PartWords __attribute__((vector_size(kPartBytes)));

// The upper half of a float.
struct bf16 {
  uint16_t bits;
};

// Products are taken word by word: a word of 4 bytes is two consecutive bf16 inputs, or one float.
template <typename T>
constexpr int kPerWord = 4 / sizeof(T);

inline Floats splat(float value) { return Floats{} + value; }
inline Words splat(uint32_t value) { return Words{} + value; }

template <typename V>
inline V as(Floats v) {
  return reinterpret_cast<V>(v);
}
inline Floats as_floats(Words v) { return reinterpret_cast<Floats>(v); }

inline float to_float(float value) { return value; }
inline float to_float(bf16 value) {
  uint32_t word = uint32_t{value.bits} << 16;
  float result;
  std::memcpy(&result, &word, 4);
  return result;
}

inline Words load_words(const void* from) {
  Words v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline Floats load(const float* from) {
  Floats v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline Floats load(const bf16* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  return as_floats(__builtin_convertvector(halves, Words) << 16);
}

// The first `count` elements; zeros behind them.
template <typename T>
inline Floats load(const T* from, int count) {
  if (count >= kLanes) return load(from);
  T buffer[kLanes] = {};
  std::memcpy(buffer, from, count * sizeof(T));
  return load(buffer);
}

// To the nearest bf16, ties to even; NaN stays NaN.
inline Halves to_halves(Floats v) {
  Words word = as<Words>(v);
  Words rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
  Words quiet_nan = splat(0x7fc0u);
  return __builtin_convertvector(v == v ? rounded : quiet_nan, Halves);
}

inline void store(float* to, Floats v) { std::memcpy(to, &v, sizeof v); }
inline void store(bf16* to, Floats v) {
  Halves halves = to_halves(v);
  std::memcpy(to, &halves, sizeof halves);
}

template <typename T>
inline void store(T* to, Floats v, int count) {
  if (count >= kLanes) return store(to, v);
  T buffer[kLanes];
  store(buffer, v);
  std::memcpy(to, buffer, count * sizeof(T));
}

// What `v` becomes when it is stored as a T and read again.
template <typename T>
inline Floats rounded_to(Floats v);
template <>
inline Floats rounded_to<float>(Floats v) {
  return v;
}
template <>
inline Floats rounded_to<bf16>(Floats v) {
  return as_floats(__builtin_convertvector(to_halves(v), Words) << 16);
}

inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  union Both {
    Floats all;
    __m256 half[2];
  } x{a}, y{b}, z{c};
  for (int i = 0; i < 2; ++i) z.half[i] = _mm256_fmadd_ps(x.half[i], y.half[i], z.half[i]);
  return z.all;
#else
  return a * b + c;
#endif
}

// An `a` that is no number stays what it is.
inline Floats max(Floats a, Floats b) { return b > a ? b : a; }
inline Floats min(Floats a, Floats b) { return b < a ? b : a; }

// Halves of the lanes folded onto each other, 8 apart first: sums and maxima always take the same order.
template <typename Fold>
inline float folded(Floats v, Fold&& fold) {
  v = fold(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = fold(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  v = fold(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  v = fold(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
  return v[0];
}

inline float sum(Floats v) {
  return folded(v, [](Floats a, Floats b) { return a + b; });
}

inline float highest(Floats v) {
  return folded(v, [](Floats a, Floats b) { return max(a, b); });
}

// acc + a · w of floats.
inline PartFloats add_product(PartFloats acc, PartWords a, PartWords w) {
#if defined(__AVX512F__)
  return (PartFloats)_mm512_fmadd_ps((__m512)a, (__m512)w, (__m512)acc);
#elif defined(__FMA__)
  return (PartFloats)_mm256_fmadd_ps((__m256)a, (__m256)w, (__m256)acc);
#else
  return (PartFloats)a * (PartFloats)w + acc;
#endif
}

// acc + a · w of pairs, where there is an instruction for them; it takes the upper half of a pair first.
#if defined(__AVX512BF16__)
constexpr bool kTakesPairs = true;
inline PartFloats add_pair_product(PartFloats acc, PartWords a, PartWords w) {
  return (PartFloats)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)w);
}
#else
constexpr bool kTakesPairs = false;
PartFloats add_pair_product(PartFloats acc, PartWords a, PartWords w);  // not to be called
#endif

// e^x to about one unit in the last place; 0 below the smallest normal result, infinity near the largest. The range is
// reduced by multiples of ln 2 in two parts (Cody & Waite), the rest is Cephes' polynomial of degree 5.
inline Floats exp(Floats x) {
  const Floats lowest = splat(-87.33654f), largest = splat(88.3762626647950f);
  Floats clamped = max(min(x, largest), lowest);
  const Floats shifter = splat(12582912.0f);  // 1.5 · 2^23: adding it leaves the nearest whole number in the low bits
  Floats shifted = fma(clamped, splat(1.44269504088896341f), shifter);
  Floats n = shifted - shifter;
  Floats r = fma(n, splat(-0.693359375f), clamped);
  r = fma(n, splat(2.12194440e-4f), r);
  Floats p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  Floats result = fma(p, r * r, r) + 1.0f;
  Words exponent = (as<Words>(shifted) - as<Words>(shifter)) << 23;
  result = as_floats(as<Words>(result) + exponent);
  Floats zero = {};
  result = x < lowest ? zero : result;
  result = x > largest ? splat(HUGE_VALF) : result;
  return x == x ? result : x;
}

}  // namespace moerelay

// Copies between the slots of a paged cache and contiguous memory: what a handoff reads and writes.
//
// The C library's copy takes twice as long for pieces of this size: reading, it waits for memory that nobody asked for
// in time (the pieces are too short for the processor to foresee the next one), and writing, it first reads what it
// will overwrite.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moerelay {

// Planes of slots, one behind the other in memory, and which slots of each are meant, in order.
struct Slots {
  char* base;
  int64_t plane_bytes;
  int num_planes;
  int64_t slot_bytes;
  const int64_t* slots;
  int64_t num_slots;

  // Calls `piece` with the address and the bytes of each run of consecutive slots, plane by plane.
  template <typename Piece>
  void each_run(const Piece& piece) const {
    for (int plane = 0; plane < num_planes; ++plane) {
      char* first = base + plane * plane_bytes;
      for (int64_t begin = 0, end = 0; begin < num_slots; begin = end) {
        for (end = begin + 1; end < num_slots && slots[end] == slots[end - 1] + 1;) ++end;
        piece(first + slots[begin] * slot_bytes, (end - begin) * slot_bytes);
      }
    }
  }
};

constexpr int64_t kCacheLine = 64;
// Bytes that are asked for ahead of those which are copied.
constexpr int64_t kAhead = 2048;

inline void copy_line(const char* from, char* to) {
  typedef char Line __attribute__((vector_size(kCacheLine), aligned(1)));
  *reinterpret_cast<Line*>(to) = *reinterpret_cast<const Line*>(from);
}

// To memory that is read soon.
inline void copy_ahead(const char* from, char* to, int64_t size) {
  int64_t i = 0;
  for (; i + kCacheLine <= size; i += kCacheLine) {
    __builtin_prefetch(from + i + kAhead, 0, 2);  // as far as the second level
    copy_line(from + i, to + i);
  }
  std::memcpy(to + i, from + i, size - i);
}

// To memory that is not read soon: it is not fetched into the cache to be overwritten there.
inline void copy_past_cache(const char* from, char* to, int64_t size) {
#if defined(__x86_64__)
  const int64_t head = std::min<int64_t>(size, -reinterpret_cast<intptr_t>(to) & (kCacheLine - 1));
  std::memcpy(to, from, head);
  int64_t i = head;
  for (; i + kCacheLine <= size; i += kCacheLine)
    for (int part = 0; part < kCacheLine; part += sizeof(__m256i))
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i + part),
                          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + part)));
  std::memcpy(to + i, from + i, size - i);
#else
  std::memcpy(to, from, size);
#endif
}

inline void gather(const Slots& from, char* to) {
  from.each_run([&](const char* run, int64_t size) {
    copy_ahead(run, to, size);
    to += size;
  });
}

inline void scatter(const Slots& to, const char* from) {
  to.each_run([&](char* run, int64_t size) {
    copy_past_cache(from, run, size);
    from += size;
  });
#if defined(__x86_64__)
  _mm_sfence();  // whoever is told that the slots are written finds them so
#endif
}

}  // namespace moerelay

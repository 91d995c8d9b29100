// Attention of a batch, shared out among the threads.
#pragma once

#include "attention.h"

namespace moerelay {

// What one thread computes at a time: rows [first, first + num_rows) of some KV heads of a sequence.
struct AttentionUnit {
  int sequence, kv_head, num_kv_heads, first, num_rows;
  int64_t work;  // rows × keys
};

// How many keys the tokens of a sequence look at, up to and with the token at `position`.
template <typename T>
int64_t num_keys(const Attention<T>& attention, const Queries& queries, int64_t position) {
  const int64_t known = position + 1;
  return attention.window ? std::min(known, attention.window + queries.num_tokens) : known;
}

// How many KV heads of a sequence go into one unit: as many as possible, because their keys and values lie side by side
// in memory, but not so many that threads would wait for the one with the longest sequence. Results do not depend on it.
template <typename T>
int heads_per_unit(const Attention<T>& attention, const Queries* sequences, int num_sequences) {
  int64_t longest = 0, total = 0;
  for (int s = 0; s < num_sequences; ++s) {
    const Queries& queries = sequences[s];
    const int64_t keys = num_keys(attention, queries, queries.start + queries.num_tokens - 1);
    const int64_t work = keys * queries.num_tokens;
    if (attention.num_rows(queries) < kQueryRows) longest = std::max(longest, work);
    total += work;
  }
  int best = 1;
  int64_t shortest = INT64_MAX;
  // As if all of the work came in units of the longest sequence's size.
  for (int heads = 1; longest > 0 && heads <= attention.num_kv_heads; ++heads) {
    const int64_t num_units = (total * attention.num_kv_heads - 1) / (longest * heads) + 1;
    const int64_t time = ((num_units - 1) / num_threads() + 1) * heads;
    if (time > shortest) continue;
    best = heads;
    shortest = time;
  }
  return best;
}

// The units of a batch, those with the most work first, so that no thread is left alone with one of them.
template <typename T>
std::vector<AttentionUnit> units_of(const Attention<T>& attention, const Queries* sequences, int num_sequences) {
  std::vector<AttentionUnit> units;
  const int most_heads = heads_per_unit(attention, sequences, num_sequences);
  for (int s = 0; s < num_sequences; ++s) {
    const Queries& queries = sequences[s];
    const int all_rows = attention.num_rows(queries);
    for (int first = 0; first < all_rows; first += kQueryRows) {
      const int num_rows = std::min(kQueryRows, all_rows - first);
      const int most = all_rows > kQueryRows ? 1 : std::min(most_heads, kQueryRows / num_rows);
      const int64_t last = queries.start + (first + num_rows - 1) / attention.group();
      const int64_t work = num_keys(attention, queries, last) * num_rows;
      for (int head = 0; head < attention.num_kv_heads; head += most) {
        const int num_heads = std::min(most, attention.num_kv_heads - head);
        units.push_back({s, head, num_heads, first, num_rows, work * num_heads});
      }
    }
  }
  std::sort(units.begin(), units.end(), [](const auto& a, const auto& b) { return a.work > b.work; });
  return units;
}

template <typename T>
void attend(const Attention<T>& attention, const Queries* sequences, int num_sequences) {
  const std::vector<AttentionUnit> units = units_of(attention, sequences, num_sequences);
  share(int(units.size()), 1, [&](int i) {
    static thread_local Workspace<T> space;
    const AttentionUnit& unit = units[i];
    space.fit(attention, unit.num_kv_heads);
    RowBlock<T>(attention, sequences[unit.sequence], unit.kv_head, unit.num_kv_heads, unit.first, unit.num_rows, space)
        .run();
  });
}

}  // namespace moerelay

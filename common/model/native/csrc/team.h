// Threads that share the work of one caller.
//
// A forward pass is some hundred short pieces of work with a little Python between them. Putting threads to sleep in
// between costs more than the pieces (waking one takes a virtual machine up to half a millisecond), and letting them
// spin for good takes cores from the router and the clients. So they spin for a moment, then offer their core to others
// while they go on looking, and sleep when nothing has come for a few milliseconds. The caller never waits for a thread
// that has not taken part: what that one would have done is done by then.
//
// `turn_` is odd while there is work. A member that sees an odd turn counts itself in and looks again before it touches
// anything; the caller makes the turn even and then waits until nobody is counted. One of the two sees the other, as both
// write before they read. A member counts itself as asleep before it waits for the turn it has seen to change, so that
// a caller which does not see it has changed the turn already. Closing a turn wakes nobody: there is nothing to do.
#pragma once

#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

namespace moerelay {

class Team {
 public:
  // The team of the calling thread, with as many members as torch would use from here (the caller is one of them).
  static Team& mine() {
    static thread_local Team team;
    team.resize(omp_get_max_threads());
    return team;
  }

  ~Team() { resize(1); }

  int size() const { return int(members_.size()) + 1; }

  // Calls body(i) for 0 <= i < count, on any member, `run` neighbours at a time; returns when all have returned. Throws
  // what one of them threw.
  template <typename Body>
  void share(int count, int run, const Body& body) {
    if (members_.empty() || count <= run) {
      for (int i = 0; i < count; ++i) body(i);
      return;
    }
    work_ = [](const void* context, int first, int end) {
      for (int i = first; i < end; ++i) (*static_cast<const Body*>(context))(i);
    };
    context_ = &body;
    count_ = count;
    run_ = run;
    next_.store(0, std::memory_order_relaxed);
    turn_.fetch_add(1);
    if (num_asleep_.load() > 0) turn_.notify_all();
    take_part();
    turn_.fetch_add(1);
    Patience patience;
    while (num_active_.load() > 0) patience.pass();
    if (has_failed_.exchange(false)) std::rethrow_exception(failure_);
  }

 private:
  // Looks again and again, first as fast as possible, then with offers to whoever else wants the core.
  class Patience {
   public:
    void pass() {
      if (num_looks_ < kLooksAlone) {
        ++num_looks_;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
        return;
      }
      if (num_offers_++ == 0) begun_ = std::chrono::steady_clock::now();
      sched_yield();
    }
    bool is_over() const {
      return num_offers_ % 16 == 15 && std::chrono::steady_clock::now() - begun_ > kLongest;
    }

   private:
    static constexpr int kLooksAlone = 1000;
    static constexpr std::chrono::milliseconds kLongest{3};
    int num_looks_ = 0;
    unsigned num_offers_ = 0;
    std::chrono::steady_clock::time_point begun_;
  };

  Team() = default;

  void resize(int size) {
    if (size == size_) return;
    size_ = size;
    ending_.store(true);
    turn_.fetch_add(2);
    turn_.notify_all();
    for (std::thread& member : members_) member.join();
    members_.clear();
    ending_.store(false);
    const uint32_t turn = turn_.load();
    try {
      for (int i = 1; i < size; ++i) members_.emplace_back([this, turn] { serve(turn); });
    } catch (const std::system_error&) {
      // The system grants no more threads: those that there are do it.
    }
  }

  void serve(uint32_t seen) {
    for (;;) {
      const uint32_t turn = wait_for_another_than(seen);
      if (ending_.load()) return;
      seen = turn;
      if (turn % 2 == 0) continue;
      num_active_.fetch_add(1);
      // Either the caller sees this member in the count, or the member sees that the turn is over.
      if (turn_.load() == turn) take_part();
      num_active_.fetch_sub(1);
    }
  }

  uint32_t wait_for_another_than(uint32_t seen) {
    Patience patience;
    for (;;) {
      const uint32_t turn = turn_.load();
      if (turn != seen) return turn;
      if (patience.is_over()) {
        num_asleep_.fetch_add(1);
        turn_.wait(seen);
        num_asleep_.fetch_sub(1);
        patience = {};
      }
      patience.pass();
    }
  }

  void take_part() noexcept {
    for (;;) {
      const int first = next_.fetch_add(run_, std::memory_order_relaxed);
      if (first >= count_) return;
      try {
        work_(context_, first, std::min(first + run_, count_));
      } catch (...) {
        if (!has_failed_.exchange(true)) failure_ = std::current_exception();
      }
    }
  }

  // What members look at while they wait has a cache line of its own.
  alignas(64) std::atomic<uint32_t> turn_{0};
  alignas(64) std::atomic<int> next_{0};
  alignas(64) std::atomic<int> num_active_{0};
  std::atomic<int> num_asleep_{0};
  std::atomic<bool> ending_{false};
  std::atomic<bool> has_failed_{false};
  std::exception_ptr failure_;
  void (*work_)(const void*, int, int) = nullptr;
  const void* context_ = nullptr;
  int count_ = 0;
  int run_ = 1;
  int size_ = 1;
  std::vector<std::thread> members_;
};

// Of the caller's team.
inline int num_threads() { return Team::mine().size(); }

// body(i) for 0 <= i < count on the caller's team.
template <typename Body>
void share(int count, int run, const Body& body) {
  Team::mine().share(count, run, body);
}

}  // namespace moerelay

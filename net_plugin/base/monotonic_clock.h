// Monotonic time, for deadlines and spinning, and the wall clock.
#pragma once

#include <algorithm>
#include <cstdint>
#include <ctime>

namespace bagua_net {

inline std::int64_t clock_ns(clockid_t clock) {
  timespec now;
  ::clock_gettime(clock, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1000000000 + now.tv_nsec;
}

inline std::int64_t monotonic_ns() { return clock_ns(CLOCK_MONOTONIC); }

inline std::int64_t monotonic_us() { return monotonic_ns() / 1000; }

inline std::int64_t monotonic_ms() { return monotonic_us() / 1000; }

// Up to 10 ms behind monotonic_ms, for a quarter of its cost.
inline std::int64_t coarse_monotonic_ms() { return clock_ns(CLOCK_MONOTONIC_COARSE) / 1000000; }

// Since 1970.
inline std::int64_t unix_ns() { return clock_ns(CLOCK_REALTIME); }

// ActiveClock: time that stands still while nobody looks. What a peer has to do within a limit is measured with it: a
// process that is stopped (SIGSTOP, a paused virtual machine, a machine that sleeps), gets no CPU or does not call
// finds every limit passed, with what came meanwhile unread and its own part of the exchange undone. A gap between two
// looks counts as `most_ms`; its owner looks more often than that while it measures, and before it judges. The caller
// guards it.
class ActiveClock {
 public:
  explicit ActiveClock(std::int64_t most_ms) : most_ms_(most_ms) {}

  // now_ms: monotonic time, as for at().
  std::int64_t look(std::int64_t now_ms) {
    if (looked_ms_ != 0) paused_ms_ += std::max<std::int64_t>(now_ms - looked_ms_ - most_ms_, 0);
    looked_ms_ = now_ms;
    return at(now_ms);
  }
  // Just after a look.
  std::int64_t at(std::int64_t now_ms) const { return now_ms - paused_ms_; }

 private:
  const std::int64_t most_ms_;
  std::int64_t looked_ms_ = 0;
  std::int64_t paused_ms_ = 0;
};

}  // namespace bagua_net

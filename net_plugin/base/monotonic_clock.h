// Monotonic time, for deadlines and spinning, and the wall clock.
#pragma once

#include <ctime>

#include <cstdint>

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

}  // namespace bagua_net

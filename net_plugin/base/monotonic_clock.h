// Monotonic time, for deadlines and spinning.
#pragma once

#include <ctime>

#include <cstdint>

namespace bagua_net {

inline std::int64_t monotonic_ns() {
  timespec now;
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1000000000 + now.tv_nsec;
}

inline std::int64_t monotonic_us() { return monotonic_ns() / 1000; }

inline std::int64_t monotonic_ms() { return monotonic_us() / 1000; }

// Up to 10 ms behind monotonic_ms, for a quarter of its cost.
inline std::int64_t coarse_monotonic_ms() {
  timespec now;
  ::clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1000 + now.tv_nsec / 1000000;
}

}  // namespace bagua_net

// What tests of comms share: CPUs for their workers, messages that differ in every byte, and a deadline.
#pragma once

#include <sched.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/monotonic_clock.h"
#include "support/byte_patterns.h"
#include "support/check.h"

namespace bagua_net {

// Only decides when a hang is called one.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::int64_t kDeadlineMs = 120000;
#else
constexpr std::int64_t kDeadlineMs = 30000;
#endif

inline cpu_set_t any_cpu() {
  cpu_set_t set;
  sched_getaffinity(0, sizeof set, &set);
  return set;
}

UNINSTRUMENTED inline void write_message(std::uint8_t* message, std::size_t number, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i) message[i] = static_cast<std::uint8_t>(number * 131 + i * 7 + i / 251);
}
inline std::vector<std::uint8_t> make_message(std::size_t number, std::size_t bytes) {
  std::vector<std::uint8_t> message(bytes);
  write_message(message.data(), number, bytes);
  return message;
}

class Deadline {
 public:
  void check(const char* what) const {
    if (monotonic_ms() > end_ms_) check::fail(__FILE__, __LINE__, std::string("waited in vain for ") + what);
  }

 private:
  const std::int64_t end_ms_ = monotonic_ms() + kDeadlineMs;
};

template <typename Condition>
inline void wait_until(Condition condition, const char* what) {
  const Deadline deadline;
  while (!condition()) {
    deadline.check(what);
    sched_yield();
  }
}

}  // namespace bagua_net

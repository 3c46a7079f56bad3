// What tests of comms share: CPUs for their workers, messages that differ in every byte, requests, and a deadline.
#pragma once

#include <sched.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "base/monotonic_clock.h"
#include "support/byte_patterns.h"
#include "support/check.h"
#include "support/pause.h"
#include "transport/chunks/request.h"

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
  Pause pause;
  while (!condition()) {
    deadline.check(what);
    pause();
  }
}

inline bool is_done(Request* request) {
  bool done = false;
  std::size_t bytes = 0;
  CHECK_OK(request->test(&done, &bytes));
  return done;
}

// Tests in turn, as NCCL does; the first error, or ok when all are done. Those that are nullptr were done before.
inline Status outcome(std::vector<Request*> requests) {
  Status status;
  wait_until(
      [&] {
        bool all_done = true;
        for (Request*& request : requests) {
          bool done = request == nullptr;
          std::size_t bytes = 0;
          if (!done && status.is_ok()) status = request->test(&done, &bytes);
          if (done) request = nullptr;
          all_done = all_done && done;
        }
        return all_done || !status.is_ok();
      },
      "requests");
  return status;
}
inline Status outcome(Request* request) { return outcome(std::vector<Request*>{request}); }

inline void check_contains(const std::string& text, const std::string& part) {
  if (text.find(part) == std::string::npos) check::fail(__FILE__, __LINE__, "no \"" + part + "\" in: " + text);
}
inline void check_names(const Status& status, const std::string& part) {
  CHECK(status.code() == StatusCode::kRemoteError);
  check_contains(status.message(), part);
}

// For long runs by hand: how many faults instead of the usual number.
inline std::uint64_t fault_count(std::uint64_t usual) {
  const char* const asked = std::getenv("BAGUA_TEST_FAULTS");
  return asked != nullptr ? std::strtoull(asked, nullptr, 10) : usual;
}

}  // namespace bagua_net

// The monotonic clock of a test's process, which the test can stop or set forward: a deadline passes when the test says
// so, and not because the machine was busy. It is read by everything in the process, a loaded plugin as well.
//
// Who waits in the kernel until a deadline sees that it has passed when something else wakes it, such as the next
// attempt to connect.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <ctime>

namespace test_clock {

inline std::atomic<bool> passes{true};
inline std::atomic<std::int64_t> skipped_ns{0};
inline std::atomic<std::int64_t> last_ns{0};

// While it stands still, it says what it said last, or that and what is skipped.
inline void stop() {
  timespec now;
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  passes = false;
}
inline void go_on() { passes = true; }
inline void skip_ms(std::int64_t ms) {
  skipped_ns += ms * 1'000'000;
  if (!passes) last_ns += ms * 1'000'000;
}

}  // namespace test_clock

// Stands before that of the C library, for loaded libraries as well. Not inline, which would make it a weak symbol like
// that of a sanitizer's runtime, and the linker takes the first of these: one file of an executable may include this.
extern "C" __attribute__((used, visibility("default"))) int clock_gettime(clockid_t clock, timespec* time) noexcept {
  const auto result = static_cast<int>(::syscall(SYS_clock_gettime, clock, time));
  if (clock != CLOCK_MONOTONIC && clock != CLOCK_MONOTONIC_COARSE) return result;
  if (test_clock::passes) {
    test_clock::last_ns = time->tv_sec * 1'000'000'000 + time->tv_nsec + test_clock::skipped_ns;
  }
  const std::int64_t now_ns = test_clock::last_ns;
  *time = {now_ns / 1'000'000'000, now_ns % 1'000'000'000};
  return result;
}

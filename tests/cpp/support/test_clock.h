// The monotonic clock of a test's process, which the test can stop or set forward: a deadline passes when the test says
// so, and not because the machine was busy. It is read by everything in the process, a loaded plugin as well.
//
// A step is a pause: as if the process had been stopped meanwhile. Or time passes quickly: threads that wait for
// sockets until a deadline have waited at once.
#pragma once

#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <ctime>
#include <utility>

namespace test_clock {

inline std::atomic<bool> passes{true};
inline std::atomic<std::int64_t> skipped_ns{0};
inline std::atomic<std::int64_t> last_ns{0};
inline std::atomic<int> hurry_ms{0};  // that are to pass quickly

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
// Returns when they have passed, or when nobody waits for a deadline.
inline void pass_ms(int ms) {
  int left_ms = 0;
  int idle = 0;
  for (hurry_ms = ms; hurry_ms > 0 && idle < 2000; ++idle) {
    const int now_ms = hurry_ms;
    if (std::exchange(left_ms, now_ms) != now_ms) idle = 0;
    ::usleep(1000);
  }
  skip_ms(hurry_ms.exchange(0));
}

}  // namespace test_clock

// Stands before those of the C library, for loaded libraries as well. Not inline, which would make it a weak symbol
// like that of a sanitizer's runtime, and the linker takes the first of these: one file of an executable may include
// this.
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

extern "C" __attribute__((used, visibility("default"))) int epoll_wait(int epoll, epoll_event* events, int most,
                                                                       int timeout_ms) {
  int left_ms = test_clock::hurry_ms;
  const int step_ms = std::min({timeout_ms < 0 ? left_ms : timeout_ms, left_ms, 100});
  const auto ready =
      static_cast<int>(::syscall(SYS_epoll_pwait, epoll, events, most, step_ms > 0 ? 0 : timeout_ms, nullptr, 8));
  if (ready != 0 || step_ms <= 0) return ready;
  if (test_clock::hurry_ms.compare_exchange_strong(left_ms, left_ms - step_ms)) test_clock::skip_ms(step_ms);
  return 0;
}

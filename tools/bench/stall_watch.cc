#include "bench/stall_watch.h"

#include <sched.h>
#include <unistd.h>

#include "base/monotonic_clock.h"

namespace bagua_net::bench {
namespace {

// Between two looks at the clock, so that the busy loop makes no clock call per pass. Few, because giving the CPU away
// takes milliseconds where others want it, and the deadline is to hold there, too.
constexpr std::int64_t kPassesPerClockLook = 16;
// In a long stall, and where a message takes so long in any case, each of these looks leaves the CPU to others.
constexpr std::int64_t kSleepAfterMs = 100;
constexpr useconds_t kSleepUs = 5000;

}  // namespace

bool StallWatch::idle() {
  // NCCL's progress thread: it gives the CPU away after a pass in which nothing moved.
  sched_yield();
  if (++idle_passes_ < kPassesPerClockLook) return false;
  idle_passes_ = 0;
  const std::int64_t now = monotonic_ms();
  if (idle_since_ms_ == 0) idle_since_ms_ = now;
  const std::int64_t idle_ms = now - idle_since_ms_;
  if (idle_ms > kSleepAfterMs) ::usleep(kSleepUs);
  return idle_ms > timeout_ms_;
}

}  // namespace bagua_net::bench

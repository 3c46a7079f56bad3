#include "bench/stall_watch.h"

#include <sched.h>
#include <unistd.h>

#include "base/monotonic_clock.h"

namespace bagua_net::bench {
namespace {

// Between two looks at the clock, so that the busy loop makes no clock call per pass. Few, because giving the CPU away
// takes milliseconds where others want it, and the deadline is to hold there, too.
constexpr std::int64_t kPassesPerClockLook = 16;
// When no message has completed for so long, something is wrong: passes then sleep, and leave the CPU to others.
constexpr std::int64_t kSleepAfterMs = 100;
constexpr useconds_t kSleepUs = 500;

}  // namespace

bool StallWatch::idle() {
  if (is_asleep_) {
    ::usleep(kSleepUs);
  } else {
    // NCCL's progress thread: it gives the CPU away after a pass in which nothing moved.
    sched_yield();
    if (++idle_passes_ < kPassesPerClockLook) return false;
    idle_passes_ = 0;
  }
  const std::int64_t now = monotonic_ms();
  if (idle_since_ms_ == 0) idle_since_ms_ = now;
  is_asleep_ = now - idle_since_ms_ > kSleepAfterMs;
  return now - idle_since_ms_ > timeout_ms_;
}

}  // namespace bagua_net::bench

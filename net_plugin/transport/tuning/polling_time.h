// PollingTime: how long an I/O thread polls for work between hosts before it sleeps. Waking up takes 20 to 100 us,
// which a message that is waited for cannot afford; polling costs a core. So a thread polls long as long as its waits
// end sooner, and otherwise gives up soon: a slow network, or a job that computes, lets it sleep. Driven by the thread;
// the clock is passed in.
#pragma once

#include <algorithm>
#include <cstdint>

namespace bagua_net {

class PollingTime {
 public:
  // Measured between two emulated hosts, with 20 us in all cases against 200: all-reduce of 256 KiB 203 and 137 us,
  // of 1 MiB 750 and 235 us (docs/design/performance.md).
  static constexpr int kLongUs = 200;
  static constexpr int kShortUs = 20;

  // There is work, after the thread had none for so long.
  void add_wait(std::int64_t us) {
    usual_us_ = (3 * usual_us_ + static_cast<int>(std::min<std::int64_t>(us, kMaxCountedUs))) / 4;
  }
  int us() const { return usual_us_ <= kLongUs ? kLongUs : kShortUs; }

 private:
  // One long pause makes the next wait short, and a few short waits after it make it long again.
  static constexpr int kMaxCountedUs = 4 * kLongUs;

  int usual_us_ = 0;
};

}  // namespace bagua_net

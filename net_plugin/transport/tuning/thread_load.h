// ThreadLoad: what part of its time a thread spends on moving bytes. NCCL's progress thread serves all channels of a
// rank. It moves occasional medium-sized messages itself, because waking a worker costs more than the copy. If copying
// takes a large part of its time, it wakes workers.
//
// One per thread, used by that thread only. Data streams report what they move, and send comms what they hand to
// workers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace bagua_net {

class ThreadLoad {
 public:
  // The calling thread's own.
  static ThreadLoad& of_this_thread();

  // Shorter moves are not measured, because reading the clock would cost too much.
  static constexpr std::size_t kMinBytes = 16384;

  // The thread moved bytes itself, from begin_ns to end_ns.
  void add_moved(std::size_t bytes, std::int64_t begin_ns, std::int64_t end_ns);
  // The thread handed bytes to workers. They count with the time that the thread itself would have needed.
  void add_handed_over(std::size_t bytes, std::int64_t now_ns);

  // Copying takes, or would take, a large part of the thread's time.
  bool is_busy() const { return busy_; }

 private:
  void close_window(std::int64_t now_ns);

  std::int64_t window_start_ns_ = 0;
  double busy_ns_ = 0;               // in this window, handed-over bytes included
  double nanoseconds_per_byte_ = 0;  // of the thread's own copying; moving average
  bool busy_ = false;
};

// PollingTime: how long an I/O thread polls for work between hosts before it sleeps. Waking up takes 20 to 100 us,
// which a message that is waited for cannot afford; polling costs a core. So a thread polls long as long as its waits
// end sooner, and otherwise gives up soon: a slow network, or a job that computes, lets it sleep. Driven by the thread;
// the clock is passed in.
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

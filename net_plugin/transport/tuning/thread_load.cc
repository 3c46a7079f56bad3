#include "transport/tuning/thread_load.h"

namespace bagua_net {
namespace {

// Long enough for several messages of each channel, and short compared with a collective of a few MiB.
constexpr std::int64_t kWindowNs = 300000;

// The thread always spends time on polling sockets that have no data yet. In an all-reduce of 256 KiB on two GPUs it
// copies for 0.4 of its time, and workers reduce the total time by a third (docs/design/performance.md).
constexpr double kBusyShare = 0.3;

constexpr double kAverageWeight = 0.1;

}  // namespace

ThreadLoad& ThreadLoad::of_this_thread() {
  static thread_local ThreadLoad load;
  return load;
}

void ThreadLoad::add_moved(std::size_t bytes, std::int64_t begin_ns, std::int64_t end_ns) {
  const auto nanoseconds = static_cast<double>(end_ns - begin_ns);
  const double sample = nanoseconds / static_cast<double>(bytes);
  nanoseconds_per_byte_ =
      nanoseconds_per_byte_ == 0 ? sample : nanoseconds_per_byte_ + kAverageWeight * (sample - nanoseconds_per_byte_);
  busy_ns_ += nanoseconds;
  close_window(end_ns);
}

void ThreadLoad::add_handed_over(std::size_t bytes, std::int64_t now_ns) {
  busy_ns_ += static_cast<double>(bytes) * nanoseconds_per_byte_;
  close_window(now_ns);
}

void ThreadLoad::close_window(std::int64_t now_ns) {
  const std::int64_t length_ns = now_ns - window_start_ns_;
  if (length_ns < kWindowNs) return;
  busy_ = busy_ns_ > kBusyShare * static_cast<double>(length_ns);
  window_start_ns_ = now_ns;
  busy_ns_ = 0;
}

}  // namespace bagua_net

#include "transport/thread_load.h"

namespace bagua_net {
namespace {

// Long enough to see several messages of each channel, short against the life of one collective of a few MiB.
constexpr std::int64_t kWindowNs = 300000;

// All-reduce on two GPUs with eight channels (docs/design/performance.md): with 0.5, messages of a 256 KiB all-reduce
// are handed over too, which loses (229 us against 129); with 0.7, those of a 1 MiB one no longer are (461 us against
// 316): part of the thread's time always goes into looking at sockets that have nothing yet.
constexpr double kSaturatedShare = 0.6;

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
  saturated_ = busy_ns_ > kSaturatedShare * static_cast<double>(length_ns);
  window_start_ns_ = now_ns;
  busy_ns_ = 0;
}

}  // namespace bagua_net

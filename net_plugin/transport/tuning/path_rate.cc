#include "transport/tuning/path_rate.h"

#include <algorithm>

namespace bagua_net {
namespace {

// A sample takes at least so long, and so many times as long as the longest time between two looks at a connection:
// what the others have delivered since their last looks is not counted.
constexpr std::int64_t kMinBusyNs = 40'000'000;
constexpr std::int64_t kMinLooks = 3;

}  // namespace

void PathRate::add(std::uint64_t bytes, std::int64_t begin_ns, std::int64_t end_ns, bool queued) {
  if (end_ns <= begin_ns) return;
  // Of what began in the sample before, the part in this one.
  const std::int64_t counted_ns = end_ns - std::max(begin_ns, measured_ns_);
  if (counted_ns <= 0) return;
  bytes_ += static_cast<double>(bytes) * static_cast<double>(counted_ns) / static_cast<double>(end_ns - begin_ns);
  ++looks_;
  if (queued) ++queued_looks_;
  longest_ns_ = std::max(longest_ns_, counted_ns);
  merge({end_ns - counted_ns, end_ns});
  std::int64_t busy_ns = 0;
  for (const Interval& interval : busy_) busy_ns += interval.end_ns - interval.begin_ns;
  if (busy_ns < std::max(kMinBusyNs, kMinLooks * longest_ns_)) return;
  rates_[samples_++ % rates_.size()] = bytes_ / static_cast<double>(busy_ns);
  least_ = *std::max_element(rates_.begin(), rates_.end());
  most_ = 2 * queued_looks_ >= looks_ ? least_ : std::max(most_, least_);
  measured_ns_ = busy_.back().end_ns;
  bytes_ = 0;
  looks_ = queued_looks_ = 0;
  busy_.clear();
  longest_ns_ = 0;
}

void PathRate::merge(Interval interval) {
  const auto first = std::find_if(busy_.begin(), busy_.end(),
                                  [&interval](const Interval& one) { return one.end_ns >= interval.begin_ns; });
  auto end = first;
  for (; end != busy_.end() && end->begin_ns <= interval.end_ns; ++end) {
    interval.begin_ns = std::min(interval.begin_ns, end->begin_ns);
    interval.end_ns = std::max(interval.end_ns, end->end_ns);
  }
  busy_.insert(busy_.erase(first, end), interval);
}

}  // namespace bagua_net

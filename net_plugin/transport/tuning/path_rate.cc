#include "transport/tuning/path_rate.h"

#include <algorithm>

namespace bagua_net {
namespace {

// A sample takes at least so long, and so many times as long as the longest time between two looks at a connection:
// what the others have delivered since their last looks is not counted.
constexpr std::int64_t kMinBusyNs = 40'000'000;
constexpr std::int64_t kMinGaps = 3;
constexpr std::int64_t kFreshNs = 500'000'000;
// So many bytes for each lost packet: one of 32. TCP itself loses fewer where it finds out what a healthy path takes.
constexpr double kLossyBytes = 32 * 1448;
// At 100 Hz, the slowest that Linux has.
constexpr std::int64_t kTickNs = 10'000'000;
constexpr std::int64_t kOfKernel = 2;
constexpr std::size_t kMostIntervals = 64;
// Of a rate, what is kept with each sample that had no queue: a sample that was too high is forgotten.
constexpr double kKept = 0.99;

}  // namespace

void PathRate::add(const Burst& burst) {
  const std::int64_t end_ns = std::min(burst.end_ns, burst.begin_ns + burst.kernel_busy_ns + 2 * kTickNs);
  // Of what began in the sample before, the part in this one.
  const std::int64_t counted_ns = end_ns - std::max(burst.begin_ns, counted_until_ns_);
  if (counted_ns <= 0) return;
  const double part = static_cast<double>(counted_ns) / static_cast<double>(end_ns - burst.begin_ns);
  bytes_ += part * static_cast<double>(burst.bytes);
  lost_packets_ += part * static_cast<double>(burst.retransmits);
  kernel_busy_ns_ += static_cast<std::int64_t>(part * static_cast<double>(burst.kernel_busy_ns));
  if (!burst.is_over) ++looks_;  // at the end nothing is ever queued
  if (!burst.is_over && burst.queued) ++queued_looks_;
  longest_ns_ = std::max(longest_ns_, counted_ns);
  merge({end_ns - counted_ns, end_ns});
  const std::int64_t taken_ns = std::min(busy_ns_, kOfKernel * kernel_busy_ns_);
  if (taken_ns < std::max(kMinBusyNs, kMinGaps * longest_ns_)) return;
  const bool is_queued = queued_looks_ > 0 && 2 * queued_looks_ >= looks_;
  const bool loses = lost_packets_ * kLossyBytes > bytes_;
  const Sample before = kept_[(samples_ + kept_.size() - 1) % kept_.size()];
  const double reached = bytes_ / static_cast<double>(taken_ns);
  const double rate = is_queued || loses ? reached : std::max(reached, kKept * before.rate);
  const Sample last{rate, busy_.back().end_ns, loses};
  kept_[samples_++ % kept_.size()] = last;
  least_ = std::max(before.rate, last.rate);
  double lowest = last.rate;
  bool is_lossy = false;
  for (const Sample& sample : kept_) {
    if (sample.end_ns == 0 || sample.end_ns < last.end_ns - kFreshNs) continue;
    least_ = std::max(least_, sample.rate);
    lowest = std::min(lowest, sample.rate);
    is_lossy |= sample.is_lossy;
  }
  if (is_lossy) least_ = lowest;
  since_queued_ = is_queued ? 0 : since_queued_ + 1;
  most_ = is_queued ? least_ : std::max(least_, kKept * most_);
  measured_ns_ = counted_until_ns_ = busy_.back().end_ns;
  bytes_ = lost_packets_ = 0;
  looks_ = queued_looks_ = 0;
  busy_.clear();
  busy_ns_ = kernel_busy_ns_ = longest_ns_ = 0;
}

void PathRate::merge(Interval interval) {
  auto first = busy_.end();
  while (first != busy_.begin() && (first - 1)->end_ns >= interval.begin_ns) --first;
  auto end = first;
  for (; end != busy_.end() && end->begin_ns <= interval.end_ns; ++end) {
    interval.begin_ns = std::min(interval.begin_ns, end->begin_ns);
    interval.end_ns = std::max(interval.end_ns, end->end_ns);
    busy_ns_ -= end->length_ns();
  }
  busy_ns_ += interval.length_ns();
  busy_.insert(busy_.erase(first, end), interval);
  if (busy_.size() <= kMostIntervals) return;
  const auto kept = busy_.begin() + kMostIntervals / 2;
  counted_until_ns_ = (kept - 1)->end_ns;
  busy_.erase(busy_.begin(), kept);
}

}  // namespace bagua_net

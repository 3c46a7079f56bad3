#include "transport/tuning/rate_estimator.h"

#include <algorithm>
#include <utility>

namespace bagua_net {
namespace {

// The kernel counts busy time in ticks of up to 10 ms.
constexpr std::int64_t kMinBusyUs = 50'000;
constexpr int kMinRoundTrips = 2;
constexpr double kAverageWeight = 0.5;
// A stream that defers to others delivers nothing that could correct its rate. After this time it is tried again.
constexpr std::int64_t kMeasuredIsOldNs = 1'000'000'000;
// A trial that takes this share of the time that the old rate says has confirmed it.
constexpr double kSameRate = 0.5;

// A noticeable part of the shortest sample.
bool takes_long_to_fill(const Delivery& delivery) { return delivery.least_round_trip_us > kMinBusyUs / 10; }

}  // namespace

void RateEstimator::look(const Delivery& delivery, std::int64_t now_ns) {
  sample(delivery, now_ns);
  judge_trial(delivery, now_ns);
  delivered_ = delivery.bytes;
  pace_ = {measured_, 1e3 * static_cast<double>(delivery.least_round_trip_us),
           trial_end_ == 0 && now_ns - measured_ns_ > kMeasuredIsOldNs};
  // On shorter paths, TCP adapts faster than the stream is sampled, which is every 2 ms.
  if (is_long(delivery) && (measured_ == 0 || delivery.permitted_bytes_per_ns < measured_)) {
    pace_.bytes_per_ns = delivery.permitted_bytes_per_ns;
    pace_.is_old = false;
  }
}

void RateEstimator::begin_trial(std::size_t under_way, std::int64_t now_ns) {
  if (!pace_.is_old || measured_ == 0) return;
  trial_end_ = delivered_ + under_way;
  trial_ns_ = now_ns;
  trial_expected_ns_ = static_cast<double>(under_way) / measured_;
  pace_.is_old = false;
}

void RateEstimator::judge_trial(const Delivery& delivery, std::int64_t now_ns) {
  if (trial_end_ == 0) return;
  const bool is_slow = static_cast<double>(now_ns - trial_ns_) >= kSameRate * trial_expected_ns_;
  if (!is_slow && delivery.bytes < trial_end_) return;
  trial_end_ = 0;
  if (is_slow) measured_ns_ = now_ns;  // the old rate still holds
}

void RateEstimator::sample(const Delivery& delivery, std::int64_t now_ns) {
  app_limited_ |= !is_queued(delivery);
  if (!begin_.has_value()) {
    began_app_limited_ = takes_long_to_fill(delivery);
    begin_ = delivery;
    return;
  }
  const std::int64_t busy_us = delivery.busy_us - begin_->busy_us;
  if (busy_us < std::max(kMinBusyUs, kMinRoundTrips * delivery.least_round_trip_us)) return;
  const double rate = static_cast<double>(delivery.bytes - begin_->bytes) / (1e3 * static_cast<double>(busy_us));
  if (!app_limited_ && !began_app_limited_) {
    measured_ = measured_ == 0 ? rate : measured_ + kAverageWeight * (rate - measured_);
    measured_ns_ = now_ns;
  } else if (!is_long(delivery) && rate >= measured_) {
    measured_ = rate;
    measured_ns_ = now_ns;
  }
  began_app_limited_ = std::exchange(app_limited_, false) && takes_long_to_fill(delivery);
  begin_ = delivery;
}

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

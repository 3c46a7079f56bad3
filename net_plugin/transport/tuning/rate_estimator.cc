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

}  // namespace bagua_net

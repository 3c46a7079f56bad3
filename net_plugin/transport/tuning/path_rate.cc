#include "transport/tuning/path_rate.h"

#include <algorithm>

namespace bagua_net {
namespace {

// The kernel counts busy time in ticks of up to 10 ms. One connection was busy for this long, or all together for
// longer.
constexpr std::int64_t kMinBusyUs = 50'000;
constexpr std::int64_t kMinBusyOfAllUs = 150'000;
constexpr double kAverageWeight = 0.5;

}  // namespace

void PathRate::add(std::size_t connection, std::uint64_t bytes, std::int64_t busy_us, bool queued,
                   std::int64_t now_ns) {
  if (samples_.size() <= connection) samples_.resize(connection + 1);
  if (busy_us_ == 0) begin_ns_ = now_ns - 1000 * busy_us;
  ++looks_;
  if (queued) ++queued_looks_;
  bytes_ += bytes;
  busy_us_ += busy_us;
  samples_[connection].bytes += bytes;
  samples_[connection].busy_us += busy_us;
  const Sample& longest = *std::max_element(samples_.begin(), samples_.end(),
                                            [](const Sample& a, const Sample& b) { return a.busy_us < b.busy_us; });
  if (longest.busy_us < kMinBusyUs && busy_us_ < kMinBusyOfAllUs) return;
  const std::int64_t until_now_us = (now_ns - begin_ns_) / 1000;
  const std::int64_t together_us = std::max(longest.busy_us, std::min(busy_us_, until_now_us));
  const auto rate = [](std::uint64_t delivered, std::int64_t us) {
    return static_cast<double>(delivered) / (1e3 * static_cast<double>(us));
  };
  const double least = std::max(rate(bytes_, together_us), rate(longest.bytes, longest.busy_us));
  const double most = rate(bytes_, longest.busy_us);
  const double weight = measured_ns_ == 0 ? 1 : kAverageWeight;
  least_ += weight * (least - least_);
  if (2 * queued_looks_ >= looks_ || most > most_) most_ += weight * (most - most_);
  measured_ns_ = now_ns;
  bytes_ = 0;
  busy_us_ = 0;
  looks_ = queued_looks_ = 0;
  std::fill(samples_.begin(), samples_.end(), Sample{});
}

}  // namespace bagua_net

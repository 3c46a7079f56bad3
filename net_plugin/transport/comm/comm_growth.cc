#include "transport/comm/comm_growth.h"

#include <algorithm>

namespace bagua_net {
namespace {

// Requested streams join within a few round trips. If they have not joined by then, the peer has refused them.
constexpr std::int64_t kRequestAgainNs = 10'000'000'000;

// The interval of checks whether an unused stream can be closed: it has to finish its chunk and be acknowledged first.
constexpr std::int64_t kGiveBackNs = 50'000'000;

}  // namespace

bool CommGrowth::is_held_up(double round_trip_ns, std::int64_t now_ns) const {
  if (sent_ == posted_) return false;
  return static_cast<double>(now_ns - posted_ns_[sent_ % posted_ns_.size()]) > kMaxRoundTrips * round_trip_ns;
}

void CommGrowth::add_posted(bool waits, std::int64_t now_ns) {
  posted_ns_[posted_ % posted_ns_.size()] = now_ns;
  if (posted_++ == sent_) policy_.growth->begin_busy(now_ns);
  policy_.growth->add_posted(waits);
}

void CommGrowth::add_sent(std::size_t bytes, std::int64_t now_ns) {
  policy_.growth->add_sent(bytes, now_ns);
  if (++sent_ == posted_) policy_.growth->end_busy(now_ns);
}

void CommGrowth::stop(std::int64_t now_ns) {
  if (sent_ < posted_) policy_.growth->end_busy(now_ns);
  sent_ = posted_;
}

std::size_t CommGrowth::target() const {
  return std::max(static_cast<std::size_t>(std::min(policy_.growth->target(), policy_.most_streams)), first_streams_);
}

std::size_t CommGrowth::kept() const {
  return std::max(static_cast<std::size_t>(policy_.growth->kept()), first_streams_);
}

void CommGrowth::request(std::size_t streams, std::int64_t now_ns) {
  const std::size_t wanted = target();
  if (wanted <= streams) return;
  if (now_ns >= request_again_ns_) {
    requested_ = streams;
    keep_optional(streams);
  }
  if (wanted <= requested_) return;
  int count = static_cast<int>(wanted - requested_);
  // If there is no room for more, the comm continues with the streams that it has.
  if (policy_.optional != nullptr) count = policy_.optional->take(count);
  if (count > 0) policy_.open_streams(count);
  requested_ = wanted;
  request_again_ns_ = now_ns + kRequestAgainNs;
}

bool CommGrowth::is_give_back_due(std::size_t streams, std::int64_t now_ns) {
  if (streams <= kept()) {
    give_back_ns_ = 0;
    return false;
  }
  const bool is_due = give_back_ns_ != 0 && now_ns >= give_back_ns_;
  if (is_due || give_back_ns_ == 0) give_back_ns_ = now_ns + kGiveBackNs;
  return is_due;
}

void CommGrowth::gave_back(std::size_t streams) {
  requested_ = streams;
  keep_optional(streams);
}

void CommGrowth::keep_optional(std::size_t streams) {
  // Stream 0 is not optional.
  if (policy_.optional != nullptr) policy_.optional->keep(static_cast<int>(streams) - 1);
}

}  // namespace bagua_net

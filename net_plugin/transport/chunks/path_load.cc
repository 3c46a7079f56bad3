#include "transport/chunks/path_load.h"

#include <algorithm>
#include <utility>

namespace bagua_net {
namespace {

// Of a measured rate, what is certain to be reached again. Samples of equal paths differ by less.
constexpr double kCertain = 0.75;
// The same of the rate that TCP permits on a long path, where the round trip limits what short bursts reach.
constexpr double kCertainOfPermitted = 0.5;
// A path that is not used is not measured. After kFirstOldNs it may be faster; if it was not, after twice that, and so
// on.
constexpr std::int64_t kLastOldNs = 64'000'000'000;
constexpr double kFaster = 1.25;
// The nearest healthy situations: a peer whose CPUs are busy, and one lost packet, which the kernel sends again.
constexpr double kHeldUp = 2;
constexpr double kHeldUpNs = 100e6;
// So often all connections are looked through for one.
constexpr std::int64_t kHeldUpEveryNs = 1'000'000;

std::size_t at_most(std::size_t bytes, double limit) {
  return limit >= static_cast<double>(bytes) ? bytes : static_cast<std::size_t>(std::max(limit, 0.0));
}

}  // namespace

Backlog PathLoad::left(double ends_ns, double rate, std::int64_t now_ns) const {
  if (rate <= 0) return known_;
  const double bytes = (ends_ns - static_cast<double>(now_ns)) * rate;
  return {at_most(known_.under_way, bytes), at_most(known_.unsent, bytes)};
}

void PathLoad::set_backlog(Connection* connection, const Backlog& backlog) {
  known_.under_way += backlog.under_way - connection->backlog.under_way;
  known_.unsent += backlog.unsent - connection->backlog.unsent;
  connection->backlog = backlog;
}

void PathLoad::expect(std::size_t bytes, bool behind, std::int64_t now_ns) {
  const Rates known = rates();
  const auto now = static_cast<double>(now_ns);
  const auto under_way = static_cast<double>(known_.under_way);
  const auto extend = [=](double* ends_ns, double rate) {
    if (rate <= 0) return;
    const double end_ns = (behind ? std::max(*ends_ns, now) : now) + static_cast<double>(bytes) / rate;
    // No later than all that is known to be under way takes: the path may be faster than it was.
    *ends_ns = std::min(std::max(*ends_ns, end_ns), now + under_way / rate);
  };
  extend(&ends_at_most_ns_, known.most);
  extend(&ends_at_certain_ns_, known.certain);
}

void PathLoad::find_least_round_trip() {
  least_round_trip_us_ = 0;
  for (const Connection& connection : connections_) {
    const std::int64_t its_us = connection.delivery.least_round_trip_us;
    if (connection.was_seen && its_us > 0 && (least_round_trip_us_ == 0 || its_us < least_round_trip_us_)) {
      least_round_trip_us_ = its_us;
    }
  }
}

double PathLoad::permitted_rate() const {
  double permitted = 0;
  for (const Connection& connection : connections_) permitted = std::max(permitted, connection.pace);
  return permitted;
}

PathLoad::Rates PathLoad::rates() const {
  if (rate_.least() <= 0) return {};
  Rates rates{rate_.most(), kCertain * rate_.least()};
  if (1e3 * static_cast<double>(least_round_trip_us_) < kLongPathNs) return rates;
  const double permitted = permitted_rate();
  rates.most = std::max(rates.most, permitted);
  rates.certain = std::max(rates.certain, std::min(kCertainOfPermitted * permitted, rates.most));
  return rates;
}

bool PathLoad::holds_up(const State& state, std::int64_t now_ns) const {
  if (state.most <= 0) return false;
  return std::any_of(connections_.begin(), connections_.end(), [&](const Connection& connection) {
    if (!connection.was_seen || connection.backlog.under_way == 0) return false;
    const double expected_ns = state.round_trip_ns + static_cast<double>(connection.backlog.under_way) / state.most;
    const auto waits_ns = static_cast<double>(now_ns - connection.progress_ns);
    return waits_ns > std::max(kHeldUp * expected_ns, kHeldUpNs);
  });
}

PathLoad::State PathLoad::state(std::int64_t now_ns) {
  const MutexLock lock(mutex_);
  State state;
  state.told = told_rate_;
  state.round_trip_ns = 1e3 * static_cast<double>(least_round_trip_us_);
  const Rates known = rates();
  state.most = known.most;
  state.certain = known.certain;
  state.is_limit = known.most > 0 && rate_.is_limit();
  state.is_old = known.most > 0 && now_ns - rate_.measured_ns() > old_after_ns_;
  state.least_left = left(ends_at_most_ns_, known.most, now_ns);
  state.most_left = left(ends_at_certain_ns_, known.certain, now_ns);
  if (known_.under_way == 0) {
    is_held_up_ = false;
  } else if (is_held_up_ || now_ns - held_up_at_ns_ >= kHeldUpEveryNs) {
    is_held_up_ = holds_up(state, now_ns);
    held_up_at_ns_ = now_ns;
  }
  state.is_held_up = is_held_up_;
  return state;
}

std::size_t PathLoad::add_connection() {
  const MutexLock lock(mutex_);
  const auto free = std::find_if(connections_.begin(), connections_.end(),
                                 [](const Connection& connection) { return !connection.is_open; });
  const auto index = static_cast<std::size_t>(free - connections_.begin());
  if (free == connections_.end()) connections_.emplace_back();
  connections_[index].is_open = true;
  return index;
}

void PathLoad::remove_connection(std::size_t connection) {
  const MutexLock lock(mutex_);
  set_backlog(&connections_[connection], {});
  connections_[connection] = {};
  find_least_round_trip();
}

void PathLoad::look(std::size_t connection, const Delivery& delivery, const Backlog& backlog, double pace, bool at_once,
                    std::int64_t now_ns) {
  const MutexLock lock(mutex_);
  Connection& seen = connections_[connection];
  const bool was_seen = std::exchange(seen.was_seen, true);
  const bool is_over = backlog.under_way == 0;
  const std::int64_t busy_since_ns = std::exchange(seen.busy_since_ns, is_over ? 0 : now_ns);
  // Since when nothing is under way any more may be unknown: then neither bytes nor time count.
  if (was_seen && busy_since_ns != 0 && (!is_over || at_once)) {
    const auto kernel_us = [](const Delivery& one) { return one.busy_us - one.peer_window_us; };
    const double former = rate_.least();
    const std::int64_t measured_ns = rate_.measured_ns();
    const bool was_old = measured_ns != 0 && now_ns - measured_ns > old_after_ns_;
    rate_.add({delivery.bytes - seen.delivery.bytes, busy_since_ns, now_ns,
               1000 * std::max<std::int64_t>(kernel_us(delivery) - kernel_us(seen.delivery), 0), is_over,
               is_queued(delivery), delivery.retransmits - seen.delivery.retransmits});
    if (rate_.measured_ns() != measured_ns) {
      if (was_old) old_after_ns_ = std::min(2 * old_after_ns_, kLastOldNs);
      if (rate_.least() > kFaster * former) old_after_ns_ = kFirstOldNs;
    }
  }
  if (!was_seen || is_over || delivery.bytes != seen.delivery.bytes) seen.progress_ns = now_ns;
  const std::int64_t former_us = std::exchange(seen.delivery, delivery).least_round_trip_us;
  if (!was_seen || former_us != delivery.least_round_trip_us) find_least_round_trip();
  seen.pace = pace;
  set_backlog(&seen, backlog);
  expect(backlog.under_way, false, now_ns);
}

void PathLoad::take(std::size_t connection, std::size_t bytes, std::int64_t now_ns) {
  const MutexLock lock(mutex_);
  Connection& taking = connections_[connection];
  if (taking.busy_since_ns == 0) taking.busy_since_ns = now_ns;
  if (taking.backlog.under_way == 0) taking.progress_ns = now_ns;
  set_backlog(&taking, {taking.backlog.under_way + bytes, taking.backlog.unsent + bytes});
  expect(bytes, true, now_ns);
}

}  // namespace bagua_net

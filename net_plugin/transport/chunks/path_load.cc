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

void add(Backlog* sum, const Backlog& backlog) {
  sum->under_way += backlog.under_way;
  sum->unsent += backlog.unsent;
}

}  // namespace

Backlog PathLoad::left_of(const Connection& connection, double rate, std::int64_t now_ns) {
  const double gone = rate * static_cast<double>(std::max<std::int64_t>(now_ns - connection.at_ns, 0));
  const auto left = [gone](std::size_t bytes) {
    return gone >= static_cast<double>(bytes) ? 0 : bytes - static_cast<std::size_t>(gone);
  };
  return {left(connection.backlog.under_way), left(connection.backlog.unsent)};
}

PathLoad::State PathLoad::state(double assumed_rate, std::int64_t now_ns) {
  const MutexLock lock(mutex_);
  // Who pulls a chunk asks several times at one moment. What is assumed counts only where nothing is certain.
  if (is_known_ && known_at_ns_ == now_ns && (known_.certain > 0 || known_assumed_ == assumed_rate)) return known_;
  State state;
  state.told = told_rate_;
  std::int64_t least_us = 0;
  double permitted = 0;
  double busy = 0;  // connections
  for (const Connection& connection : connections_) {
    if (!connection.was_seen) continue;
    if (connection.backlog.under_way > 0) ++busy;
    permitted = std::max(permitted, connection.pace);
    const std::int64_t its_us = connection.delivery.least_round_trip_us;
    if (least_us == 0 || (its_us > 0 && its_us < least_us)) least_us = its_us;
  }
  state.round_trip_ns = 1e3 * static_cast<double>(least_us);
  if (rate_.least() > 0) {
    state.most = rate_.most();
    state.is_limit = rate_.is_limit();
    state.certain = kCertain * rate_.least();
    state.is_old = now_ns - rate_.measured_ns() > old_after_ns_;
    if (state.round_trip_ns >= kLongPathNs) {
      state.most = std::max(state.most, permitted);
      state.certain = std::max(state.certain, std::min(kCertainOfPermitted * permitted, state.most));
    }
  }
  const double each = (state.certain > 0 ? state.certain : assumed_rate) / std::max(busy, 1.0);
  for (const Connection& connection : connections_) {
    if (!connection.was_seen) continue;
    add(&state.least_left, left_of(connection, state.most, now_ns));
    add(&state.most_left, left_of(connection, each, now_ns));
    if (connection.backlog.under_way == 0 || state.most <= 0) continue;
    const double expected_ns = state.round_trip_ns + static_cast<double>(connection.backlog.under_way) / state.most;
    const auto waits_ns = static_cast<double>(now_ns - connection.progress_ns);
    state.is_held_up |= waits_ns > std::max(kHeldUp * expected_ns, kHeldUpNs);
  }
  is_known_ = true;
  known_at_ns_ = now_ns;
  known_assumed_ = assumed_rate;
  return known_ = state;
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
  connections_[connection] = {};
  is_known_ = false;
}

void PathLoad::look(std::size_t connection, const Delivery& delivery, const Backlog& backlog, double pace, bool at_once,
                    std::int64_t now_ns) {
  const MutexLock lock(mutex_);
  is_known_ = false;
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
  seen.delivery = delivery;
  seen.backlog = backlog;
  seen.pace = pace;
  seen.at_ns = now_ns;
}

void PathLoad::take(std::size_t connection, std::size_t bytes, std::int64_t now_ns) {
  const MutexLock lock(mutex_);
  is_known_ = false;
  Connection& taking = connections_[connection];
  if (taking.busy_since_ns == 0) taking.busy_since_ns = now_ns;
  if (taking.backlog.under_way == 0) taking.progress_ns = now_ns;
  taking.backlog = left_of(taking, rate_.most(), now_ns);
  add(&taking.backlog, {bytes, bytes});
  taking.at_ns = now_ns;
}

}  // namespace bagua_net

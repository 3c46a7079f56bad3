#include "transport/chunks/path_shares.h"

#include <algorithm>
#include <cmath>
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
// [Note: what holds up has to pay] in path_shares.h. Half of the account is forgotten in this time,
constexpr double kForgottenNs = 1e9;
// a path is left out for so many times as long as it held up,
constexpr double kLeftOut = 10;
// and is on trial until it has delivered so much.
constexpr double kTrialBytes = 262144;

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
  state.is_on_trial = now_ns >= left_until_ns_ && trial_bytes_ > 0;
  if (now_ns >= left_until_ns_) return state;
  state.held_up_ns = held_up_ns_;
  state.delivered = delivered_;
  return state;
}

void PathLoad::account(double bytes, std::int64_t since_ns, bool sent_again, std::int64_t now_ns) {
  const double kept = std::exp2(-static_cast<double>(now_ns - accounted_ns_) / kForgottenNs);
  accounted_ns_ = now_ns;
  held_up_ns_ *= kept;
  delivered_ = kept * delivered_ + bytes;
  trial_bytes_ = std::max(trial_bytes_ - bytes, 0.0);
  const double round_trips_ns = kHeldUp * 1e3 * static_cast<double>(least_round_trip_us_);
  if (!sent_again || static_cast<double>(now_ns - since_ns) < std::max(round_trips_ns, kHeldUpNs)) return;
  held_up_ns_ += static_cast<double>(now_ns - std::max(since_ns, held_up_until_ns_));
  held_up_until_ns_ = now_ns;
  left_until_ns_ = now_ns + static_cast<std::int64_t>(kLeftOut * held_up_ns_);
  trial_bytes_ = kTrialBytes;
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
  if (!was_seen || is_over || delivery.bytes != seen.delivery.bytes) {
    if (was_seen) {
      account(static_cast<double>(delivery.bytes - seen.delivery.bytes), seen.progress_ns,
              delivery.retransmits != seen.retransmits, now_ns);
    }
    seen.progress_ns = now_ns;
    seen.retransmits = delivery.retransmits;
  }
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

namespace {

constexpr std::size_t kPage = 4096;
// Less does not pay: a chunk costs system calls at both ends.
constexpr std::size_t kMinBytes = 16384;
constexpr std::size_t kTrialChunk = 65536;
// A thread sleeps until it is told of a chunk, at both ends. Also, messages do not leave the first path for the jitter
// of a round trip.
constexpr double kWakingNs = 50'000;
// What a path of unknown rate counts as, of the best one. The nearest healthy situation: 1 and 10 Gb/s. A path that is
// slower delays large messages until it is measured, which takes 40 ms of its time.
constexpr double kUnknown = 0.125;
// And if its interface is told to be as fast. The nearest healthy situation: a slower way beyond.
constexpr double kUnknownOfEqual = 0.5;

// The kernel says that its interface is no slower.
bool is_told_as_fast(const PathLoad::State& path, const PathLoad::State& other) {
  return path.told > 0 && path.told >= other.told;
}

// It waits, or has held up for longer than the other one needs for all that it delivered.
bool is_left_out(const PathLoad::State& path, const PathLoad::State& other) {
  if (path.is_held_up && !other.is_held_up) return true;
  return path.held_up_ns * other.most > path.delivered && other.held_up_ns * path.most <= other.delivered;
}

bool cannot_be_best(const PathLoad::State& path, const PathLoad::State& other) {
  return is_left_out(path, other) || (path.is_on_trial && !other.is_on_trial);
}

double wait_ns(const Backlog& backlog, double rate, double round_trip_ns) {
  // A round trip's worth of bytes is in flight without waiting.
  return std::max(static_cast<double>(backlog.unsent) / rate,
                  static_cast<double>(backlog.under_way) / rate - round_trip_ns);
}

}  // namespace

PathShares::~PathShares() {
  for (Stream& stream : streams_) remove(&stream);
}

void PathShares::remove(Stream* stream) {
  if (!stream->connection) return;
  loads_[stream->path]->remove_connection(*stream->connection);
  stream->connection.reset();
  --streams_on_[stream->path];
}

void PathShares::set_streams(const std::vector<int>& streams, const std::array<std::size_t, kMaxStreams>& path_of,
                             std::size_t first) {
  if (loads_.size() < 2) return;
  first_ = first;
  std::array<bool, kMaxStreams> sends{};
  for (const int stream : streams) sends[static_cast<std::size_t>(stream)] = true;
  for (std::size_t index = 0; index < streams_.size(); ++index) {
    Stream& stream = streams_[index];
    if (!sends[index] || stream.path != path_of[index]) remove(&stream);
    stream.path = path_of[index];
    if (!sends[index] || stream.connection) continue;
    stream.connection = loads_[stream.path]->add_connection();
    ++streams_on_[stream.path];
  }
  has_choice_ = std::count(streams_on_.begin(), streams_on_.end(), 0) + 1 < static_cast<int>(streams_on_.size());
}

void PathShares::look(int stream, const Delivery& delivery, const Backlog& backlog, double pace, bool at_once,
                      std::int64_t now_ns) {
  const Stream& seen = streams_[static_cast<std::size_t>(stream)];
  if (seen.connection) loads_[seen.path]->look(*seen.connection, delivery, backlog, pace, at_once, now_ns);
}

void PathShares::take(int stream, std::size_t bytes, std::int64_t now_ns) {
  const Stream& taking = streams_[static_cast<std::size_t>(stream)];
  if (taking.connection) loads_[taking.path]->take(*taking.connection, bytes, now_ns);
}

std::size_t PathShares::best(std::size_t bytes, std::int64_t now_ns) const {
  std::size_t best = first_;
  for (std::size_t path = 0; streams_on_[best] == 0 && path < loads_.size(); ++path) best = path;
  PathLoad::State state = loads_[best]->state(now_ns);
  const bool is_known = state.most > 0;
  double rate = is_known ? state.most : state.told;
  // What is under way says nothing of the time that it takes until a rate was measured.
  const auto delivery_ns = [=](const PathLoad::State& path, const Backlog& left, double its_rate) {
    const double behind_ns = is_known ? wait_ns(left, its_rate, path.round_trip_ns) : 0;
    return behind_ns + path.round_trip_ns + static_cast<double>(bytes) / its_rate;
  };
  for (std::size_t path = 0; rate > 0 && path < loads_.size(); ++path) {
    if (path == best || streams_on_[path] == 0) continue;
    const PathLoad::State other = loads_[path]->state(now_ns);
    if (cannot_be_best(other, state)) continue;
    double its_rate = other.certain;
    if (its_rate == 0 && !is_known) its_rate = other.told;
    if (its_rate == 0 && is_told_as_fast(other, state)) its_rate = kUnknownOfEqual * rate;
    if (its_rate == 0) continue;
    // Short bursts say little of a rate: without a queue, interfaces of equal speed count as equally fast.
    const bool may_be_as_fast = !state.is_limit && is_told_as_fast(state, other);
    const double own_rate = may_be_as_fast ? std::max(rate, other.most) : rate;
    if (!cannot_be_best(state, other) &&
        delivery_ns(other, other.most_left, its_rate) + kWakingNs >= delivery_ns(state, state.least_left, own_rate)) {
      continue;
    }
    best = path;
    state = other;
    rate = state.most > 0 ? state.most : state.told;
  }
  return best;
}

std::size_t PathShares::share(std::size_t path, std::size_t best, std::size_t bytes, std::int64_t now_ns) const {
  const PathLoad::State fast = loads_[best]->state(now_ns);
  if (fast.most == 0) return 0;
  const PathLoad::State asking = loads_[path]->state(now_ns);
  if (is_left_out(asking, fast)) return 0;
  const double assumed = (is_told_as_fast(asking, fast) ? kUnknownOfEqual : kUnknown) * fast.most;
  const double rate = asking.certain > 0 && !asking.is_old ? asking.certain : std::max(asking.certain, assumed);
  const double fast_ns = wait_ns(fast.least_left, fast.most, fast.round_trip_ns) + fast.round_trip_ns +
                         static_cast<double>(bytes) / fast.most;
  const double its_ns = wait_ns(asking.most_left, rate, asking.round_trip_ns) + asking.round_trip_ns + kWakingNs;
  // What it takes, the best path need not send.
  const double share = (fast_ns - its_ns) / (1 / rate + 1 / fast.most);
  if (share < static_cast<double>(kMinBytes) || (asking.is_on_trial && asking.most_left.under_way > 0)) return 0;
  const std::size_t most = asking.is_on_trial ? std::min(bytes, kTrialChunk) : bytes;
  if (share >= static_cast<double>(most)) return most;
  return static_cast<std::size_t>(share) / kPage * kPage;
}

std::uint64_t PathShares::taking(std::size_t first, std::size_t bytes, std::int64_t now_ns) const {
  const std::size_t best = this->best(first, now_ns);
  std::uint64_t taking = std::uint64_t{1} << best;
  for (std::size_t path = 0; path < loads_.size(); ++path) {
    if (path == best || streams_on_[path] == 0 || share(path, best, bytes, now_ns) == 0) continue;
    taking |= std::uint64_t{1} << path;
  }
  return taking;
}

}  // namespace bagua_net

#include "transport/chunks/path_shares.h"

#include <algorithm>

namespace bagua_net {
namespace {

constexpr std::size_t kPage = 4096;
// Less does not pay: a chunk costs system calls at both ends.
constexpr std::size_t kMinBytes = 16384;
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
    double its_rate = other.certain;
    if (its_rate == 0 && !is_known) its_rate = other.told;
    if (its_rate == 0 && is_told_as_fast(other, state)) its_rate = kUnknownOfEqual * rate;
    if (its_rate == 0) continue;
    // Short bursts say little of a rate: without a queue, interfaces of equal speed count as equally fast.
    const bool may_be_as_fast = !state.is_limit && is_told_as_fast(state, other);
    const double own_rate = may_be_as_fast ? std::max(rate, other.most) : rate;
    if (delivery_ns(other, other.most_left, its_rate) + kWakingNs >= delivery_ns(state, state.least_left, own_rate)) {
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
  if (asking.is_held_up && !fast.is_held_up) return 0;
  const double assumed = (is_told_as_fast(asking, fast) ? kUnknownOfEqual : kUnknown) * fast.most;
  const double rate = asking.certain > 0 && !asking.is_old ? asking.certain : std::max(asking.certain, assumed);
  const double fast_ns = wait_ns(fast.least_left, fast.most, fast.round_trip_ns) + fast.round_trip_ns +
                         static_cast<double>(bytes) / fast.most;
  const double its_ns = wait_ns(asking.most_left, rate, asking.round_trip_ns) + asking.round_trip_ns + kWakingNs;
  // What it takes, the best path need not send.
  const double share = (fast_ns - its_ns) / (1 / rate + 1 / fast.most);
  if (share >= static_cast<double>(bytes)) return bytes;
  if (share < static_cast<double>(kMinBytes)) return 0;
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

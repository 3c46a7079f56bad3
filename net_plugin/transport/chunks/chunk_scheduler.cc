#include "transport/chunks/chunk_scheduler.h"

#include <algorithm>
#include <utility>

namespace bagua_net {
namespace {

constexpr std::size_t kChunkAlignment = 4096;  // pages: keeps the copies of neighbouring streams apart

// A stream less than half as fast as the fastest one gets smaller chunks. The rates of equal streams vary by less.
constexpr double kSlowShare = 0.5;
// The smallest of these chunks.
constexpr std::size_t kMinSlowBytes = 16384;
// Rates are estimates, and chunks differ in size. A chunk that is late by no more than this does not count as late.
constexpr double kSlackNs = 2e6;
// The smallest chunk where there are several paths, in units of BAGUA_NET_MIN_CHUNKSIZE.
constexpr std::size_t kOfSeveralPaths = 2;
// If each connection is limited, the slack is shorter than a chunk takes: a stream that already has one counts as late.
constexpr double kLimitedSlack = 0.5;

std::size_t aligned_up(std::size_t bytes) { return (bytes + kChunkAlignment - 1) / kChunkAlignment * kChunkAlignment; }

}  // namespace

std::size_t ChunkPolicy::next_chunk_bytes(std::size_t remaining, std::size_t least) const {
  if (streams == 1 || remaining <= least) return std::min(remaining, max_alone_bytes);
  const std::size_t bytes = std::clamp(aligned_up(remaining / streams), least, std::max(least, max_bytes));
  return std::min(bytes, remaining);
}

void ChunkScheduler::set_streams(int first, int end, std::uint64_t lost,
                                 const std::array<std::size_t, kMaxStreams>& path_of, std::size_t first_path) {
  const MutexLock lock(mutex_);
  streams_.clear();
  for (int stream = first; stream < end; ++stream) {
    if ((lost >> stream & 1) == 0)
      streams_.push_back(stream);
    else
      puller(stream) = {};  // a replacement starts without measurements
  }
  if (streams_.empty()) streams_.push_back(first);
  policy_.streams = streams_.size();
  shares_.set_streams(streams_, path_of, first_path);
  look_over();
}

void ChunkScheduler::limit_flows(std::size_t min_bytes, bool limited) {
  const MutexLock lock(mutex_);
  policy_.min_bytes = min_bytes;
  flows_are_limited_ = limited;
}

std::size_t ChunkScheduler::push(Request* request) {
  const MutexLock lock(mutex_);
  queue_[tail_ % queue_.size()] = request;
  ++tail_;
  waiting_bytes_ += request->capacity_;
  return waiting_bytes_;
}

std::size_t ChunkScheduler::least_chunk_bytes() const {
  if (flows_are_limited_ || nearest_ns_ >= kLongPathNs) return policy_.min_bytes;
  // Larger pieces would leave a path idle, and each piece is a decision, a thread to wake and a system call: over two
  // interfaces of 10 or 25 Gb/s, all-reduce of 1 MiB is a fifth faster than with half of that.
  if (shares_.has_choice())
    return std::max(policy_.min_bytes, std::min(kOfSeveralPaths * policy_.min_bytes, policy_.max_bytes));
  return std::max(policy_.min_bytes, policy_.uncut_bytes);
}

std::size_t ChunkScheduler::chunks_in(std::size_t bytes) {
  const MutexLock lock(mutex_);
  const std::size_t least = least_chunk_bytes();
  return (bytes + least - 1) / least;
}

std::uint64_t ChunkScheduler::taking_paths(std::int64_t now_ns) {
  const MutexLock lock(mutex_);
  if (head_ == tail_ || !shares_.has_choice()) return ~std::uint64_t{0};
  return shares_.taking(queue_[head_ % queue_.size()]->capacity_ - offset_, waiting_bytes_, now_ns);
}

Pull ChunkScheduler::pull(int stream, const Backlog& backlog, Chunk* chunk, int* better, std::int64_t now_ns) {
  const MutexLock lock(mutex_);
  if (head_ == tail_) return Pull::kNothing;
  Request* request = queue_[head_ % queue_.size()];
  const std::size_t rest = request->capacity_ - offset_;
  std::size_t bytes = policy_.next_chunk_bytes(rest, least_chunk_bytes());
  if (shares_.has_choice()) {
    const std::size_t path = shares_.path_of(stream);
    const std::size_t best = shares_.best(rest, now_ns);
    // All that waits: the messages behind this one keep the best path busy, too.
    const std::size_t share = path == best ? rest : shares_.share(path, best, waiting_bytes_, now_ns);
    if (share == 0 && rest > 0) {
      *better = nearest_on(best, bytes);
      return Pull::kPassedOver;
    }
    bytes = std::min(bytes, share);
  }
  const double fastest = policy_.streams > 1 ? fastest_sibling(stream) : 0;
  if (fastest > 0) {
    Puller& asking = puller(stream);
    asking.backlog = backlog;
    bytes = std::min(bytes, suitable_bytes(asking.pace, bytes, fastest));
    if (would_be_late(stream, bytes, fastest, better)) return Pull::kPassedOver;
    asking.backlog.under_way += bytes;
    asking.backlog.unsent += bytes;
  }
  shares_.take(stream, bytes, now_ns);
  chunk->request = request;
  chunk->offset = offset_;
  chunk->bytes = bytes;
  chunk->message_number = request->number_;
  chunk->message_bytes = request->capacity_;
  chunk->by_reference = false;
  offset_ += bytes;
  waiting_bytes_ -= bytes;
  if (offset_ == request->capacity_) {
    ++head_;
    offset_ = 0;
  }
  return Pull::kChunk;
}

double ChunkScheduler::fastest_sibling(int stream) const {
  if (!shares_.has_choice()) return fastest_;
  double fastest = 0;
  for (const int other : streams_) {
    if (is_sibling(stream, other))
      fastest = std::max(fastest, pullers_[static_cast<std::size_t>(other)].pace.bytes_per_ns);
  }
  return fastest;
}

std::size_t ChunkScheduler::suitable_bytes(const Pace& pace, std::size_t usual, double fastest) {
  if (pace.bytes_per_ns == 0 || pace.bytes_per_ns >= kSlowShare * fastest) return usual;
  // This is fast enough even if others look faster: TCP permits some streams far more than any network carries.
  if (static_cast<double>(usual) / pace.bytes_per_ns <= kSlackNs) return usual;
  return std::max(aligned_up(static_cast<std::size_t>(static_cast<double>(usual) * pace.bytes_per_ns / fastest)),
                  kMinSlowBytes);
}

double ChunkScheduler::delivery_ns(const Puller& puller, std::size_t bytes, double fastest) {
  const double rate = puller.pace.bytes_per_ns == 0 ? fastest : puller.pace.bytes_per_ns;
  // Bytes wait in the socket or in queues of the network. A round trip's worth of bytes is in flight without waiting.
  const double in_socket_ns = static_cast<double>(puller.backlog.unsent) / rate;
  const double further_on_ns = static_cast<double>(puller.backlog.under_way) / rate - puller.pace.round_trip_ns;
  return puller.pace.round_trip_ns + std::max(in_socket_ns, further_on_ns) + static_cast<double>(bytes) / rate;
}

bool ChunkScheduler::would_be_late(int stream, std::size_t bytes, double fastest, int* better) const {
  const Puller& asking = pullers_[static_cast<std::size_t>(stream)];
  if (asking.pace.bytes_per_ns == 0 || asking.pace.is_old) return false;
  // The stream that would deliver the chunk first takes it, so some stream always does.
  double slack_ns = kSlackNs;
  if (flows_are_limited_) slack_ns = std::min(slack_ns, kLimitedSlack * static_cast<double>(bytes) / fastest);
  double first_ns = delivery_ns(asking, bytes, fastest) - slack_ns;
  int first = -1;
  for (const int other : streams_) {
    if (!is_sibling(stream, other)) continue;
    const double its_ns = delivery_ns(pullers_[static_cast<std::size_t>(other)], bytes, fastest);
    if (its_ns >= first_ns) continue;
    first_ns = its_ns;
    first = other;
  }
  if (first < 0) return false;
  *better = first;
  return true;
}

int ChunkScheduler::nearest_on(std::size_t path, std::size_t bytes) const {
  int nearest = streams_.front();
  double nearest_ns = 0;
  bool is_found = false;
  for (const int stream : streams_) {
    if (shares_.path_of(stream) != path) continue;
    const double fastest = fastest_sibling(stream);
    const double its_ns = fastest == 0 ? 0 : delivery_ns(pullers_[static_cast<std::size_t>(stream)], bytes, fastest);
    if (std::exchange(is_found, true) && its_ns >= nearest_ns) continue;
    nearest_ns = its_ns;
    nearest = stream;
  }
  return nearest;
}

void ChunkScheduler::set_pace(int stream, const Pace& pace) {
  const MutexLock lock(mutex_);
  puller(stream).pace = pace;
  look_over();
}

void ChunkScheduler::look(int stream, const Pace& pace, const Delivery& delivery, const Backlog& backlog, bool at_once,
                          std::int64_t now_ns) {
  const MutexLock lock(mutex_);
  puller(stream).pace = pace;
  look_over();
  shares_.look(stream, delivery, backlog, pace.bytes_per_ns, at_once, now_ns);
}

bool ChunkScheduler::outlasts_round_trips(std::size_t bytes) {
  const MutexLock lock(mutex_);
  if (fastest_ == 0) return false;
  double together = 0;
  for (const int stream : streams_) {
    const double pace = puller(stream).pace.bytes_per_ns;
    together += pace == 0 ? fastest_ : pace;
  }
  return static_cast<double>(bytes) > kMaxRoundTrips * nearest_ns_ * together;
}

// After a pause, TCP sends ten packets and waits for a round trip before it sends twice as many. On a long path,
// messages are cut, and leave over several connections at once: between two emulated hosts with a round trip of 50 ms,
// all-reduce of 1 MiB takes 55 ms instead of 76. On others a round trip takes less time than what cutting costs.
// The shortest one counts: while many connections are opened, a handshake takes milliseconds anywhere.
void ChunkScheduler::look_over() {
  fastest_ = 0;
  nearest_ns_ = 0;
  for (const int stream : streams_) {
    const Pace& pace = puller(stream).pace;
    fastest_ = std::max(fastest_, pace.bytes_per_ns);
    if (pace.round_trip_ns > 0)
      nearest_ns_ = nearest_ns_ == 0 ? pace.round_trip_ns : std::min(nearest_ns_, pace.round_trip_ns);
  }
}

}  // namespace bagua_net

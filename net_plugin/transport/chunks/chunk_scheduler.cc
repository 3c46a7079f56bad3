#include "transport/chunks/chunk_scheduler.h"

#include <algorithm>

namespace bagua_net {
namespace {

constexpr std::size_t kChunkAlignment = 4096;  // pages: keeps the copies of neighbouring streams apart

// A stream less than half as fast as the fastest one gets smaller chunks. The rates of equal streams vary by less.
constexpr double kSlowShare = 0.5;
// The smallest of these chunks.
constexpr std::size_t kMinSlowBytes = 16384;
// Rates are estimates, and chunks differ in size. A chunk that is late by no more than this does not count as late.
constexpr double kSlackNs = 2e6;
// With several paths, the share of the time for what waits: a small message would notice 2 ms, a large one does not.
constexpr double kPathSlack = 0.25;
// If each connection is limited, the slack is shorter than a chunk takes: a stream that already has one counts as late.
constexpr double kLimitedSlack = 0.5;

std::size_t aligned_up(std::size_t bytes) { return (bytes + kChunkAlignment - 1) / kChunkAlignment * kChunkAlignment; }

}  // namespace

std::size_t ChunkPolicy::next_chunk_bytes(std::size_t remaining) const {
  if (streams == 1 || remaining <= min_bytes) return std::min(remaining, max_alone_bytes);
  const std::size_t bytes = std::clamp(aligned_up(remaining / streams), min_bytes, max_bytes);
  return std::min(bytes, remaining);
}

void ChunkScheduler::set_streams(int first, int end, std::uint64_t lost) {
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
  find_fastest();
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

Pull ChunkScheduler::pull(int stream, const Backlog& backlog, Chunk* chunk, int* better) {
  const MutexLock lock(mutex_);
  if (head_ == tail_) return Pull::kNothing;
  Request* request = queue_[head_ % queue_.size()];
  std::size_t bytes = policy_.next_chunk_bytes(request->capacity_ - offset_);
  if (fastest_ > 0 && policy_.streams > 1) {
    Puller& asking = puller(stream);
    asking.backlog = backlog;
    bytes = std::min(bytes, suitable_bytes(asking.pace, bytes));
    if (would_be_late(asking, bytes, better)) return Pull::kPassedOver;
    asking.backlog.under_way += bytes;
    asking.backlog.unsent += bytes;
  }
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

std::size_t ChunkScheduler::suitable_bytes(const Pace& pace, std::size_t usual) const {
  if (pace.bytes_per_ns == 0 || pace.bytes_per_ns >= kSlowShare * fastest_) return usual;
  // This is fast enough even if others look faster: TCP permits some streams far more than any network carries.
  if (static_cast<double>(usual) / pace.bytes_per_ns <= kSlackNs) return usual;
  return std::max(aligned_up(static_cast<std::size_t>(static_cast<double>(usual) * pace.bytes_per_ns / fastest_)),
                  kMinSlowBytes);
}

double ChunkScheduler::delivery_ns(const Puller& puller, std::size_t bytes) const {
  return delivery_ns(puller, bytes, puller.pace.bytes_per_ns == 0 ? fastest_ : puller.pace.bytes_per_ns);
}

double ChunkScheduler::delivery_ns(const Puller& puller, std::size_t bytes, double rate) const {
  // Bytes wait in the socket or in queues of the network. A round trip's worth of bytes is in flight without waiting.
  const double in_socket_ns = static_cast<double>(puller.backlog.unsent) / rate;
  const double further_on_ns = static_cast<double>(puller.backlog.under_way) / rate - puller.pace.round_trip_ns;
  return puller.pace.round_trip_ns + std::max(in_socket_ns, further_on_ns) + static_cast<double>(bytes) / rate;
}

bool ChunkScheduler::would_be_late(const Puller& puller, std::size_t bytes, int* better) const {
  if (puller.pace.bytes_per_ns == 0 || (puller.pace.is_old && !policy_.has_paths)) return false;
  // The stream that would deliver the chunk first takes it, so some stream always does.
  double slack_ns = kSlackNs;
  if (flows_are_limited_) slack_ns = std::min(slack_ns, kLimitedSlack * static_cast<double>(bytes) / fastest_);
  if (policy_.has_paths) slack_ns = std::min(slack_ns, kPathSlack * static_cast<double>(waiting_bytes_) / fastest_);
  // A stream may be faster now than when it was measured, but its path is not shorter.
  double first_ns = (puller.pace.is_old ? delivery_ns(puller, bytes, fastest_) : delivery_ns(puller, bytes)) - slack_ns;
  int first = -1;
  for (const int other : streams_) {
    const double its_ns = delivery_ns(pullers_[static_cast<std::size_t>(other)], bytes);
    if (its_ns >= first_ns) continue;
    first_ns = its_ns;
    first = other;
  }
  if (first < 0) return false;
  *better = first;
  return true;
}

void ChunkScheduler::set_pace(int stream, const Pace& pace) {
  const MutexLock lock(mutex_);
  puller(stream).pace = pace;
  find_fastest();
}

bool ChunkScheduler::outlasts_a_round_trip(std::size_t bytes) {
  const MutexLock lock(mutex_);
  if (fastest_ == 0) return false;
  return std::all_of(streams_.begin(), streams_.end(), [&](int stream) REQUIRES(mutex_) {
    const Pace& pace = puller(stream).pace;
    return pace.bytes_per_ns < fastest_ || static_cast<double>(bytes) / fastest_ > pace.round_trip_ns;
  });
}

void ChunkScheduler::find_fastest() {
  fastest_ = 0;
  for (const int stream : streams_) {
    fastest_ = std::max(fastest_, pullers_[static_cast<std::size_t>(stream)].pace.bytes_per_ns);
  }
}

}  // namespace bagua_net

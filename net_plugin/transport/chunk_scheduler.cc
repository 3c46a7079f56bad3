#include "transport/chunk_scheduler.h"

#include <algorithm>

#include "base/monotonic_clock.h"

namespace bagua_net {
namespace {

constexpr std::size_t kChunkAlignment = 4096;  // pages: keeps the copies of neighbouring streams apart

// A stream that is less than half as fast as the fastest gets smaller chunks. Rates of equal streams vary by less.
constexpr double kSlowShare = 0.5;
// The least of those.
constexpr std::size_t kLeastSlowBytes = 16384;
constexpr double kAverageWeight = 0.5;
// Rates are estimates, and chunks do not come out even: what is late by no more than this is not late.
constexpr double kSlackNs = 2e6;
// A stream that is passed over delivers nothing that could prove the rate wrong: it is worth a try after this time.
constexpr std::int64_t kRateIsOldNs = 1'000'000'000;

std::size_t aligned_up(std::size_t bytes) { return (bytes + kChunkAlignment - 1) / kChunkAlignment * kChunkAlignment; }

}  // namespace

std::size_t ChunkPolicy::next_chunk_bytes(std::size_t remaining) const {
  if (streams == 1 || remaining <= min_bytes) return remaining;
  const std::size_t bytes = std::clamp(aligned_up(remaining / streams), min_bytes, max_bytes);
  return std::min(bytes, remaining);
}

void ChunkScheduler::set_streams(int first, int end) {
  const std::lock_guard<std::mutex> lock(mutex_);
  first_stream_ = first;
  policy_.streams = static_cast<std::size_t>(end - first);
  sum_up();
}

std::size_t ChunkScheduler::push(Request* request) {
  const std::lock_guard<std::mutex> lock(mutex_);
  queue_[tail_ % queue_.size()] = request;
  ++tail_;
  waiting_bytes_ += request->capacity_;
  return waiting_bytes_;
}

Pull ChunkScheduler::pull(int stream, std::size_t under_way, Chunk* chunk, int* better) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (head_ == tail_) return Pull::kNothing;
  Request* request = queue_[head_ % queue_.size()];
  std::size_t bytes = policy_.next_chunk_bytes(request->capacity_ - offset_);
  if (fastest_ > 0 && policy_.streams > 1) {
    Pace& pace = paces_[static_cast<std::size_t>(stream)];
    under_way_ += under_way - pace.under_way;
    pace.under_way = under_way;
    bytes = std::min(bytes, suitable_bytes(pace, bytes));
    if (would_be_late(pace, bytes, better)) return Pull::kPassedOver;
    pace.under_way += bytes;
    under_way_ += bytes;
  }
  *chunk = {request, offset_, bytes};
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
  return std::max(aligned_up(static_cast<std::size_t>(static_cast<double>(usual) * pace.bytes_per_ns / fastest_)),
                  kLeastSlowBytes);
}

bool ChunkScheduler::would_be_late(const Pace& pace, std::size_t bytes, int* better) const {
  if (pace.bytes_per_ns == 0) return false;
  const double done_ns = static_cast<double>(pace.under_way + bytes) / pace.bytes_per_ns;
  if (done_ns <= static_cast<double>(waiting_bytes_ + under_way_) / sum_ + kSlackNs) return false;
  // Somebody has to take it: whoever would be done with it first.
  double first_ns = done_ns;
  int first = -1;
  for (std::size_t i = 0; i < policy_.streams; ++i) {
    const int other = first_stream_ + static_cast<int>(i);
    const Pace& its = paces_[static_cast<std::size_t>(other)];
    const double its_ns =
        static_cast<double>(its.under_way + bytes) / (its.bytes_per_ns == 0 ? fastest_ : its.bytes_per_ns);
    if (its_ns >= first_ns) continue;
    first_ns = its_ns;
    first = other;
  }
  if (first < 0 || monotonic_ns() - pace.known_since_ns > kRateIsOldNs) return false;
  *better = first;
  return true;
}

void ChunkScheduler::add_rate(int stream, double bytes_per_ns, bool at_least, std::int64_t now_ns) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Pace& pace = paces_[static_cast<std::size_t>(stream)];
  if (at_least && bytes_per_ns <= pace.bytes_per_ns) return;
  const double change = bytes_per_ns - pace.bytes_per_ns;
  pace.bytes_per_ns = pace.bytes_per_ns == 0 ? bytes_per_ns : pace.bytes_per_ns + kAverageWeight * change;
  pace.known_since_ns = now_ns;
  sum_up();
}

void ChunkScheduler::sum_up() {
  fastest_ = 0;
  sum_ = 0;
  under_way_ = 0;
  std::size_t unknown = 0;
  for (std::size_t i = 0; i < policy_.streams; ++i) {
    const Pace& pace = paces_[static_cast<std::size_t>(first_stream_) + i];
    fastest_ = std::max(fastest_, pace.bytes_per_ns);
    sum_ += pace.bytes_per_ns;
    under_way_ += pace.under_way;
    if (pace.bytes_per_ns == 0) ++unknown;
  }
  sum_ += static_cast<double>(unknown) * fastest_;
}

}  // namespace bagua_net

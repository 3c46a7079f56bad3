#include "transport/chunks/receive_table.h"

#include <utility>

#include "wire/frames.h"

namespace bagua_net {
namespace {

std::uint64_t bit(int stream_index) { return std::uint64_t{1} << stream_index; }

// Received ranges are separated by chunks in flight. A sender has at most this many unacknowledged chunks.
constexpr std::size_t kMaxRanges = std::size_t{kMaxStreams} * kMaxUnacknowledgedChunks;

Status do_not_fit_together(const FrameHeader& header) {
  return Status::remote_error("chunks of message " + std::to_string(header.message_number) +
                              " do not fit together: the peer broke the protocol");
}

}  // namespace

std::uint64_t ReceiveTable::post(Request* request, Comm* comm, std::uint64_t number, void* data, std::size_t capacity,
                                 MemoryRegistration* registration) {
  const MutexLock lock(mutex_);
  request->start(comm, number, data, capacity, registration);
  posted_[number % posted_.size()] = request;
  received_[number % posted_.size()].clear();
  posted_count_ = number + 1;
  return std::exchange(parked_streams_, 0);
}

Status ReceiveTable::find(const FrameHeader& header, int stream_index, Request** request, Arrival* arrival) {
  const MutexLock lock(mutex_);
  *request = nullptr;
  if (header.message_number >= posted_count_) {
    parked_streams_ |= bit(stream_index);
    *arrival = Arrival::kNotPosted;
    return Status::ok();
  }
  *arrival = Arrival::kReceived;
  const std::size_t place = header.message_number % posted_.size();
  Request* found = posted_[place];
  if (found == nullptr || found->number_ != header.message_number || found->is_done()) {
    if (tolerates_replays_) return Status::ok();
    return Status::remote_error("chunk for message " + std::to_string(header.message_number) +
                                ", which is already complete: the peer broke the protocol");
  }
  if (!found->size_known_) {
    if (header.message_bytes > found->capacity_) {
      return Status::invalid_usage("message " + std::to_string(header.message_number) + " of " +
                                   std::to_string(header.message_bytes) + " bytes is larger than its receive of " +
                                   std::to_string(found->capacity_) +
                                   " bytes: the ranks call different collectives, counts or data types");
    }
    found->size_known_ = true;
    found->message_bytes_ = header.message_bytes;
  }
  if (header.message_bytes != found->message_bytes_) return do_not_fit_together(header);

  const std::size_t begin = header.offset;
  const std::size_t end = begin + header.payload_bytes;
  switch (received_[place].overlap(begin, end)) {
    case ReceivedRanges::Overlap::kNone: break;
    case ReceivedRanges::Overlap::kPart: return do_not_fit_together(header);
    case ReceivedRanges::Overlap::kWhole: return tolerates_replays_ ? Status::ok() : do_not_fit_together(header);
  }
  if (received_[place].size() > kMaxRanges) {
    return Status::remote_error("message " + std::to_string(header.message_number) + " comes in more than " +
                                std::to_string(kMaxRanges) + " pieces with gaps: the peer broke the protocol");
  }
  // A chunk is claimed from its header on. Otherwise a peer that sends overlapping chunks could complete a message
  // while another stream still writes into its memory, which belongs to the application again by then.
  for (std::uint64_t streams = claiming_streams_; streams != 0; streams &= streams - 1) {
    const int other = __builtin_ctzll(streams);
    ChunkClaim& claimed = claims_[static_cast<std::size_t>(other)];
    if (claimed.request_ != found) continue;
    const bool is_same = claimed.begin_ == begin && claimed.end_ == end;
    if (!is_same && (claimed.begin_ >= end || claimed.end_ <= begin)) continue;
    // Attempt numbers wrap, so they are compared modulo 2^16 (serial number arithmetic, RFC 1982).
    const auto later = static_cast<std::int16_t>(header.attempt - claimed.attempt_);
    if (!is_same || !tolerates_replays_ || later == 0) return do_not_fit_together(header);
    if (later < 0) return Status::ok();
    if (!claimed.revoke()) {
      *arrival = Arrival::kBusy;
      return Status::ok();
    }
    claiming_streams_ &= ~bit(other);
  }
  ChunkClaim& claim = claims_[static_cast<std::size_t>(stream_index)];
  claim.request_ = found;
  claim.begin_ = begin;
  claim.end_ = end;
  claim.attempt_ = header.attempt;
  claim.state_.store(ChunkClaim::State::kWriting, std::memory_order_relaxed);
  claiming_streams_ |= bit(stream_index);
  *request = found;
  *arrival = Arrival::kWanted;
  return Status::ok();
}

void ReceiveTable::finish(const FrameHeader& header, int stream_index) {
  const MutexLock lock(mutex_);
  if ((claiming_streams_ & bit(stream_index)) == 0) return;
  claiming_streams_ &= ~bit(stream_index);
  ChunkClaim& claim = claims_[static_cast<std::size_t>(stream_index)];
  Request* request = claim.request_;
  ++finished_chunks_;
  if (header.payload_bytes != header.message_bytes) {
    received_[header.message_number % posted_.size()].add(claim.begin_, claim.end_);
  }
  request->chunk_moved(header.payload_bytes, header.message_bytes);
}

std::uint64_t ReceiveTable::parked_streams() {
  const MutexLock lock(mutex_);
  return parked_streams_;
}

void ReceiveTable::release(int stream_index) {
  const MutexLock lock(mutex_);
  claiming_streams_ &= ~bit(stream_index);
  parked_streams_ &= ~bit(stream_index);
}

}  // namespace bagua_net

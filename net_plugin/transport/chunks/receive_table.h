// ReceiveTable: the posted receives of a comm, found by message number, and which of their bytes have come. Data
// streams look up where a chunk belongs; a stream whose receive is not posted yet parks and is named to the next post.
//
// [Note: parked streams cannot deadlock] A scheduler hands out chunks in message order, so the message numbers on one
// stream never decrease. Let m be the lowest message that is posted and incomplete. Every chunk of m that is still to
// come either stands at the front of its stream, and is read because m is posted, or stands behind chunks of messages
// below m only, which are posted and complete and hence already read. So m completes; by induction all posted
// messages do, and streams park only on messages that are not posted. With recovery, a chunk may come again, because
// its stream was lost: on a stream that has carried no later message yet (ReplayQueue). Every lost stream is replaced,
// so there is always one that will.
//
// [Note: two streams with one chunk] The two ends notice a loss at different times. So a chunk may arrive again while
// the receiver still reads it from the lost stream. Then the stream with the later attempt takes the chunk over, and
// the other one discards the rest: it may end at any byte, and the sender ignores its acknowledgements. If the other
// one is writing to the receive's memory at that moment, the later one tries again. So memory is never written after
// its receive is done, and every byte is counted once.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "transport/chunks/chunk_scheduler.h"
#include "transport/chunks/request.h"
#include "wire/frames.h"

namespace bagua_net {

// ReceivedRanges: which bytes of a message have been received. Neighbouring ranges are one, so that there are rarely
// more than the comm has streams. Guarded by its owner.
class ReceivedRanges {
 public:
  enum class Overlap { kNone, kWhole, kPart };

  void clear() { ranges_.clear(); }
  std::size_t size() const { return ranges_.size(); }

  // How much of the range has been received.
  Overlap overlap(std::size_t begin, std::size_t end) const {
    const auto range = first_after(begin);
    if (range != ranges_.end() && range->begin <= begin && range->end >= end) return Overlap::kWhole;
    return range != ranges_.end() && range->begin < end ? Overlap::kPart : Overlap::kNone;
  }
  // The range was received; it overlaps none of the others.
  void add(std::size_t begin, std::size_t end) {
    // The range before it may end where it begins.
    auto next = std::lower_bound(ranges_.begin(), ranges_.end(), begin,
                                 [](const Range& range, std::size_t position) { return range.begin < position; });
    const bool joins_next = next != ranges_.end() && next->begin == end;
    const bool joins_previous = next != ranges_.begin() && std::prev(next)->end == begin;
    if (joins_previous && joins_next) {
      std::prev(next)->end = next->end;
      ranges_.erase(next);
    } else if (joins_previous) {
      std::prev(next)->end = end;
    } else if (joins_next) {
      next->begin = begin;
    } else {
      ranges_.insert(next, {begin, end});
    }
  }

 private:
  struct Range {
    std::size_t begin;
    std::size_t end;
  };

  // The first range that ends after the position.
  std::vector<Range>::const_iterator first_after(std::size_t position) const {
    return std::partition_point(ranges_.begin(), ranges_.end(),
                                [&](const Range& range) { return range.end <= position; });
  }

  std::vector<Range> ranges_;  // disjoint, in order
};

// A stream's right to write a chunk's bytes into its receive's memory.
class ChunkClaim {
 public:
  // Called by the stream. False: another stream has taken the chunk over.
  bool begin_writing() {
    State expected = State::kHeld;
    return state_.compare_exchange_strong(expected, State::kWriting, std::memory_order_acquire);
  }
  void end_writing() { state_.store(State::kHeld, std::memory_order_release); }

 private:
  friend class ReceiveTable;

  //   kNone --find--> kWriting <-> kHeld --another stream brings the chunk--> kRevoked;  finish, release: kNone
  enum class State { kNone, kHeld, kWriting, kRevoked };

  bool revoke() {
    State expected = State::kHeld;
    return state_.compare_exchange_strong(expected, State::kRevoked, std::memory_order_acq_rel);
  }

  std::atomic<State> state_{State::kNone};
  // Guarded by the table's mutex.
  Request* request_ = nullptr;
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
  std::uint16_t attempt_ = 0;
};

enum class Arrival {
  kWanted,     // the claim is held in kWriting, for the bytes that are staged already
  kNotPosted,  // the stream is parked
  kReceived,   // to be discarded: it was received before, or is received by a stream with a later attempt
  kBusy,       // another stream is writing its bytes at this moment: try again
};

class ReceiveTable {
 public:
  // tolerates_replays: chunks may come again.
  explicit ReceiveTable(bool tolerates_replays = false) : tolerates_replays_(tolerates_replays) {}

  // Starts *request as receive `number` and makes it findable; returns the bit mask of the streams that parked since
  // the last post.
  std::uint64_t post(Request* request, Comm* comm, std::uint64_t number, void* data, std::size_t capacity,
                     MemoryRegistration* registration);

  // Finds the receive that the chunk belongs to; *request is set for kWanted. Every number in `header` comes from the
  // peer, so one that fits no receive is an error.
  Status find(const FrameHeader& header, int stream_index, Request** request, Arrival* arrival);
  // All bytes of the chunk that the stream claims were received. They count unless another stream took the chunk over.
  void finish(const FrameHeader& header, int stream_index);
  // The number of chunks that counted.
  std::uint64_t finished_chunks() {
    const MutexLock lock(mutex_);
    return finished_chunks_;
  }
  // The stream is over, and another one may claim its chunk.
  void release(int stream_index);

  // A bit mask of the parked streams: they read nothing before another receive is posted.
  std::uint64_t parked_streams();

  // The claim of the stream, until release().
  ChunkClaim& claim(int stream_index) { return claims_[static_cast<std::size_t>(stream_index)]; }

 private:
  const bool tolerates_replays_;
  Mutex mutex_;
  std::array<Request*, kMaxRequestsPerComm> posted_ GUARDED_BY(mutex_){};
  std::array<ReceivedRanges, kMaxRequestsPerComm> received_ GUARDED_BY(mutex_);
  std::array<ChunkClaim, kMaxStreams> claims_;  // also guarded by mutex_, but for their states
  std::uint64_t claiming_streams_ GUARDED_BY(mutex_) = 0;
  std::uint64_t posted_count_ GUARDED_BY(mutex_) = 0;
  std::uint64_t finished_chunks_ GUARDED_BY(mutex_) = 0;
  std::uint64_t parked_streams_ GUARDED_BY(mutex_) = 0;
};

}  // namespace bagua_net

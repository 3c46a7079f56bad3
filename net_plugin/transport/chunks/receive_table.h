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
// [Note: two streams with one chunk] A chunk may come again while the stream that was lost still has a part of it: the
// ends notice a loss at different times. Then the stream with the later attempt has the chunk, whichever comes first:
// the other one may end at any byte, and what it acknowledges is not heard any more. It reads the rest into nothing. It
// may be writing to the receive's memory when the later one comes, which tries again then. So memory is never written
// once its receive is done, and every byte counts once.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/mutex.h"
#include "base/status.h"
#include "transport/chunks/chunk_scheduler.h"
#include "transport/chunks/received_ranges.h"
#include "transport/chunks/request.h"
#include "wire/frame_header.h"

namespace bagua_net {

// A stream's right to write a chunk's bytes into its receive's memory.
class ChunkClaim {
 public:
  // By the stream: false: another stream has taken the chunk over.
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
  kWanted,     // the claim is held, and counts as writing: the staged bytes come first
  kNotPosted,  // the stream counts as parked
  kReceived,   // it came before, or comes on a stream with a later attempt: to be read into nothing
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

  // Where the chunk belongs: *request, if it is wanted. Every number in `header` comes from the peer: an error when it
  // fits no receive.
  Status find(const FrameHeader& header, int stream_index, Request** request, Arrival* arrival);
  // All bytes of the chunk that the stream claims have come. They count unless another stream has taken it over.
  void finish(const FrameHeader& header, int stream_index);
  // Chunks that counted.
  std::uint64_t finished_chunks() {
    const MutexLock lock(mutex_);
    return finished_chunks_;
  }
  // The stream is over: what it claims may come on another one.
  void release(int stream_index);

  // Streams that bring nothing more for what is posted now.
  std::uint64_t parked_streams();

  // The stream's own; not its to keep beyond release().
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

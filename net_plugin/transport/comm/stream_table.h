// StreamTable: the places of a comm's data streams: which stream has each place, who drives it, and its phase. There is
// no other record of that. Owned by the comm and guarded by its mutex, except for the atomics.
//
//   kFree       no stream; one that joins may take the place
//   kLive       a stream that moves chunks
//   kLost       its connection broke, and no other is under way: it is to be asked for (again). Sending only
//   kAsked      another connection was asked for, and will come or fail. Sending only
//   kReplaying  an own stream of the comm that resends what was lost; the recovery thread drives it, too
//   kEnded      a stream that its peer has ended
//
//   kFree  --a connection joins--> kLive
//   kLive, kReplaying  --the connection breaks--> kLost; receiving: kFree, the peer asks for another one
//   kLost  --asked for--> kAsked  --it joins--> kReplaying, or kLive if a worker drives it
//                         kAsked  --it was refused, or not answered--> kLost
//   kFree  --receiving: a connection joins for a lost one--> kReplaying, or kLive
//   kLive  --it replaced one, has sent nothing new yet, and another is lost--> kReplaying
//   kReplaying  --its first new chunk, or nothing is left to be sent again--> kLive
//   kLive, kReplaying  --the peer ends it--> kEnded
//   kLive, kEnded  --given back, by the sender--> kFree; sending, to move to another path: kLost
#pragma once

#include <array>
#include <atomic>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "transport/stream/data_stream.h"
#include "transport/stream/event_loop_worker.h"

namespace bagua_net {

enum class StreamPhase : std::uint8_t { kFree, kLive, kLost, kAsked, kReplaying, kEnded };

class StreamTable {
 public:
  struct Place {
    std::unique_ptr<DataStream> stream;  // kLive, kReplaying, kEnded
    // nullptr: an own stream of the comm. Written with the comm's mutex held, and read by kick() in any thread. If
    // kick() reads a worker with the id of another stream, the kick has no effect, or wakes a stream without need.
    std::atomic<EventLoopWorker*> worker{nullptr};
    std::atomic<std::uint64_t> worker_stream_id{0};

    StreamPhase phase() const { return phase_; }

   private:
    friend class StreamTable;
    StreamPhase phase_ = StreamPhase::kFree;
  };

  Place& operator[](std::size_t index) { return places_[index]; }
  const Place& operator[](std::size_t index) const { return places_[index]; }
  // Places up to the last that is not free.
  std::size_t size() const { return size_; }
  std::size_t count(StreamPhase phase) const { return counts_[static_cast<std::size_t>(phase)]; }
  // Places that a joining stream may take.
  std::size_t free_places() const { return count(StreamPhase::kFree) + count(StreamPhase::kEnded); }
  // A bit mask.
  std::uint64_t places_in(StreamPhase phase) const {
    std::uint64_t mask = 0;
    for (std::size_t index = 0; count(phase) != 0 && index < kPlaces; ++index) {
      if (places_[index].phase_ == phase) mask |= std::uint64_t{1} << index;
    }
    return mask;
  }
  // -1: there is none from there on.
  int first_in(StreamPhase phase, std::size_t from = 0) const {
    const std::uint64_t mask = from < kPlaces ? places_in(phase) >> from << from : 0;
    return mask == 0 ? -1 : __builtin_ctzll(mask);
  }

  // The caller puts the stream into its place before, and takes it away afterwards.
  void move(std::size_t index, StreamPhase to) {
    StreamPhase& phase = places_[index].phase_;
    assert(may_move(phase, to));
    --counts_[static_cast<std::size_t>(phase)];
    ++counts_[static_cast<std::size_t>(to)];
    phase = to;
    if (to != StreamPhase::kFree && index >= size_) size_ = index + 1;
    while (size_ > 0 && places_[size_ - 1].phase_ == StreamPhase::kFree) --size_;
  }

 private:
  static constexpr std::size_t kPlaces = kMaxStreams;

  static bool may_move(StreamPhase from, StreamPhase to) {
    switch (from) {
      case StreamPhase::kFree: return to == StreamPhase::kLive || to == StreamPhase::kReplaying;
      case StreamPhase::kLost: return to == StreamPhase::kAsked;
      case StreamPhase::kAsked: return to != StreamPhase::kFree && to != StreamPhase::kEnded;
      case StreamPhase::kLive:
      case StreamPhase::kReplaying: return to != StreamPhase::kAsked;
      case StreamPhase::kEnded: return to == StreamPhase::kFree;
    }
    return false;
  }

  std::array<Place, kPlaces> places_;
  std::array<std::size_t, 6> counts_{kPlaces};
  std::size_t size_ = 0;
};

}  // namespace bagua_net

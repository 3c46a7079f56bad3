// ChunkScheduler: the messages of a comm that wait to be sent, in posting order, and who sends which piece. Data
// streams pull: each takes the next chunk when its socket has room, so a slow stream simply takes fewer.
//
// Pulling alone is not enough if there are long queues behind the sockets or streams differ in speed: a late chunk
// delays its message, and soon all messages in flight. So a stream that would deliver a chunk noticeably later than
// another one leaves it to that one (multipath transports call this earliest completion first), and a stream that is
// much slower than another one gets smaller chunks. Where streams go over several paths, these share the message first
// (transport/chunks/path_shares.h), and this decides between streams of one path. Within a host no rates are measured,
// and none of this applies.
//
// The mutex is held for about 20 ns per chunk; with several paths longer, by a look at each connection of the process
// over them (PathLoad::state). Chunks have at least 64 KiB unless the message is smaller, or 16 KiB on a slow stream,
// so threads rarely wait for it.
//
// [Note: when a message is cut] Each chunk costs a wake-up at both ends and, with recovery, an acknowledgement. Between
// hosts that exceeds what parallel copying saves: with chunks of 64 instead of 512 KiB an all-reduce of 4 MiB takes 1.5
// to 3.4 times as long, on a link of 100 Gb/s as on one without a limit (docs/design/performance.md, "Whole messages
// between hosts"). So messages are cut into smaller chunks only where the network limits each connection, where a round
// trip takes milliseconds, and where several paths share them. The pace of a stream is no sign of such a limit: a
// receiver that is late lowers it, too.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "transport/chunks/chunk.h"
#include "transport/chunks/limits.h"
#include "transport/chunks/path_shares.h"
#include "transport/chunks/request.h"
#include "transport/tuning/rate_estimator.h"

namespace bagua_net {

struct ChunkPolicy {
  std::size_t streams = 1;  // that pull from this scheduler
  std::size_t min_bytes = 65536;
  std::size_t max_bytes = 524288;
  std::size_t max_alone_bytes = ~std::size_t{0};  // with one stream
  // Up to this size, chunks are cut only if the network limits each connection or takes long.
  std::size_t uncut_bytes = 0;

  // With one stream: the whole rest, because smaller chunks only reduce what is sent again after a loss. With several
  // streams: a fraction of the rest, so that chunks get smaller towards the end and all streams finish together, and at
  // least `least` bytes.
  std::size_t next_chunk_bytes(std::size_t remaining, std::size_t least) const;
};

enum class Pull {
  kChunk,
  kNothing,     // nothing waits to be sent
  kPassedOver,  // another stream would deliver it first
};

class ChunkScheduler {
 public:
  // loads: of each path, where there are several.
  explicit ChunkScheduler(ChunkPolicy policy, std::vector<std::shared_ptr<PathLoad>> loads = {})
      : policy_(policy), shares_(std::move(loads)) {}

  // The streams from `first` to before `end` pull from now on, without those in the bit mask `lost`. The path of each
  // stream, and the one to begin with, matter with several paths only.
  void set_streams(int first, int end, std::uint64_t lost = 0, const std::array<std::size_t, kMaxStreams>& path_of = {},
                   std::size_t first_path = 0);
  // The minimum size of a chunk, and whether the network limits each connection: then no stream takes a second chunk
  // before the others have had one.
  void limit_flows(std::size_t min_bytes, bool limited);
  // The request's data_, capacity_ and number_ must not change until it is done. At most kMaxRequestsPerComm wait.
  // Returns the bytes that now wait to be taken.
  std::size_t push(Request* request);
  // How many chunks so many bytes are cut into at least, which is how many streams find something to do.
  std::size_t chunks_in(std::size_t bytes);
  // kPassedOver: *better is the stream that would have delivered the chunk first; it may be idle. now_ns: matters with
  // several paths only.
  Pull pull(int stream, const Backlog& backlog, Chunk* chunk, int* better, std::int64_t now_ns = 0);
  // The paths whose streams would take some of what waits now, a bit mask. Streams of others would leave it to them.
  std::uint64_t taking_paths(std::int64_t now_ns);
  // Some of a message has not been taken yet.
  bool has_chunks() {
    const MutexLock lock(mutex_);
    return head_ != tail_;
  }
  // Streams whose pace is unknown count as being as fast as the fastest.
  void set_pace(int stream, const Pace& pace);
  // The same, with what was seen. at_once: as PathLoad::look().
  void look(int stream, const Pace& pace, const Delivery& delivery, const Backlog& backlog, bool at_once,
            std::int64_t now_ns);
  // All streams together need more than two round trips to move so many bytes. False if no pace is known.
  bool outlasts_round_trips(std::size_t bytes);
  // Of the nearest stream; 0: unknown.
  double round_trip_ns() {
    const MutexLock lock(mutex_);
    return nearest_ns_;
  }

 private:
  struct Puller {
    Pace pace;
    Backlog backlog;  // when the stream pulled last
  };

  Puller& puller(int stream) REQUIRES(mutex_) { return pullers_[static_cast<std::size_t>(stream)]; }
  // Streams that go over this one's path, itself included.
  bool is_sibling(int stream, int other) const REQUIRES(mutex_) {
    return !shares_.has_choice() || shares_.path_of(stream) == shares_.path_of(other);
  }
  // The fastest of them; 0: unknown.
  double fastest_sibling(int stream) const REQUIRES(mutex_);
  // The minimum size of a chunk now.
  std::size_t least_chunk_bytes() const REQUIRES(mutex_);
  // The size of a chunk for a stream of this pace; `usual` if it is not much slower than the fastest one.
  static std::size_t suitable_bytes(const Pace& pace, std::size_t usual, double fastest);
  // The time until the peer has these bytes, if the stream takes them.
  static double delivery_ns(const Puller& puller, std::size_t bytes, double fastest);
  // A sibling would deliver these bytes noticeably sooner.
  bool would_be_late(int stream, std::size_t bytes, double fastest, int* better) const REQUIRES(mutex_);
  // Of the streams over this path, the one that delivers these bytes first.
  int nearest_on(std::size_t path, std::size_t bytes) const REQUIRES(mutex_);
  // What all their paces together say.
  void look_over() REQUIRES(mutex_);

  Mutex mutex_;
  ChunkPolicy policy_ GUARDED_BY(mutex_);
  bool flows_are_limited_ GUARDED_BY(mutex_) = false;
  std::vector<int> streams_ GUARDED_BY(mutex_){0};  // that pull; never empty
  std::array<Request*, kMaxRequestsPerComm> queue_ GUARDED_BY(mutex_){};
  std::uint64_t head_ GUARDED_BY(mutex_) = 0;  // the message being cut
  std::uint64_t tail_ GUARDED_BY(mutex_) = 0;
  std::size_t offset_ GUARDED_BY(mutex_) = 0;         // of the next chunk in it
  std::size_t waiting_bytes_ GUARDED_BY(mutex_) = 0;  // of all messages in the queue, what no stream has taken yet
  std::array<Puller, kMaxStreams> pullers_ GUARDED_BY(mutex_){};
  PathShares shares_ GUARDED_BY(mutex_);
  double fastest_ GUARDED_BY(mutex_) = 0;     // of the streams that pull, bytes per ns; 0: unknown
  double nearest_ns_ GUARDED_BY(mutex_) = 0;  // the least round trip of theirs; 0: unknown
};

}  // namespace bagua_net

// ChunkScheduler: the messages of a comm that wait to be sent, in posting order, and who sends which piece. Data
// streams pull: each takes the next chunk when its socket has room, so a slow stream simply takes fewer.
//
// Pulling alone is not enough where long queues stand behind the sockets: a chunk at the end of one keeps its message,
// and soon all that may be under way, waiting. So a stream that would deliver a chunk later than all streams together
// deliver everything leaves it to the stream that delivers it first, and a stream that is much slower than another gets
// smaller chunks. Where no rates are measured, within a host, none of this happens.
//
// One mutex guards the queue: it is held for some 20 ns per chunk, and chunks are at least 64 KiB unless a whole
// message is smaller, so streams practically never meet there.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "transport/data_stream.h"
#include "transport/request.h"

namespace bagua_net {

constexpr std::size_t kMaxRequestsPerComm = 64;  // NCCL wants 32; more are answered with "later"

struct Chunk {
  Request* request = nullptr;
  std::size_t offset = 0;
  std::size_t bytes = 0;
};

struct ChunkPolicy {
  std::size_t streams = 1;  // that pull from this scheduler
  std::size_t min_bytes = 65536;
  std::size_t max_bytes = 524288;

  // One stream: the whole rest, cutting would gain nothing. Several: a fraction of what is left, so that pieces get
  // smaller towards the end and no straggler holds the tail of a message.
  std::size_t next_chunk_bytes(std::size_t remaining) const;
};

enum class Pull {
  kChunk,
  kNothing,     // nothing waits to be sent
  kPassedOver,  // another stream would deliver it first
};

class ChunkScheduler {
 public:
  explicit ChunkScheduler(ChunkPolicy policy) : policy_(policy) {}

  // The streams from `first` to before `end` pull from now on.
  void set_streams(int first, int end);
  // The request's data_, capacity_ and number_ must not change until it is done. At most kMaxRequestsPerComm wait.
  // Returns the bytes that now wait to be taken.
  std::size_t push(Request* request);
  // under_way: bytes that the stream has taken and the peer not received yet. kPassedOver: *better is the stream that
  // would have delivered the chunk first; it may be idle.
  Pull pull(int stream, std::size_t under_way, Chunk* chunk, int* better);
  // The stream delivered at this rate. at_least: at times it had nothing to deliver, so it may be faster (a peer
  // acknowledges the last bytes late). Streams whose rate is unknown count as being as fast as the fastest.
  void add_rate(int stream, double bytes_per_ns, bool at_least, std::int64_t now_ns);

 private:
  struct Pace {
    double bytes_per_ns = 0;  // 0: unknown
    std::int64_t known_since_ns = 0;
    std::size_t under_way = 0;  // when the stream pulled last
  };

  // What a stream so much slower than the fastest should take of a chunk of the usual size.
  std::size_t suitable_bytes(const Pace& pace, std::size_t usual) const;
  // Would have delivered these bytes after all streams together are done with everything.
  bool would_be_late(const Pace& pace, std::size_t bytes, int* better) const;
  void sum_up();

  std::mutex mutex_;  // guards everything below
  ChunkPolicy policy_;
  int first_stream_ = 0;
  std::array<Request*, kMaxRequestsPerComm> queue_{};
  std::uint64_t head_ = 0;  // the message being cut
  std::uint64_t tail_ = 0;
  std::size_t offset_ = 0;         // of the next chunk in it
  std::size_t waiting_bytes_ = 0;  // of all messages in the queue, what no stream has taken yet
  std::array<Pace, kMaxStreams> paces_{};
  // Of the streams that pull.
  double fastest_ = 0;  // bytes per ns
  double sum_ = 0;
  std::size_t under_way_ = 0;
};

}  // namespace bagua_net

// ChunkScheduler: the messages of a comm that wait to be sent, in posting order, and who sends which piece. Data
// streams pull: each takes the next chunk when its socket has room, so a slow stream simply takes fewer.
//
// One mutex guards the queue: it is held for some 20 ns per chunk, and chunks are at least 64 KiB unless a whole
// message is smaller, so streams practically never meet there.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>

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

class ChunkScheduler {
 public:
  explicit ChunkScheduler(ChunkPolicy policy) : policy_(policy) {}

  // The request's data_, capacity_ and number_ must not change until it is done. At most kMaxRequestsPerComm wait.
  void push(Request* request);
  // False: nothing to send.
  bool pull(Chunk* chunk);

 private:
  const ChunkPolicy policy_;
  std::mutex mutex_;  // guards everything below
  std::array<Request*, kMaxRequestsPerComm> queue_{};
  std::uint64_t head_ = 0;  // the message being cut
  std::uint64_t tail_ = 0;
  std::size_t offset_ = 0;  // of the next chunk in it
};

}  // namespace bagua_net

// Chunk: a piece of a message on its way to the peer. Who holds it says what has become of it:
//
//   queued          ChunkScheduler (as part of its message), or ReplayQueue after its stream was lost
//   writing         SendStream, which has taken it and not written it whole yet
//   unacknowledged  UnacknowledgedChunks of the stream that wrote it: the peer may still lose it
//   done            nobody
//
//   queued --a stream pulls it--> writing --the kernel has all of it--> unacknowledged --the peer has it--> done
//                                 writing, unacknowledged --the stream is lost--> queued, in the ReplayQueue
//
// Without recovery, a chunk that was copied into the kernel is done at once. A request is done when all its chunks are,
// or sooner: once a chunk of which a copy was kept (`copy`) is written, the request does not depend on it any more.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transport/chunks/block_pool.h"
#include "transport/chunks/request.h"

namespace bagua_net {

struct Chunk {
  Request* request = nullptr;  // nullptr: it does not depend on this chunk any more
  std::size_t offset = 0;
  std::size_t bytes = 0;
  const std::uint8_t* data = nullptr;  // the payload, in the caller's memory or in `copy`
  std::uint64_t message_number = 0;
  std::size_t message_bytes = 0;
  std::uint16_t attempt = 0;  // how often it was sent before
  bool by_reference = false;  // the kernel may have no copy of it
  bool asks_only = false;     // sent again for its acknowledgement: nothing is missing without it
  Block copy;                 // header and payload; empty: none was made
};

}  // namespace bagua_net

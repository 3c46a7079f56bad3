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

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "transport/chunks/request.h"

namespace bagua_net {

// BlockPool: memory for copies of chunks that may have to be sent again. Blocks are used over and over: in the long run
// nothing is allocated. One thread at a time. A block may be given back to another pool than the one it came from.
struct Block {
  std::unique_ptr<std::uint8_t[]> bytes;
  std::size_t capacity = 0;
};

class BlockPool {
 public:
  Block take(std::size_t bytes) {
    const std::size_t size_class = class_of(bytes);
    std::vector<Block>& free = free_[size_class];
    if (free.empty()) {
      const std::size_t capacity = kMinBytes << size_class;
      // Not zeroed: pages that are never written cost nothing.
      return {std::unique_ptr<std::uint8_t[]>(new std::uint8_t[capacity]), capacity};
    }
    Block block = std::move(free.back());
    free.pop_back();
    return block;
  }
  void give_back(Block block) {
    if (block.bytes != nullptr) free_[class_of(block.capacity)].push_back(std::move(block));
  }

 private:
  static constexpr std::size_t kMinBytes = 2048;
  static constexpr std::size_t kClasses = 40;

  static std::size_t class_of(std::size_t bytes) {
    std::size_t size_class = 0;
    while (kMinBytes << size_class < bytes) ++size_class;
    return size_class;
  }

  std::array<std::vector<Block>, kClasses> free_;  // by size, doubling from class to class
};

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

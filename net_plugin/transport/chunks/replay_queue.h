// ReplayQueue: chunks of lost streams, to be sent again on other streams. In the order of their messages; a stream
// takes none below what it has carried already, so that message numbers never fall within a stream
// ([Note: parked streams cannot deadlock] in receive_table.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "transport/chunks/chunk.h"

namespace bagua_net {

class ReplayQueue {
 public:
  // Any thread; cheap.
  bool any() const { return any_.load(std::memory_order_acquire); }

  void put(std::vector<Chunk> chunks) {
    const MutexLock lock(mutex_);
    for (Chunk& chunk : chunks) {
      const Position position{chunk.message_number, chunk.offset};
      chunks_.emplace(position, std::move(chunk));
    }
    any_.store(!chunks_.empty(), std::memory_order_release);
  }
  // The first chunk of the message least_number or a later one; false: there is none.
  bool pull(std::uint64_t least_number, Chunk* chunk) {
    const MutexLock lock(mutex_);
    const auto found = chunks_.lower_bound({least_number, 0});
    if (found == chunks_.end()) return false;
    *chunk = std::move(found->second);
    chunks_.erase(found);
    any_.store(!chunks_.empty(), std::memory_order_release);
    return true;
  }
  struct Summary {
    std::size_t chunks = 0;
    std::size_t bytes = 0;
    std::uint64_t first_message = 0;
  };
  Summary summary() {
    const MutexLock lock(mutex_);
    Summary summary;
    summary.chunks = chunks_.size();
    if (!chunks_.empty()) summary.first_message = chunks_.begin()->first.first;
    for (const auto& [position, chunk] : chunks_) summary.bytes += chunk.bytes;
    return summary;
  }

 private:
  using Position = std::pair<std::uint64_t, std::size_t>;  // message number, offset

  Mutex mutex_;
  std::multimap<Position, Chunk> chunks_ GUARDED_BY(mutex_);
  std::atomic<bool> any_{false};
};

}  // namespace bagua_net

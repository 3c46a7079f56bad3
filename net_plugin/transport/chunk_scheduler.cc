#include "transport/chunk_scheduler.h"

#include <algorithm>

namespace bagua_net {
namespace {
constexpr std::size_t kChunkAlignment = 4096;  // pages: keeps the copies of neighbouring streams apart
}

std::size_t ChunkPolicy::next_chunk_bytes(std::size_t remaining) const {
  if (streams == 1 || remaining <= min_bytes) return remaining;
  std::size_t bytes = remaining / streams;
  bytes = (bytes + kChunkAlignment - 1) / kChunkAlignment * kChunkAlignment;
  bytes = std::clamp(bytes, min_bytes, max_bytes);
  return std::min(bytes, remaining);
}

void ChunkScheduler::push(Request* request) {
  const std::lock_guard<std::mutex> lock(mutex_);
  queue_[tail_ % queue_.size()] = request;
  ++tail_;
}

bool ChunkScheduler::pull(Chunk* chunk) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (head_ == tail_) return false;
  Request* request = queue_[head_ % queue_.size()];
  const std::size_t remaining = request->capacity_ - offset_;
  *chunk = {request, offset_, policy_.next_chunk_bytes(remaining)};
  offset_ += chunk->bytes;
  if (offset_ == request->capacity_) {
    ++head_;
    offset_ = 0;
  }
  return true;
}

}  // namespace bagua_net

#include "transport/worker_pool.h"

#include <algorithm>

namespace bagua_net {
namespace {

// Most comms have three streams for workers: these lie evenly over the pool.
constexpr std::size_t kUsualStreams = 3;

}  // namespace

std::size_t WorkerPool::open_lane(Direction direction) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::size_t number = lanes_[static_cast<std::size_t>(direction)]++;
  // The first streams of a comm and of its counterpart in the ring should not meet.
  return direction == Direction::kSend ? number : number + static_cast<std::size_t>(size_) / 2;
}

Status WorkerPool::assign(std::size_t lane, int stream_index, EventLoopWorker** worker) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (size_ == 0) return Status::internal_error("a worker was asked of a pool without workers");
  if (workers_.empty()) {
    for (int number = 0; number < size_; ++number) {
      auto started = std::make_unique<EventLoopWorker>(spin_us_, affinity_);
      const Status status = started->start(number);
      if (!status.is_ok()) {
        workers_.clear();
        return status;
      }
      workers_.push_back(std::move(started));
    }
  }
  const std::size_t distance = std::max<std::size_t>(workers_.size() / kUsualStreams, 1);
  *worker = workers_[(lane + static_cast<std::size_t>(stream_index) * distance) % workers_.size()].get();
  return Status::ok();
}

void WorkerPool::stop() {
  const std::lock_guard<std::mutex> lock(mutex_);
  workers_.clear();
}

}  // namespace bagua_net

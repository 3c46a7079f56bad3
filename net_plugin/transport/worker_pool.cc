#include "transport/worker_pool.h"

#include <algorithm>

namespace bagua_net {
namespace {

// Most comms have four streams for workers: these lie evenly over the pool.
constexpr std::size_t kUsualStreams = 4;

}  // namespace

Status WorkerPool::assign(int stream_index, EventLoopWorker** worker) {
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
  const auto index = static_cast<std::size_t>(stream_index);
  const std::size_t distance = std::max<std::size_t>(workers_.size() / kUsualStreams, 1);
  *worker = workers_[(assigned_[index]++ + index * distance) % workers_.size()].get();
  return Status::ok();
}

void WorkerPool::stop() {
  const std::lock_guard<std::mutex> lock(mutex_);
  workers_.clear();
}

}  // namespace bagua_net

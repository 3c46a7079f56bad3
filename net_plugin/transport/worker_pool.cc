#include "transport/worker_pool.h"

namespace bagua_net {

Status WorkerPool::assign(EventLoopWorker** worker) {
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
  *worker = workers_[next_++ % workers_.size()].get();
  return Status::ok();
}

void WorkerPool::stop() {
  const std::lock_guard<std::mutex> lock(mutex_);
  workers_.clear();
}

}  // namespace bagua_net

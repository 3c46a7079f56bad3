#include "transport/stream/worker_pool.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/log_sink.h"
#include "base/monotonic_clock.h"

namespace bagua_net {
namespace {

// Most comms have three streams for workers. They are distributed evenly over the pool.
constexpr std::size_t kUsualStreams = 3;

}  // namespace

WorkerPool::Lane WorkerPool::open_lane(Direction direction, PeerLocation location) {
  const MutexLock lock(mutex_);
  start();
  const std::size_t number = lanes_[static_cast<std::size_t>(location)][static_cast<std::size_t>(direction)]++;
  // The first streams of a comm and of its counterpart in the ring should not meet.
  return {direction == Direction::kSend ? number : number + width(location) / 2, location};
}

void WorkerPool::start() {
  if (std::exchange(has_started_, true)) return;
  for (int number = 0; number < wanted_; ++number) {
    auto started = std::make_unique<EventLoopWorker>(spin_us_, affinity_);
    const Status status = started->start(number);
    if (!status.is_ok()) {
      BAGUA_NET_WARN("Bagua-Net: going on with " + std::to_string(number) + " I/O threads instead of " +
                     std::to_string(wanted_) + ": " + status.message());
      break;
    }
    workers_.push_back(std::move(started));
  }
  size_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
}

Status WorkerPool::assign(const Lane& lane, int stream_index, EventLoopWorker** worker) {
  const MutexLock lock(mutex_);
  if (workers_.empty()) return Status::internal_error("a worker was asked of a pool without workers");
  const std::size_t count = width(lane.location);
  const std::size_t distance = std::max<std::size_t>(count / kUsualStreams, 1);
  *worker = workers_[(lane.first + static_cast<std::size_t>(stream_index) * distance) % count].get();
  return Status::ok();
}

RecoveryThread* WorkerPool::recovery() {
  const MutexLock lock(mutex_);
  if (!std::exchange(has_started_recovery_, true)) {
    auto started = std::make_unique<RecoveryThread>();
    const Status status = started->start(links_);
    if (!status.is_ok()) {
      BAGUA_NET_WARN("Bagua-Net: connections that are lost are replaced only while the application calls: " +
                     status.message());
      return nullptr;
    }
    recovery_ = std::move(started);
  }
  return recovery_.get();
}

void WorkerPool::close(std::unique_ptr<Recoverable> closing) {
  if (closing->is_closed(monotonic_ms())) return;
  RecoveryThread* const thread = running_recovery();
  // Without it, the destructor waits.
  if (thread != nullptr) thread->close(std::move(closing));
}

bool WorkerPool::is_closing() {
  RecoveryThread* const thread = running_recovery();
  return thread != nullptr && thread->is_closing();
}

void WorkerPool::wait_until_closed() {
  if (RecoveryThread* const thread = running_recovery()) thread->wait_until_closed();
}

RecoveryThread* WorkerPool::running_recovery() {
  const MutexLock lock(mutex_);
  return recovery_.get();
}

void WorkerPool::stop() {
  const MutexLock lock(mutex_);
  recovery_.reset();
  workers_.clear();
  has_started_ = has_started_recovery_ = false;
  size_.store(wanted_, std::memory_order_relaxed);
}

}  // namespace bagua_net

// A data stream that keeps its worker from looking after any other until it is released.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <utility>

#include "support/check.h"
#include "support/loopback.h"
#include "transport/stream/byte_stream.h"
#include "transport/stream/data_stream.h"
#include "transport/stream/worker_pool.h"

namespace bagua_net {

struct IgnoredFailures final : FailureSink {
  void fail(Status /*status*/) override {}
};

class StallingStream final : public DataStream {
 public:
  StallingStream(OwnedFd socket, FailureSink* failures)
      : DataStream(make_tcp_byte_stream(std::move(socket)), failures, 0) {}

  StreamProgress progress(std::size_t) override {
    std::unique_lock<std::mutex> lock(mutex_);
    stalling_ = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return released_; });
    return StreamProgress::kIdle;
  }
  std::uint32_t poll_flags() const override { return 0; }

  void wait_until_stalling() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return stalling_; });
  }
  void release() {
    const std::lock_guard<std::mutex> lock(mutex_);
    released_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stalling_ = false;
  bool released_ = false;
};

// The first worker of a pool, from the beginning until it is released, at the latest at the end.
class StalledWorker {
 public:
  explicit StalledWorker(WorkerPool* pool) {
    CHECK_OK(pool->assign({}, 0, &worker_));
    CHECK_OK(worker_->attach(&stalling_, &id_));
    worker_->kick(id_);
    stalling_.wait_until_stalling();
  }
  ~StalledWorker() {
    stalling_.release();
    worker_->detach(&stalling_, id_);
  }
  StalledWorker(const StalledWorker&) = delete;
  StalledWorker& operator=(const StalledWorker&) = delete;
  void release() { stalling_.release(); }

 private:
  std::pair<OwnedFd, OwnedFd> sockets_ = tcp_pair();
  IgnoredFailures failures_;
  StallingStream stalling_{std::move(sockets_.first), &failures_};
  EventLoopWorker* worker_ = nullptr;
  std::uint64_t id_ = 0;
};

}  // namespace bagua_net

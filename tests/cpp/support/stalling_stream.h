// A data stream that keeps its worker from looking after any other until it is released.
#pragma once

#include <condition_variable>
#include <mutex>
#include <utility>

#include "base/owned_fd.h"
#include "transport/stream/byte_stream.h"
#include "transport/stream/data_stream.h"

namespace bagua_net {

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

}  // namespace bagua_net

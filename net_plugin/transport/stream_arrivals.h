// StreamArrivals: connections that join a comm after it began. The connection service's thread hands them in, the
// thread that calls the comm takes them: a comm's streams stay that thread's business. Shared by both, because the comm
// may be closed while a handshake is under way; what nobody takes is closed with it.
#pragma once

#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "base/owned_fd.h"

namespace bagua_net {

class StreamArrivals {
 public:
  // One will be handed in for certain; from here on the peer may use it.
  void announce() {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++announced_;
    any_.store(true, std::memory_order_release);
  }
  void hand_in_announced(OwnedFd socket) {
    const std::lock_guard<std::mutex> lock(mutex_);
    --announced_;
    sockets_.push_back(std::move(socket));
  }
  void hand_in(OwnedFd socket) {
    announce();
    hand_in_announced(std::move(socket));
  }

  // Cheap: asked in every call of a comm. True also while one is announced.
  bool any() const { return any_.load(std::memory_order_acquire); }

  std::vector<OwnedFd> take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    any_.store(announced_ > 0, std::memory_order_relaxed);
    return std::exchange(sockets_, {});
  }

 private:
  std::mutex mutex_;  // guards the next two
  std::vector<OwnedFd> sockets_;
  int announced_ = 0;
  std::atomic<bool> any_{false};
};

}  // namespace bagua_net

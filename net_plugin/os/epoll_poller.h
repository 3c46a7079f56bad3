// EpollPoller: epoll with a wake-up from other threads. Files are known by a number of the owner's choice, so that an
// event that was collected before its file was removed can be recognised as stale.
#pragma once

#include <sys/epoll.h>

#include <cstdint>
#include <vector>

#include "base/owned_fd.h"
#include "base/status.h"

namespace bagua_net {

class EpollPoller {
 public:
  struct Event {
    std::uint64_t id;
    std::uint32_t flags;  // EPOLLIN and friends
  };

  Status open();
  Status add(int fd, std::uint64_t id, std::uint32_t flags);
  Status modify(int fd, std::uint64_t id, std::uint32_t flags);
  void remove(int fd);

  // Waits for events or wake(); timeout_ms -1: without limit, 0: only looks.
  void wait(int timeout_ms, std::vector<Event>* events);
  // Any thread: ends the current or the next wait.
  void wake();

 private:
  OwnedFd epoll_;
  OwnedFd wake_;
};

}  // namespace bagua_net

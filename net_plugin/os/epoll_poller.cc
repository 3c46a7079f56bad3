#include "os/epoll_poller.h"

#include <sys/eventfd.h>

#include <cerrno>

namespace bagua_net {
namespace {

constexpr std::uint64_t kWakeId = ~std::uint64_t{0};
constexpr int kEventsPerWait = 64;

}  // namespace

Status EpollPoller::open() {
  epoll_ = OwnedFd(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_.is_open()) return Status::system_error("epoll_create1", errno);
  wake_ = OwnedFd(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!wake_.is_open()) return Status::system_error("eventfd", errno);
  return add(wake_.get(), kWakeId, EPOLLIN);
}

Status EpollPoller::add(int fd, std::uint64_t id, std::uint32_t flags) {
  epoll_event event{};
  event.events = flags;
  event.data.u64 = id;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) return Status::system_error("epoll_ctl add", errno);
  return Status::ok();
}

Status EpollPoller::modify(int fd, std::uint64_t id, std::uint32_t flags) {
  epoll_event event{};
  event.events = flags;
  event.data.u64 = id;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event) != 0) return Status::system_error("epoll_ctl mod", errno);
  return Status::ok();
}

void EpollPoller::remove(int fd) { ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr); }

void EpollPoller::wait(int timeout_ms, std::vector<Event>* events) {
  events->clear();
  epoll_event ready[kEventsPerWait];
  // EINTR simply ends the wait: every caller loops.
  const int count = ::epoll_wait(epoll_.get(), ready, kEventsPerWait, timeout_ms);
  for (int i = 0; i < count; ++i) {
    if (ready[i].data.u64 == kWakeId) {
      std::uint64_t wakes = 0;
      // The value does not matter; a failed read means that another read emptied it.
      [[maybe_unused]] const auto ignored = ::read(wake_.get(), &wakes, sizeof wakes);
    } else {
      events->push_back({ready[i].data.u64, ready[i].events});
    }
  }
}

void EpollPoller::wake() {
  const std::uint64_t one = 1;
  // Fails only when the counter is full, and then the wait ends anyway.
  [[maybe_unused]] const auto ignored = ::write(wake_.get(), &one, sizeof one);
}

}  // namespace bagua_net

#include "os/zero_copy_sends.h"

#include <linux/errqueue.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "base/monotonic_clock.h"

namespace bagua_net {
namespace {

ssize_t plain_send(int socket, const void* data, std::size_t bytes) {
  return ::send(socket, data, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
}

bool is_of_error_queue(const cmsghdr& entry) {
  return (entry.cmsg_level == SOL_IP && entry.cmsg_type == IP_RECVERR) ||
         (entry.cmsg_level == SOL_IPV6 && entry.cmsg_type == IPV6_RECVERR);
}

}  // namespace

void allow_zero_copy_sends(int socket, bool allowed) {
  const int on = allowed ? 1 : 0;
  [[maybe_unused]] const int ignored = ::setsockopt(socket, SOL_SOCKET, SO_ZEROCOPY, &on, sizeof on);
}

bool ZeroCopySends::are_allowed(int socket) {
  int on = 0;
  socklen_t length = sizeof on;
  return ::getsockopt(socket, SOL_SOCKET, SO_ZEROCOPY, &on, &length) == 0 && on != 0;
}

ssize_t ZeroCopySends::send(const void* data, std::size_t bytes) {
  take_notices();
  if (trial_ == Trial::kCopies) {
    errno = EOPNOTSUPP;
    return -1;
  }
  if (trial_ == Trial::kUnderWay) return plain_send(socket_, data, bytes);
  const ssize_t sent = ::send(socket_, data, bytes, MSG_DONTWAIT | MSG_NOSIGNAL | MSG_ZEROCOPY);
  // The limit of locked memory, or of notices that wait.
  if (sent < 0 && errno == ENOBUFS) return plain_send(socket_, data, bytes);
  // Memory that cannot be pinned, such as a device's. It can be copied.
  if (sent < 0 && errno == EFAULT) {
    trial_ = Trial::kCopies;
    errno = EOPNOTSUPP;
  }
  if (sent > 0) {
    ++under_way_;
    if (trial_ == Trial::kNotBegun) trial_ = Trial::kUnderWay;
  }
  return sent;
}

void ZeroCopySends::take_notices() {
  while (under_way_ > 0) {
    alignas(cmsghdr) char control[256];
    msghdr message{};
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    if (::recvmsg(socket_, &message, MSG_ERRQUEUE | MSG_DONTWAIT) < 0) return;
    for (cmsghdr* entry = CMSG_FIRSTHDR(&message); entry != nullptr; entry = CMSG_NXTHDR(&message, entry)) {
      if (!is_of_error_queue(*entry)) continue;
      sock_extended_err notice{};
      std::memcpy(&notice, CMSG_DATA(entry), sizeof notice);
      if (notice.ee_origin != SO_EE_ORIGIN_ZEROCOPY) continue;
      under_way_ -= notice.ee_data - notice.ee_info + 1;  // a range of sends
      if (trial_ == Trial::kUnderWay) trial_ = Trial::kRefers;
      if ((notice.ee_code & SO_EE_CODE_ZEROCOPY_COPIED) != 0) trial_ = Trial::kCopies;
    }
  }
}

bool ZeroCopySends::wait_until_released(int limit_ms) {
  const std::int64_t end_ms = monotonic_ms() + limit_ms;
  for (;;) {
    const bool is_last = monotonic_ms() >= end_ms;  // before the look: this thread may be stopped after it
    take_notices();
    if (under_way_ == 0 || is_last) return under_way_ == 0;
    // A poll would return at once: the socket is disconnected.
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

}  // namespace bagua_net

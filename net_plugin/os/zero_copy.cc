#include "os/zero_copy.h"

#include <fcntl.h>
#include <linux/errqueue.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "base/monotonic_clock.h"
#include "os/process_room.h"

namespace bagua_net {
namespace {

// More than a ring over 16 channels needs, with three streams each. Descriptors are the process's own, of which it may
// have as few as 1024: what goes beyond is copied.
constexpr int kMaxPipes = 64;
// 64 pages: fewer calls than with the usual 16.
constexpr int kPipeBytes = 64 * 4096;
// Beyond the limit for all pipes of an unprivileged user (pipe-user-pages-soft) new ones get two: slower than a copy.
constexpr int kMinPipeBytes = 16 * 4096;

// The pipes of one process. A forked child begins with none: it abandons those of its parent. In one word, because a
// lock could be held while another thread forks.
class PipeCount {
 public:
  bool add(pid_t process) {
    Word before = word_.load();
    Word after{};
    do {
      const int open = before.process == process ? before.open : 0;
      if (open >= kMaxPipes) return false;
      after = {process, open + 1};
    } while (!word_.compare_exchange_weak(before, after));
    return true;
  }
  void remove(pid_t process) {
    Word before = word_.load();
    while (before.process == process && !word_.compare_exchange_weak(before, {process, before.open - 1})) {
    }
  }

 private:
  struct alignas(8) Word {  // or it would not be lock-free
    pid_t process;
    int open;
  };
  std::atomic<Word> word_{};
};

PipeCount pipe_count;

}  // namespace

std::unique_ptr<PagePipe> PagePipe::open() {
  const pid_t process = ::getpid();
  if (optional_descriptors() < 2 || !pipe_count.add(process)) return nullptr;
  int ends[2];
  if (::pipe2(ends, O_NONBLOCK | O_CLOEXEC) != 0) {
    pipe_count.remove(process);
    return nullptr;
  }
  std::unique_ptr<PagePipe> pipe(new PagePipe(OwnedFd(ends[0]), OwnedFd(ends[1]), process));
  const bool is_large = ::fcntl(ends[1], F_SETPIPE_SZ, kPipeBytes) >= 0;
  if (!is_large && ::fcntl(ends[1], F_GETPIPE_SZ) < kMinPipeBytes) return nullptr;
  return pipe;
}

PagePipe::~PagePipe() { pipe_count.remove(process_); }

ssize_t PagePipe::send(int socket, const void* data, std::size_t bytes) {
  if (piped_ == 0) {
    const iovec piece{const_cast<void*>(data), bytes};
    const ssize_t taken = ::vmsplice(write_end_.get(), &piece, 1, SPLICE_F_NONBLOCK);
    if (taken <= 0) {
      if (taken < 0 && errno == EINTR) return -1;
      errno = EOPNOTSUPP;
      return -1;
    }
    piped_ = static_cast<std::size_t>(taken);
  }
  const unsigned more = piped_ < bytes ? SPLICE_F_MORE : 0;
  const ssize_t sent = ::splice(read_end_.get(), nullptr, socket, nullptr, piped_, SPLICE_F_NONBLOCK | more);
  if (sent > 0) {
    piped_ -= static_cast<std::size_t>(sent);
    return sent;
  }
  // Of anything else the copy that comes next will say what it is.
  if (sent == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) errno = EOPNOTSUPP;
  return -1;
}

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

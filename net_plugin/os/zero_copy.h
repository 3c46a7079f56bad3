// PagePipe: sends memory over a socket without copying it. vmsplice() makes a pipe refer to the pages, splice() lets
// the socket refer to them in its turn, and on one host the receiver's copy out of its socket is the only one there is.
// So the memory must stay as it is until the receiving program has the bytes, which TCP's own acknowledgement does not
// say.
//
// A socket whose peer is gone raises SIGPIPE, and splice() has no MSG_NOSIGNAL: for threads that block the signal, as
// all of ours do.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "base/owned_fd.h"

namespace bagua_net {

class PagePipe {
 public:
  // nullptr where the system has no such pipes, or this process has its share of them: two descriptors each.
  static std::unique_ptr<PagePipe> open();
  ~PagePipe();

  // Like send() on a non-blocking socket, but fewer bytes than asked for do not mean that the socket is full: EAGAIN
  // does. `data` goes on where the last call stopped. EOPNOTSUPP: this memory cannot be referred to, or the socket is
  // broken; no byte from `data` on was sent, and a plain send() will tell.
  ssize_t send(int socket, const void* data, std::size_t bytes);

 private:
  PagePipe(OwnedFd read_end, OwnedFd write_end, pid_t process)
      : read_end_(std::move(read_end)), write_end_(std::move(write_end)), process_(process) {}

  OwnedFd read_end_;
  OwnedFd write_end_;
  const pid_t process_;    // that opened it
  std::size_t piped_ = 0;  // bytes in the pipe: those that come next
};

// ZeroCopySends: what one TCP socket sends with MSG_ZEROCOPY. The kernel refers to the memory, and says in the socket's
// error queue when it no longer does, and whether it copied after all, as it does where the network card cannot gather
// pages or the packets stay on this machine. The first send is a trial: if it was copied, all others are plain.
//
// Source: Documentation/networking/msg_zerocopy.rst of Linux. One thread at a time.
class ZeroCopySends {
 public:
  // Whether this socket may send so (allow_zero_copy_sends).
  static bool are_allowed(int socket);

  explicit ZeroCopySends(int socket) : socket_(socket) {}

  // Like send() on a non-blocking socket. The memory must stay as it is until the peer's program has the bytes.
  // EOPNOTSUPP: nothing was sent, because the kernel copies after all, or cannot refer to this memory.
  ssize_t send(const void* data, std::size_t bytes);
  // Reads what the kernel says of earlier sends: until then the socket counts as one with an error.
  void take_notices();
  bool has_any_under_way() const { return under_way_ > 0; }
  // Of a socket that is disconnected: until the network card has let go of the memory, too. False: it has not in time.
  bool wait_until_released(int limit_ms);

 private:
  enum class Trial { kNotBegun, kUnderWay, kRefers, kCopies };

  const int socket_;
  Trial trial_ = Trial::kNotBegun;
  std::uint32_t under_way_ = 0;  // sends that the kernel has not released
};

// A kernel that cannot leaves it off.
void allow_zero_copy_sends(int socket, bool allowed);

}  // namespace bagua_net

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

}  // namespace bagua_net

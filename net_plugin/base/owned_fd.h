// OwnedFd, and the sockets that a forked child must not keep: as long as it has its copies of them, its parent's end
// goes unnoticed by the peers, and the kernel answers for a process that is gone.
//
// A bit for each descriptor, so that the child can find them without a lock or memory: it has one thread, and any lock
// may be held indefinitely in its copy of the process. A socket that another thread opens or closes at the very moment
// of a fork may be missed.
#pragma once

#include <unistd.h>

#include <utility>

namespace bagua_net {

// A socket that a child is not to keep; any thread.
void mark_uninherited(int fd);
// Before it is closed; harmless for a descriptor that was never marked.
void unmark_uninherited(int fd);
// In the child, before fork() returns: async-signal-safe.
void close_uninherited();

// OwnedFd: a file descriptor with one owner, closed by its destructor.
class OwnedFd {
 public:
  OwnedFd() = default;
  explicit OwnedFd(int fd) : fd_(fd) {}
  OwnedFd(OwnedFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  OwnedFd& operator=(OwnedFd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  OwnedFd(const OwnedFd&) = delete;
  OwnedFd& operator=(const OwnedFd&) = delete;
  ~OwnedFd() { reset(); }

  int get() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  void reset() {
    // EINTR from close still frees the descriptor on Linux: never retry.
    if (fd_ < 0) return;
    unmark_uninherited(fd_);
    ::close(std::exchange(fd_, -1));
  }

 private:
  int fd_ = -1;
};

}  // namespace bagua_net

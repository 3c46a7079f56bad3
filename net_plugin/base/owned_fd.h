// OwnedFd: a file descriptor with one owner, closed by its destructor.
#pragma once

#include <unistd.h>

#include <utility>

#include "base/inherited_sockets.h"

namespace bagua_net {

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

#include "os/page_pipe.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

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

}  // namespace bagua_net

#include "transport/send_stream.h"

#include <sys/epoll.h>

#include <cerrno>

namespace bagua_net {

std::uint32_t SendStream::poll_flags() const { return EPOLLOUT; }

bool SendStream::take_chunk() {
  if (!scheduler_->pull(&chunk_)) {
    chunk_.request = nullptr;
    return false;
  }
  FrameHeader header;
  header.payload_bytes = static_cast<std::uint32_t>(chunk_.bytes);
  header.message_number = chunk_.request->number_;
  header.offset = chunk_.offset;
  header.message_bytes = chunk_.request->capacity_;
  encode_frame_header(header, header_.data());
  written_ = 0;
  return true;
}

StreamProgress SendStream::progress(std::size_t budget) {
  std::size_t moved = 0;
  set_blocked(false);
  for (;;) {
    if (chunk_.request == nullptr && !take_chunk()) return StreamProgress::kIdle;
    if (moved >= budget) return StreamProgress::kMore;

    iovec pieces[2];
    std::size_t count = 0;
    if (written_ < header_.size()) {
      pieces[count++] = {header_.data() + written_, header_.size() - written_};
    }
    const std::size_t payload_written = written_ > header_.size() ? written_ - header_.size() : 0;
    if (payload_written < chunk_.bytes) {
      pieces[count++] = {chunk_.request->data_ + chunk_.offset + payload_written, chunk_.bytes - payload_written};
    }
    const ssize_t written = write(pieces, count, header_.size() + chunk_.bytes - written_);
    if (written < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN && errno != EWOULDBLOCK) {
        return fail(Status::remote_error(Status::system_error("send", errno).message()));
      }
      set_blocked(true);
      return StreamProgress::kBlocked;
    }
    moved += static_cast<std::size_t>(written);
    written_ += static_cast<std::size_t>(written);
    if (written_ < header_.size() + chunk_.bytes) {
      // A short write means a full socket buffer, and the kernel then tells the poller when there is room.
      set_blocked(true);
      return StreamProgress::kBlocked;
    }
    chunk_.request->chunk_moved(chunk_.bytes, chunk_.request->capacity_);
    chunk_.request = nullptr;
  }
}

}  // namespace bagua_net

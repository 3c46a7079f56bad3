#include "transport/recv_stream.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace bagua_net {

// EPOLLOUT: for an acknowledgement that found no room. No event comes of it otherwise.
std::uint32_t RecvStream::poll_flags() const { return EPOLLIN | EPOLLRDHUP | EPOLLOUT; }

Status RecvStream::open_chunk() {
  BAGUA_NET_RETURN_IF_ERROR(decode_frame_header(staging_.data() + staging_begin_, &header_));
  BAGUA_NET_RETURN_IF_ERROR(table_->find(header_, index(), &request_));
  if (request_ == nullptr) {
    stats_.park();
    return Status::ok();
  }
  stats_.resume();
  was_used_ = true;
  staging_begin_ += kFrameHeaderBytes;
  destination_ = request_->data_ + header_.offset;
  remaining_ = header_.payload_bytes;
  return Status::ok();
}

void RecvStream::take_staged_payload() {
  const std::size_t bytes = std::min(staged(), remaining_);
  if (bytes > 0) std::memcpy(destination_, staging_.data() + staging_begin_, bytes);
  staging_begin_ += bytes;
  destination_ += bytes;
  remaining_ -= bytes;
}

Status RecvStream::finish_chunk() {
  // Such a chunk was the sender's memory until now. A sender that gives up resets the connection before it touches
  // that.
  if (header_.acknowledge && is_broken()) {
    return Status::remote_error("the peer aborted while message " + std::to_string(header_.message_number) +
                                " was under way; see that rank's log");
  }
  // Before the request is done: then this process may end, and the sender still waits for it.
  if (header_.acknowledge) {
    received_bytes_ += header_.payload_bytes;
    send_acknowledgement();
  }
  stats_->chunks.add(1);
  request_->chunk_moved(header_.payload_bytes, header_.message_bytes);
  request_ = nullptr;
  return Status::ok();
}

void RecvStream::send_acknowledgement() {
  while (acknowledgement_left_ > 0 || acknowledged_bytes_ < received_bytes_) {
    if (acknowledgement_left_ == 0) {
      encode_acknowledgement(received_bytes_, acknowledgement_.data());
      acknowledgement_left_ = acknowledgement_.size();
      acknowledged_bytes_ = received_bytes_;
    }
    const iovec piece{acknowledgement_.data() + acknowledgement_.size() - acknowledgement_left_, acknowledgement_left_};
    const ssize_t written = write(&piece, 1, acknowledgement_left_);
    if (written < 0) {
      if (errno == EINTR) continue;
      return;  // no room: the poller tells when there is; or the peer is gone: the next read tells
    }
    acknowledgement_left_ -= static_cast<std::size_t>(written);
  }
}

StreamProgress RecvStream::end_of_input() {
  if (in_payload() || staged() > 0) {
    return fail(Status::remote_error("the peer closed the connection in the middle of message " +
                                     std::to_string(header_.message_number) +
                                     ": its process ended or aborted; see that rank's log"));
  }
  ended_ = true;
  stats_.set_state(StreamState::kEnded);
  on_end_();
  return StreamProgress::kEnded;
}

StreamProgress RecvStream::progress(std::size_t budget) {
  if (ended_) return StreamProgress::kEnded;  // a driver may look again
  std::size_t moved = 0;
  bool drained = false;
  set_blocked(false);
  send_acknowledgement();
  for (;;) {
    while (!in_payload() && staged() >= kFrameHeaderBytes) {
      const Status status = open_chunk();
      if (!status.is_ok()) return fail(status);
      if (!in_payload()) return StreamProgress::kIdle;  // parked
      take_staged_payload();
      const Status finished = remaining_ == 0 ? finish_chunk() : Status::ok();
      if (!finished.is_ok()) return fail(finished);
    }
    // Here the staging buffer holds less than a header, or nothing while a payload is incomplete.
    if (drained) {
      set_blocked(true);
      return StreamProgress::kBlocked;
    }
    if (moved >= budget) return StreamProgress::kMore;
    if (staging_begin_ > 0) {
      std::memmove(staging_.data(), staging_.data() + staging_begin_, staged());
      staging_end_ -= staging_begin_;
      staging_begin_ = 0;
    }

    iovec pieces[2];
    std::size_t count = 0;
    if (in_payload()) pieces[count++] = {destination_, remaining_};
    pieces[count++] = {staging_.data() + staging_end_, staging_.size() - staging_end_};
    const std::size_t asked = (in_payload() ? remaining_ : 0) + staging_.size() - staging_end_;
    const ssize_t received = read(pieces, count, asked);
    if (received == 0) return end_of_input();
    if (received < 0) {
      if (errno == EINTR) continue;
      // A connection that joined just as the peer closed its comm is reset; it never carried anything.
      if (errno == ECONNRESET && has_joined_ && !was_used_) return end_of_input();
      if (errno != EAGAIN && errno != EWOULDBLOCK) {
        return fail(Status::remote_error(Status::system_error("receive", errno).message()));
      }
      set_blocked(true);
      return StreamProgress::kBlocked;
    }
    const auto bytes = static_cast<std::size_t>(received);
    moved += bytes;
    stats_->bytes.add(bytes);
    // Fewer bytes than asked for: the socket is empty, and the poller tells of the next ones. It has told of the end.
    drained = bytes < asked && !has_peer_ended();
    if (in_payload()) {
      const std::size_t payload = std::min(bytes, remaining_);
      destination_ += payload;
      remaining_ -= payload;
      staging_end_ += bytes - payload;
      const Status finished = remaining_ == 0 ? finish_chunk() : Status::ok();
      if (!finished.is_ok()) return fail(finished);
    } else {
      staging_end_ += bytes;
    }
  }
}

}  // namespace bagua_net

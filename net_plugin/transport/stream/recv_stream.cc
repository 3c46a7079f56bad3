#include "transport/stream/recv_stream.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "wire/crc32c.h"

namespace bagua_net {

// EPOLLOUT: for an acknowledgement that found no room. Otherwise it causes no events.
std::uint32_t RecvStream::poll_flags() const { return EPOLLIN | EPOLLRDHUP | EPOLLOUT; }

Status RecvStream::open_chunk(Arrival* arrival) {
  if (checksums_) {
    BAGUA_NET_RETURN_IF_ERROR(check_frame_checksums(staging_.data() + staging_begin_, &expected_checksum_));
    checksum_ = 0;
  }
  BAGUA_NET_RETURN_IF_ERROR(decode_frame_header(staging_.data() + staging_begin_, &header_));
  if (header_.end) return Status::ok();
  Request* request = nullptr;
  BAGUA_NET_RETURN_IF_ERROR(table_->find(header_, index(), &request, arrival));
  if (*arrival == Arrival::kNotPosted || *arrival == Arrival::kBusy) return Status::ok();
  if (header_.attempt == 0 && !has_new_chunks()) has_new_chunks_.store(true, std::memory_order_release);
  begun_messages_ = std::max(begun_messages_, header_.message_number + 1);
  stats_.begin_chunk();
  staging_begin_ += header_bytes_;
  remaining_ = header_.payload_bytes;
  part_ = *arrival == Arrival::kWanted ? Part::kPayload : Part::kReplayed;
  if (request != nullptr) destination_ = request->data_ + header_.offset;
  return Status::ok();
}

// Called directly after find(), which leaves the claim in kWriting.
void RecvStream::take_staged_payload() {
  const std::size_t bytes = std::min(staged(), remaining_);
  if (part_ == Part::kPayload) {
    if (bytes > 0) std::memcpy(destination_, staging_.data() + staging_begin_, bytes);
    if (checksums_) checksum_ = crc32c(checksum_, destination_, bytes);
    destination_ += bytes;
    table_->claim(index()).end_writing();
  }
  staging_begin_ += bytes;
  remaining_ -= bytes;
}

bool RecvStream::finish_chunk() {
  // Until now, such a chunk was the sender's memory. A sender that aborts resets the connection before its memory
  // changes.
  if (header_.by_reference && is_broken()) {
    lose(Status::remote_error("the peer aborted while message " + std::to_string(header_.message_number) +
                              " was under way; see that rank's log"));
    return false;
  }
  if (!is_intact()) {
    lose(Status::damaged_data("a chunk of " + std::to_string(header_.payload_bytes) + " bytes of message " +
                              std::to_string(header_.message_number) + " arrived damaged"));
    return false;
  }
  stats_.end_chunk({header_.message_number, header_.offset, header_.payload_bytes, header_.attempt});
  ++received_chunks_;
  if (header_.acknowledge) asked_chunks_ = received_chunks_;
  // Before the request is done: this process may end afterwards, while the sender still waits for the acknowledgement.
  // With recovery, the comm sends a last one when it is closed.
  if (!recovers_) send_acknowledgement();
  if (part_ == Part::kPayload) table_->finish(header_, index());
  part_ = Part::kHeader;
  return true;
}

void RecvStream::send_acknowledgement() {
  while (acknowledgement_left_ > 0 || acknowledged_chunks_ < asked_chunks_ ||
         lost_ports_.load(std::memory_order_relaxed) != 0) {
    if (acknowledgement_left_ == 0) {
      std::uint64_t ports = lost_ports_.load(std::memory_order_relaxed);
      while (!lost_ports_.compare_exchange_weak(ports, ports >> 16, std::memory_order_relaxed)) continue;
      encode_acknowledgement({received_chunks_, false, static_cast<std::uint16_t>(ports)}, acknowledgement_.data(),
                             checksums_);
      acknowledgement_left_ = acknowledgement_.size();
      acknowledged_chunks_ = received_chunks_;
    }
    const iovec piece{acknowledgement_.data() + acknowledgement_.size() - acknowledgement_left_, acknowledgement_left_};
    const ssize_t written = write(&piece, 1, acknowledgement_left_);
    if (written < 0) {
      if (errno == EINTR) continue;
      return;  // no room, and the poller reports when there is; or an error, which the next read returns
    }
    acknowledgement_left_ -= static_cast<std::size_t>(written);
  }
}

void RecvStream::say_end(std::uint64_t /*messages*/) {
  if (!recovers_ || is_over()) return;
  asked_chunks_ = acknowledged_chunks_;
  send_acknowledgement();  // the rest of one that was written in part
  if (acknowledgement_left_ > 0) return;
  encode_acknowledgement({received_chunks_, true, 0}, acknowledgement_.data(), checksums_);
  const iovec piece{acknowledgement_.data(), acknowledgement_.size()};
  // If there is no room for the whole frame, the peer requests another connection, and is refused.
  [[maybe_unused]] const ssize_t ignored = write(&piece, 1, acknowledgement_.size());
}

StreamProgress RecvStream::lose(Status why) {
  if (is_over()) return StreamProgress::kEnded;
  if (why.code() == StatusCode::kDamagedData) stats_->checksum_errors.add(1);
  if (!recovers_) {
    end();
    return fail(why);
  }
  table_->release(index());
  return DataStream::lose(std::move(why));
}

StreamProgress RecvStream::end_of_input() {
  if (recovers_) return lose(Status::remote_error("the peer closed the connection"));
  if (part_ != Part::kHeader || staged() > 0) {
    return lose(Status::remote_error("the peer closed the connection in the middle of message " +
                                     std::to_string(header_.message_number) +
                                     ": its process ended or aborted; see that rank's log"));
  }
  return end();
}

StreamProgress RecvStream::end_of_comm() {
  end();
  if (is_given_back() || header_.message_number >= begun_messages_) return StreamProgress::kEnded;
  return fail(Status::remote_error("the peer says that it has sent " + std::to_string(header_.message_number) +
                                   " messages, and has sent message " + std::to_string(begun_messages_ - 1) +
                                   ": it broke the protocol"));
}

StreamProgress RecvStream::progress(std::size_t budget) {
  if (is_over()) return StreamProgress::kEnded;  // a driver may look again
  set_blocked(false);
  send_acknowledgement();
  const StreamProgress progress = move(budget);
  if (progress != StreamProgress::kEnded) send_acknowledgement();
  return progress;
}

ssize_t RecvStream::read_more(std::size_t* asked) {
  iovec pieces[2];
  std::size_t count = 0;
  *asked = 0;
  ChunkClaim& claim = table_->claim(index());
  if (part_ == Part::kPayload && !claim.begin_writing()) part_ = Part::kReplayed;  // on another stream
  if (part_ == Part::kPayload) pieces[count++] = {destination_, remaining_};
  if (part_ == Part::kReplayed) {
    if (sink_ == nullptr) sink_.reset(new std::uint8_t[kSinkBytes]);
    pieces[count++] = {sink_.get(), std::min(remaining_, kSinkBytes)};
  }
  // The bytes behind the payload. Not if the sink has no room for the whole payload.
  if (part_ != Part::kReplayed || remaining_ <= kSinkBytes) {
    pieces[count++] = {staging_.data() + staging_end_, staging_.size() - staging_end_};
  }
  for (std::size_t i = 0; i < count; ++i) *asked += pieces[i].iov_len;
  const ssize_t received = read(pieces, count, *asked);
  const int error_number = errno;
  if (part_ == Part::kPayload) {
    // At once: after end_writing() another stream may write there.
    if (checksums_ && received > 0) {
      checksum_ = crc32c(checksum_, destination_, std::min(static_cast<std::size_t>(received), remaining_));
    }
    claim.end_writing();
  }
  errno = error_number;
  return received;
}

StreamProgress RecvStream::move(std::size_t budget) {
  std::size_t moved = 0;
  bool drained = false;
  for (;;) {
    while (part_ == Part::kHeader && staged() >= header_bytes_) {
      Arrival arrival = Arrival::kWanted;
      const Status status = open_chunk(&arrival);
      if (status.code() == StatusCode::kDamagedData) return lose(status);
      if (!status.is_ok()) {
        end();
        return fail(status);
      }
      if (header_.end) return end_of_comm();
      if (arrival == Arrival::kBusy) return StreamProgress::kMore;
      if (arrival == Arrival::kNotPosted) {
        set_parked(true);
        return StreamProgress::kIdle;
      }
      if (state() == StreamState::kParked) set_parked(false);
      take_staged_payload();
      if (remaining_ == 0 && !finish_chunk()) return StreamProgress::kEnded;
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

    std::size_t asked = 0;
    const ssize_t received = read_more(&asked);
    if (received == 0) return end_of_input();
    if (received < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN && errno != EWOULDBLOCK) {
        // If a connection joins while the peer closes its comm, it is reset before it has carried anything.
        if (!recovers_ && errno == ECONNRESET && has_joined_ && !has_new_chunks()) return end_of_input();
        if (errno == EBADMSG) return lose(not_the_peers_bytes());
        const Status failure = Status::system_error("receive", errno);
        return lose(recovers_ ? failure : Status::remote_error(failure.message()));
      }
      set_blocked(true);
      return StreamProgress::kBlocked;
    }
    const auto bytes = static_cast<std::size_t>(received);
    moved += bytes;
    stats_->bytes.add(bytes);
    drained = bytes < asked && !has_peer_ended();
    if (part_ == Part::kHeader) {
      staging_end_ += bytes;
      continue;
    }
    const std::size_t payload = std::min(bytes, remaining_);
    if (part_ == Part::kPayload) destination_ += payload;
    remaining_ -= payload;
    staging_end_ += bytes - payload;
    if (remaining_ == 0 && !finish_chunk()) return StreamProgress::kEnded;
  }
}

}  // namespace bagua_net

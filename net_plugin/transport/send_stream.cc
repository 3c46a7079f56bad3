#include "transport/send_stream.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/monotonic_clock.h"

namespace bagua_net {
namespace {

// Often enough to notice a stream that slows down, rarely enough to cost nothing.
constexpr std::int64_t kLookNs = 2'000'000;
// Where a chunk depends on it.
constexpr std::int64_t kLookAgainNs = 100'000;

// By reference, a chunk costs less altogether, and longer until it has arrived: the receiver alone reads the memory,
// where otherwise two CPUs copy at the same time. That pays in long streams of large messages
// (docs/design/performance.md), and there for chunks that are worth two more system calls here and one for the
// acknowledgement.
constexpr std::size_t kLargestCopiedMessage = 524288;
constexpr std::size_t kMinZeroCopyBytes = 65536;

}  // namespace

std::uint32_t SendStream::poll_flags() const {
  return reads_acknowledgements_ ? std::uint32_t{EPOLLOUT | EPOLLIN} : std::uint32_t{EPOLLOUT};
}

Pull SendStream::pull() {
  int better = 0;
  if (kick_ == nullptr) return scheduler_->pull(index(), {}, &chunk_, &better);
  look_at_delivery(monotonic_ns() - kLookNs);
  Pull pulled = scheduler_->pull(index(), backlog_, &chunk_, &better);
  if (pulled != Pull::kPassedOver) return pulled;
  // It may have delivered more than it knows.
  if (look_at_delivery(monotonic_ns() - kLookAgainNs)) pulled = scheduler_->pull(index(), backlog_, &chunk_, &better);
  if (pulled == Pull::kPassedOver) {
    stats_->deferred.add(1);
    kick_(better);
  }
  return pulled;
}

bool SendStream::take_chunk() {
  const Pull pulled = in_use_.load(std::memory_order_relaxed) ? pull() : Pull::kNothing;
  passed_over_.store(pulled == Pull::kPassedOver, std::memory_order_relaxed);
  if (pulled != Pull::kChunk) {
    chunk_.request = nullptr;
    return false;
  }
  if (chunk_.request->handed_over_ns_ != 0 && chunk_.offset == 0) {
    stats_->worker_waits.add(1);
    stats_->worker_wait_ns.add(static_cast<std::uint64_t>(monotonic_ns() - chunk_.request->handed_over_ns_));
  }
  backlog_.under_way += chunk_.bytes;
  backlog_.unsent += chunk_.bytes;
  FrameHeader header;
  header.payload_bytes = static_cast<std::uint32_t>(chunk_.bytes);
  header.message_number = chunk_.request->number_;
  header.offset = chunk_.offset;
  header.message_bytes = chunk_.request->capacity_;
  header.acknowledge = may_zero_copy_ && header.message_bytes > kLargestCopiedMessage &&
                       chunk_.bytes >= kMinZeroCopyBytes && !unacknowledged_.is_full();
  waits_for_acknowledgement_ = chunk_zero_copy_ = header.acknowledge;
  encode_frame_header(header, front_.data());
  front_bytes_ = kFrameHeaderBytes;
  if (chunk_.bytes > 0 && chunk_.bytes <= kSmallBytes) {
    std::memcpy(front_.data() + kFrameHeaderBytes, chunk_.request->data_ + chunk_.offset, chunk_.bytes);
    front_bytes_ += chunk_.bytes;
  }
  written_ = 0;
  return true;
}

bool SendStream::look_at_delivery(std::int64_t not_since_ns) {
  if (looked_ns_ > not_since_ns) return false;
  const std::int64_t now_ns = monotonic_ns();
  Delivery delivery;
  if (!this->delivery(&delivery)) return false;
  // Nothing was written yet: the handshake's bytes are not ours.
  if (looked_ns_ == 0) delivered_before_ = delivery.bytes;
  looked_ns_ = now_ns;
  backlog_.under_way = static_cast<std::size_t>(written_ever_ - (delivery.bytes - delivered_before_));
  backlog_.unsent = delivery.unsent_bytes;
  rate_estimator_.look(delivery, now_ns);
  scheduler_->set_pace(index(), rate_estimator_.pace());
  stats_.slot().estimated_bytes_per_s.set(static_cast<std::uint64_t>(1e9 * rate_estimator_.pace().bytes_per_ns));
  show(delivery, now_ns);
  return true;
}

void SendStream::show(const Delivery& delivery, std::int64_t now_ns) const {
  stats_->retransmits.set(delivery.retransmits);
  stats_->busy_us.set(static_cast<std::uint64_t>(delivery.busy_us));
  stats_->peer_window_us.set(static_cast<std::uint64_t>(delivery.peer_window_us));
  stats_->socket_buffer_us.set(static_cast<std::uint64_t>(delivery.socket_buffer_us));
  StreamSlot& slot = stats_.slot();
  slot.round_trip_us.set(static_cast<std::uint64_t>(delivery.round_trip_us));
  slot.least_round_trip_us.set(static_cast<std::uint64_t>(delivery.least_round_trip_us));
  slot.sampled_ms.set(static_cast<std::uint64_t>(now_ns / 1'000'000));
}

void SendStream::sample_delivery() const {
  Delivery delivery;
  if (this->delivery(&delivery)) show(delivery, monotonic_ns());
}

StreamProgress SendStream::progress(std::size_t budget) {
  std::size_t moved = 0;
  set_blocked(false);
  if (failed_) return StreamProgress::kEnded;  // the driver may come again
  const Status status = read_acknowledgements();
  if (!status.is_ok()) {
    failed_ = true;
    return fail(status);
  }
  for (;;) {
    if (moved >= budget) return StreamProgress::kMore;
    if (chunk_.request == nullptr && !take_chunk()) return StreamProgress::kIdle;
    const ssize_t written = write_chunk();
    if (written < 0) {
      if (errno == EINTR) continue;
      if (errno == EOPNOTSUPP && chunk_zero_copy_) {
        may_zero_copy_ = chunk_zero_copy_ = false;
        continue;
      }
      if (errno != EAGAIN && errno != EWOULDBLOCK) {
        return fail(Status::remote_error(Status::system_error("send", errno).message()));
      }
      stats_->full.add(1);
      set_blocked(true);
      return StreamProgress::kBlocked;
    }
    moved += static_cast<std::size_t>(written);
    written_ += static_cast<std::size_t>(written);
    written_ever_ += static_cast<std::uint64_t>(written);
    stats_->bytes.add(static_cast<std::uint64_t>(written));
    if (written_ == kFrameHeaderBytes + chunk_.bytes) {
      end_chunk();
    } else if (!chunk_zero_copy_) {
      // A short write means a full socket buffer, and the kernel then tells the poller when there is room.
      stats_->full.add(1);
      set_blocked(true);
      return StreamProgress::kBlocked;
    }
  }
}

// The peer would go on reading memory that is no longer ours, and take for a message whatever it finds there.
void SendStream::abandon() {
  if (!unacknowledged_.is_empty() || (chunk_.request != nullptr && waits_for_acknowledgement_)) reset();
}

ssize_t SendStream::write_chunk() {
  const std::size_t end = kFrameHeaderBytes + chunk_.bytes;
  iovec pieces[2];
  std::size_t count = 0;
  if (written_ < front_bytes_) pieces[count++] = {front_.data() + written_, front_bytes_ - written_};
  const std::size_t position = std::max(written_, front_bytes_);
  if (position < end) {
    pieces[count++] = {chunk_.request->data_ + chunk_.offset + (position - kFrameHeaderBytes), end - position};
  }
  if (!chunk_zero_copy_) return write(pieces, count, end - written_);
  return count == 2 ? write_by_reference(pieces[0], pieces[1]) : write_by_reference({}, pieces[0]);
}

void SendStream::end_chunk() {
  stats_->chunks.add(1);
  if (chunk_zero_copy_) stats_->zero_copy_bytes.add(chunk_.bytes);
  if (waits_for_acknowledgement_) {
    unacknowledged_.add(chunk_);
  } else {
    chunk_.request->chunk_moved(chunk_.bytes, chunk_.request->capacity_);
  }
  chunk_.request = nullptr;
}

Status SendStream::read_acknowledgements() {
  std::array<std::uint8_t, 16 * kAcknowledgementBytes> bytes;
  while (!unacknowledged_.is_empty()) {
    iovec piece{bytes.data(), bytes.size()};
    const ssize_t received = read(&piece, 1, bytes.size());
    if (received < 0 && errno == EINTR) continue;
    if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Status::ok();
    if (received <= 0) {
      const std::string how = received == 0 ? "the peer closed the connection"
                                            : Status::system_error("the connection was lost", errno).message();
      return Status::remote_error(how + " before the peer had received message " +
                                  std::to_string(unacknowledged_.first_message()) +
                                  ": its process ended or aborted; see that rank's log");
    }
    // Fewer bytes than there was room for do not mean that no more will be said: the end may stand right behind them,
    // and the poller tells of both once.
    BAGUA_NET_RETURN_IF_ERROR(unacknowledged_.take(bytes.data(), static_cast<std::size_t>(received)));
  }
  return Status::ok();
}

}  // namespace bagua_net

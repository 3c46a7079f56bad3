#include "transport/stream/send_stream.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/monotonic_clock.h"
#include "wire/crc32c.h"

namespace bagua_net {
namespace {

// How often a stream reads TCP_INFO: this detects a stream that slows down, and costs little.
constexpr std::int64_t kLookNs = 2'000'000;
// The same, if the stream would otherwise leave a chunk to another stream, and with several paths, when something was
// acknowledged.
constexpr std::int64_t kLookAgainNs = 100'000;

// A zero-copy chunk costs less CPU time, but arrives later: only the receiver's CPU copies it, instead of two CPUs at
// the same time. This is faster for a series of large messages (docs/design/performance.md), if chunks are large enough
// for two more system calls by the sender, and one for the acknowledgement. Between hosts it is the network card that
// copies, if at all (BAGUA_NET_MSG_ZEROCOPY).
constexpr std::size_t kLargestCopiedMessage = 524288;
constexpr std::size_t kMinZeroCopyBytes = 65536;

// Payloads up to this size are copied behind their header, because a system call with one buffer costs less than with
// two.
constexpr std::size_t kSmallBytes = 1024;

// Recovery. Copying a chunk of this size costs little compared with the system call that writes it, and one
// acknowledgement covers many chunks.
constexpr std::size_t kSmallCopyBytes = 65536;
constexpr std::size_t kMaxSmallCopies = 4u << 20;
// With several paths, what one delivers is measured by messages of this size: all of their chunks ask. Chunks of 16 KiB
// are not copied: their requests wait for their acknowledgements, and drivers without a poller read these at once.
// Short messages would wait for the CPU that this costs.
constexpr std::size_t kMeasuredMessage = 262144;
constexpr std::size_t kMeasuredBytes = 16384;
// On a long path, large chunks are copied. NCCL has only some MiB in flight per channel, which is less than such a path
// carries in a round trip. The copies are what is in flight, up to kMaxLargeCopies per stream. They are made once the
// chunk is written: copying takes as long as writing, and the packets are on their way meanwhile.
constexpr std::size_t kMaxLargeCopies = 32u << 20;

}  // namespace

// EPOLLRDHUP: the end of the peer is noticed while the stream waits for room.
std::uint32_t SendStream::poll_flags() const { return EPOLLOUT | EPOLLIN | EPOLLRDHUP; }

Pull SendStream::pull(Chunk* chunk) {
  int better = 0;
  if (kick_ == nullptr) return scheduler_->pull(index(), {}, chunk, &better);
  const std::int64_t now_ns = monotonic_ns();
  look_at_delivery(now_ns - kLookNs);
  Pull pulled = scheduler_->pull(index(), backlog_, chunk, &better, now_ns);
  if (pulled != Pull::kPassedOver) return pulled;
  // It may have delivered more than its last look showed.
  if (look_at_delivery(now_ns - kLookAgainNs)) {
    pulled = scheduler_->pull(index(), backlog_, chunk, &better, monotonic_ns());
  }
  if (pulled == Pull::kPassedOver) {
    stats_->deferred_chunks.add(1);
    kick_(better);
  }
  return pulled;
}

bool SendStream::pull_chunk() {
  // Before anything is written: these are the bytes of the handshake.
  if (kick_ != nullptr && looked_ns_ == 0) look_at_delivery(0);
  Chunk chunk;
  if (replays() && replay_->any() && replay_->pull(last_number_.load(std::memory_order_relaxed), &chunk)) {
    stats_->resent_chunks.add(1);
    resends_.store(true, std::memory_order_relaxed);
    chunk_ = std::move(chunk);
    has_chunk_ = true;
    return true;
  }
  const Pull pulled = in_use_.load(std::memory_order_relaxed) ? pull(&chunk) : Pull::kNothing;
  passed_over_.store(pulled == Pull::kPassedOver, std::memory_order_relaxed);
  if (pulled != Pull::kChunk) return false;
  if (chunk.request->handed_over_ns_ != 0 && chunk.offset == 0) {
    stats_->worker_waits.add(1);
    stats_->worker_wait_ns.add(static_cast<std::uint64_t>(monotonic_ns() - chunk.request->handed_over_ns_));
  }
  chunk.data = chunk.request->data_ + chunk.offset;
  chunk_ = std::move(chunk);
  has_chunk_ = true;
  replays_.store(false, std::memory_order_relaxed);
  if (kick_ != nullptr && rate_estimator_.pace().is_old) {
    rate_estimator_.begin_trial(backlog_.under_way + chunk_.bytes, monotonic_ns());
    scheduler_->set_pace(index(), rate_estimator_.pace());
  }
  return true;
}

bool SendStream::take_chunk() {
  if (recovers() && unacknowledged_.is_full()) return false;
  if (!pull_chunk()) return false;
  begin_chunk();
  return true;
}

void SendStream::begin_chunk() {
  stats_.begin_chunk();
  backlog_.under_way += chunk_.bytes;
  backlog_.unsent += chunk_.bytes;
  last_number_.store(chunk_.message_number, std::memory_order_relaxed);
  written_ = 0;
  FrameHeader header;
  header.attempt = chunk_.attempt;
  header.payload_bytes = static_cast<std::uint32_t>(chunk_.bytes);
  header.message_number = chunk_.message_number;
  header.offset = chunk_.offset;
  header.message_bytes = chunk_.message_bytes;
  const bool had_copy = chunk_.copy.bytes != nullptr;
  copies_when_written_ = false;
  if (!had_copy) {
    chunk_.by_reference = may_zero_copy_ && header.message_bytes > kLargestCopiedMessage &&
                          chunk_.bytes >= kMinZeroCopyBytes && !unacknowledged_.is_full() && header.attempt == 0 &&
                          rate_estimator_.pace().round_trip_ns < kLongPathNs;
    if (should_copy()) {
      copy(&chunk_);
    } else {
      copies_when_written_ = should_copy_when_written();
    }
  }
  writes_by_reference_ = header.by_reference = chunk_.by_reference;
  keeps_chunk_ = recovers() || header.by_reference;
  if (recovers()) {
    ++unasked_chunks_;
    unasked_bytes_ += chunk_.bytes;
    const bool waits = chunk_.copy.bytes == nullptr && !copies_when_written_;
    header.acknowledge = header.attempt > 0 || waits || unasked_chunks_ >= kAskAfterChunks ||
                         unasked_bytes_ >= kAskAfterBytes || is_measured();
    if (header.acknowledge) unasked_chunks_ = unasked_bytes_ = 0;
  } else {
    header.acknowledge = header.by_reference;
  }
  std::uint8_t* const encoded = chunk_.copy.bytes != nullptr ? chunk_.copy.bytes.get() : header_.data();
  encode_frame_header(header, encoded);
  // Computed now, even if the kernel reads the bytes later: memory that changes in the meantime counts as damage.
  if (checksums_) append_frame_checksums(crc32c(0, chunk_.data, chunk_.bytes), encoded);
}

bool SendStream::is_measured() const { return shares_paths_ && chunk_.message_bytes >= kMeasuredMessage; }

bool SendStream::should_copy() const {
  if (chunk_.bytes <= kSmallBytes) return true;
  if (!recovers() || chunk_.by_reference) return false;
  return chunk_.bytes <= (is_measured() ? kMeasuredBytes - 1 : kSmallCopyBytes) &&
         unacknowledged_.copied_bytes() + chunk_.bytes <= kMaxSmallCopies;
}

bool SendStream::should_copy_when_written() const {
  return recovers() && !chunk_.by_reference && rate_estimator_.pace().round_trip_ns >= kLongPathNs &&
         unacknowledged_.copied_bytes() + chunk_.bytes <= kMaxLargeCopies;
}

void SendStream::copy(Chunk* chunk) {
  chunk->copy = blocks_.take(header_bytes_ + chunk->bytes);
  std::uint8_t* const payload = chunk->copy.bytes.get() + header_bytes_;
  if (chunk->bytes > 0) std::memcpy(payload, chunk->data, chunk->bytes);
  chunk->data = payload;
}

bool SendStream::look_at_delivery(std::int64_t not_since_ns, bool is_acknowledged, bool at_once) {
  if (looked_ns_ > not_since_ns) return false;
  const std::int64_t now_ns = monotonic_ns();
  Delivery delivery;
  if (!this->delivery(&delivery)) return false;
  if (looked_ns_ == 0) delivered_before_ = delivery.bytes;
  looked_ns_ = now_ns;
  backlog_.under_way =
      static_cast<std::size_t>(written_ever_ + overhead_bytes() - (delivery.bytes - delivered_before_));
  backlog_.unsent = delivery.unsent_bytes;
  // An acknowledgement is where the least is queued, which would make all rates lower bounds.
  if (!is_acknowledged || (backlog_.under_way > 0 && now_ns - estimated_ns_ >= kLookNs)) {
    estimated_ns_ = now_ns;
    rate_estimator_.look(delivery, now_ns);
  }
  scheduler_->look(index(), rate_estimator_.pace(), delivery, backlog_, at_once, now_ns);
  stats_.slot().estimated_bytes_per_s.set(static_cast<std::uint64_t>(1e9 * rate_estimator_.pace().bytes_per_ns));
  show(delivery, now_ns);
  return true;
}

void SendStream::show(const Delivery& delivery, std::int64_t now_ns) const {
  stats_.set_kernel({delivery.retransmits, static_cast<std::uint64_t>(delivery.busy_us),
                     static_cast<std::uint64_t>(delivery.peer_window_us),
                     static_cast<std::uint64_t>(delivery.socket_buffer_us)});
  StreamSlot& slot = stats_.slot();
  slot.round_trip_us.set(static_cast<std::uint64_t>(delivery.round_trip_us));
  slot.least_round_trip_us.set(static_cast<std::uint64_t>(delivery.least_round_trip_us));
  slot.sampled_ms.set(static_cast<std::uint64_t>(now_ns / 1'000'000));
}

void SendStream::sample_delivery() const {
  Delivery delivery;
  if (this->delivery(&delivery)) show(delivery, monotonic_ns());
}

bool SendStream::should_listen() const {
  if (shares_paths_ && is_polled()) return true;
  return unacknowledged_.has_requests() || unacknowledged_.size() >= listen_at_ || keeps_much() || has_peer_ended();
}

StreamProgress SendStream::progress(std::size_t budget) {
  std::size_t moved = 0;
  set_blocked(false);
  if (is_over()) return end_of_output(0);
  // One event may mean an acknowledgement as well as room. Without a poller, the stream listens when it has nothing to
  // write, or keeps much that may be acknowledged: copies in memory that was never used before take longer than the
  // messages.
  if (is_polled() && should_listen()) listen();
  for (;;) {
    if (is_over()) return end_of_output(0);
    if (moved >= budget) return StreamProgress::kMore;
    if (!has_chunk_ && !take_chunk()) {
      if (!is_polled() && (moved == 0 ? should_listen() : keeps_much())) {
        listen();
        if (is_over()) return end_of_output(0);
      }
      if (leaving_.load(std::memory_order_relaxed)) {
        if (!end_in_order()) continue;
        return is_over() ? end_of_output(0) : StreamProgress::kBlocked;
      }
      if (!recovers() || !unacknowledged_.is_full()) return StreamProgress::kIdle;
      // The poller reports the acknowledgement that makes room.
      set_blocked(true);
      listen();
      if (is_over()) return end_of_output(0);
      if (!unacknowledged_.is_full()) continue;
      return StreamProgress::kBlocked;
    }
    const ssize_t written = write_chunk();
    if (written < 0) {
      if (errno == EINTR) continue;
      if (errno == EOPNOTSUPP && writes_by_reference_) {
        may_zero_copy_ = writes_by_reference_ = false;
        continue;
      }
      if (errno != EAGAIN && errno != EWOULDBLOCK) return end_of_output(errno);
      stats_->socket_full.add(1);
      set_blocked(true);
      // A calling thread has no poller that reports the end of the peer.
      listen();
      return is_over() ? end_of_output(0) : StreamProgress::kBlocked;
    }
    moved += static_cast<std::size_t>(written);
    written_ += static_cast<std::size_t>(written);
    written_ever_ += static_cast<std::uint64_t>(written);
    stats_->bytes.add(static_cast<std::uint64_t>(written));
    if (written_ == header_bytes_ + chunk_.bytes) {
      end_chunk();
    } else if (!writes_by_reference_) {
      // A short write means a full socket buffer, and the kernel then tells the poller when there is room.
      stats_->socket_full.add(1);
      set_blocked(true);
      return StreamProgress::kBlocked;
    }
  }
}

ssize_t SendStream::write_chunk() {
  const std::size_t end = header_bytes_ + chunk_.bytes;
  if (chunk_.copy.bytes != nullptr) {
    const iovec piece{chunk_.copy.bytes.get() + written_, end - written_};
    return write(&piece, 1, end - written_);
  }
  iovec pieces[2];
  std::size_t count = 0;
  if (written_ < header_bytes_) pieces[count++] = {header_.data() + written_, header_bytes_ - written_};
  const std::size_t position = std::max(written_, header_bytes_);
  pieces[count++] = {const_cast<std::uint8_t*>(chunk_.data) + (position - header_bytes_), end - position};
  if (!writes_by_reference_) return write(pieces, count, end - written_);
  return count == 2 ? write_by_reference(pieces[0], pieces[1]) : write_by_reference({}, pieces[0]);
}

void SendStream::end_chunk() {
  // It allocates. Before anything else, so that the chunk is not lost if it cannot.
  if (std::exchange(copies_when_written_, false)) copy(&chunk_);
  stats_.end_chunk({chunk_.message_number, chunk_.offset, chunk_.bytes, chunk_.attempt});
  if (writes_by_reference_) stats_->zero_copy_bytes.add(chunk_.bytes);
  has_chunk_ = false;
  resends_.store(false, std::memory_order_relaxed);
  Chunk chunk = std::move(chunk_);
  const bool is_copied = chunk.copy.bytes != nullptr;
  if (chunk.request != nullptr && (is_copied || !keeps_chunk_)) {
    std::exchange(chunk.request, nullptr)->chunk_moved(chunk.bytes, chunk.message_bytes);
  }
  if (keeps_chunk_) {
    unacknowledged_.add(std::move(chunk));
  } else {
    unacknowledged_.add_done();
    blocks_.give_back(std::move(chunk.copy));
  }
}

void SendStream::listen(bool to_the_end) {
  std::array<std::uint8_t, 16 * kAcknowledgementBytes> bytes;
  while (!is_over()) {
    iovec piece{bytes.data(), bytes.size()};
    const ssize_t received = read(&piece, 1, bytes.size());
    if (received < 0 && errno == EINTR) continue;
    if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    const bool is_changed = received < 0 && errno == EBADMSG;
    const bool at_once = is_polled() || unacknowledged_.has_requests();  // otherwise nobody has waited for it
    if (received <= 0 && !is_changed) {
      peer_is_gone(received == 0 ? 0 : errno);
      return;
    }
    const Status status = is_changed ? not_the_peers_bytes()
                                     : unacknowledged_.take(bytes.data(), static_cast<std::size_t>(received), &blocks_);
    if (status.code() == StatusCode::kDamagedData) stats_->checksum_errors.add(1);
    if (status.code() == StatusCode::kDamagedData && recovers()) {
      lose(status);
      return;
    }
    if (!status.is_ok()) {
      end();
      fail(status);
      return;
    }
    was_acknowledged_.store(true, std::memory_order_relaxed);
    if (shares_paths_ && kick_ != nullptr) {
      const bool is_last = unacknowledged_.is_empty() && !has_chunk_;
      look_at_delivery(is_last ? monotonic_ns() : monotonic_ns() - kLookAgainNs, true, at_once);
    }
    while (const std::uint16_t port = unacknowledged_.take_lost_port()) tell_peer_address_lost(port);
    if (unacknowledged_.peer_has_closed()) {
      peer_is_gone(0);
      return;
    }
    if (static_cast<std::size_t>(received) < bytes.size() && !has_peer_ended() && !to_the_end) break;
  }
  listen_at_ = unacknowledged_.size() + kAskAfterChunks;
  listen_at_bytes_ = unacknowledged_.copied_bytes() + kAskAfterBytes;
}

StreamProgress SendStream::end_of_output(int error_number) {
  if (error_number != 0) {
    if (!recovers()) {
      end();
      return fail(Status::remote_error(Status::system_error("send", error_number).message()));
    }
    // The peer may have said why before it closed the connection.
    if (!is_over()) listen();
    if (!is_over()) peer_is_gone(error_number);
  }
  if (state() == StreamState::kLost || is_given_back_) return StreamProgress::kEnded;
  // The peer has ended the stream in order, although there is more to send.
  if (has_chunk_ || take_chunk()) {
    return fail(Status::remote_error("the peer closed the connection before it had received message " +
                                     std::to_string(chunk_.message_number) +
                                     ": its process ended or aborted; see that rank's log"));
  }
  return StreamProgress::kEnded;
}

void SendStream::peer_is_gone(int error_number) {
  const std::string how = error_number == 0 ? "the peer closed the connection"
                                            : Status::system_error("the connection was lost", error_number).message();
  if (recovers() && !unacknowledged_.peer_has_closed()) {
    lose(Status::remote_error(how));
    return;
  }
  end();
  if (!unacknowledged_.has_requests() && !has_chunk_) return;
  const std::uint64_t message =
      unacknowledged_.has_requests() ? unacknowledged_.first_message() : chunk_.message_number;
  fail(Status::remote_error(how + " before the peer had received message " + std::to_string(message) +
                            ": its process ended or aborted; see that rank's log"));
}

std::vector<Chunk> SendStream::take_unfinished() {
  std::vector<Chunk> chunks = unacknowledged_.take_all();
  if (std::exchange(has_chunk_, false)) chunks.push_back(std::move(chunk_));
  // A copy that asks follows its chunk, and the peer may still have it: the chunk is sent again with a later attempt.
  for (std::size_t i = chunks.size(); i > 1; --i) {
    if (chunks[i - 1].asks_only) chunks[i - 2].attempt = chunks[i - 1].attempt;
  }
  chunks.erase(std::remove_if(chunks.begin(), chunks.end(), [](const Chunk& chunk) { return chunk.asks_only; }),
               chunks.end());
  for (Chunk& chunk : chunks) {
    ++chunk.attempt;
    chunk.by_reference = false;
  }
  return chunks;
}

// Otherwise the peer would read memory that belongs to the application again, and take its contents for the message.
bool SendStream::release_memory() {
  const bool refers = unacknowledged_.has_references() || (has_chunk_ && chunk_.by_reference);
  if (refers) reset();
  return refers;
}

void SendStream::send_end(std::uint64_t messages, bool of_stream) {
  if (!recovers() || is_over() || has_chunk_) return;
  FrameHeader end;
  end.end = true;
  end.acknowledge = of_stream;
  end.message_number = messages;
  encode_frame_header(end, header_.data());
  if (checksums_) append_frame_checksums(0, header_.data());
  const iovec piece{header_.data(), header_bytes_};
  // If there is no room for the whole frame, the peer waits for another connection, until it finds that the comm is
  // gone.
  [[maybe_unused]] const ssize_t ignored = write(&piece, 1, header_bytes_);
}

bool SendStream::end_in_order() {
  set_blocked(true);  // until the poller reports the acknowledgement
  listen();
  if (is_over()) return true;
  if (!unacknowledged_.is_empty()) {
    ask_for_acknowledgement();
    return !has_chunk_;
  }
  give_back();
  is_given_back_ = true;
  end();
  return true;
}

bool SendStream::is_delivered() {
  if (!is_over() && !unacknowledged_.is_empty()) listen();
  if (state() == StreamState::kEnded) return true;
  if (has_chunk_) return false;
  // As long as the stream is not lost, data in the peer's kernel counts as delivered.
  return unacknowledged_.is_empty() || (!is_over() && undelivered_bytes() == 0);
}

void SendStream::ask_for_acknowledgement() {
  if (!recovers() || is_over() || has_chunk_ || unasked_chunks_ == 0) return;
  if (unacknowledged_.is_empty() || unacknowledged_.is_full()) return;
  const Chunk& last = unacknowledged_.last();  // a copy, since others ask
  chunk_ = Chunk{};
  chunk_.asks_only = true;
  chunk_.message_number = last.message_number;
  chunk_.message_bytes = last.message_bytes;
  chunk_.offset = last.offset;
  chunk_.bytes = last.bytes;
  chunk_.attempt = last.attempt + 1;
  chunk_.copy = blocks_.take(header_bytes_ + last.bytes);
  std::uint8_t* const payload = chunk_.copy.bytes.get() + header_bytes_;
  if (last.bytes > 0) std::memcpy(payload, last.data, last.bytes);
  chunk_.data = payload;
  has_chunk_ = true;
  begin_chunk();
}

}  // namespace bagua_net

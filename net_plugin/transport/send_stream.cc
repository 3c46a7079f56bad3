#include "transport/send_stream.h"

#include <sys/epoll.h>

#include <cerrno>
#include <utility>

#include "base/monotonic_clock.h"

namespace bagua_net {
namespace {

// Often enough to notice a stream that slows down, rarely enough to cost nothing.
constexpr std::int64_t kLookNs = 2'000'000;
// The kernel counts busy time in ticks of up to 10 ms.
constexpr std::int64_t kLeastBusyUs = 50'000;

}  // namespace

std::uint32_t SendStream::poll_flags() const { return EPOLLOUT; }

Pull SendStream::pull() {
  int better = 0;
  if (kick_ == nullptr) return scheduler_->pull(index(), 0, &chunk_, &better);
  look_at_delivery(monotonic_ns() - kLookNs);
  Pull pulled = scheduler_->pull(index(), under_way_, &chunk_, &better);
  if (pulled != Pull::kPassedOver) return pulled;
  // It may have delivered more than it knows.
  look_at_delivery(monotonic_ns());
  pulled = scheduler_->pull(index(), under_way_, &chunk_, &better);
  if (pulled == Pull::kPassedOver) kick_(better);
  return pulled;
}

bool SendStream::take_chunk() {
  const Pull pulled = in_use_.load(std::memory_order_relaxed) ? pull() : Pull::kNothing;
  passed_over_.store(pulled == Pull::kPassedOver, std::memory_order_relaxed);
  if (pulled != Pull::kChunk) {
    chunk_.request = nullptr;
    return false;
  }
  under_way_ += chunk_.bytes;
  FrameHeader header;
  header.payload_bytes = static_cast<std::uint32_t>(chunk_.bytes);
  header.message_number = chunk_.request->number_;
  header.offset = chunk_.offset;
  header.message_bytes = chunk_.request->capacity_;
  encode_frame_header(header, header_.data());
  written_ = 0;
  return true;
}

void SendStream::look_at_delivery(std::int64_t not_since_ns) {
  if (looked_ns_ > not_since_ns) return;
  const std::int64_t now_ns = monotonic_ns();
  Delivery delivery;
  if (!this->delivery(&delivery)) return;
  if (looked_ns_ == 0) {
    // Nothing was written yet: the handshake's bytes are not ours.
    delivered_before_ = delivery.bytes;
    rated_ = delivery;
  }
  looked_ns_ = now_ns;
  under_way_ = static_cast<std::size_t>(written_ever_ - (delivery.bytes - delivered_before_));
  was_drained_ |= under_way_ == 0;
  if (delivery.busy_us - rated_.busy_us < kLeastBusyUs) return;
  const double rate = static_cast<double>(delivery.bytes - rated_.bytes) /
                      (1e3 * static_cast<double>(delivery.busy_us - rated_.busy_us));
  scheduler_->add_rate(index(), rate, std::exchange(was_drained_, false), now_ns);
  rated_ = delivery;
}

StreamProgress SendStream::progress(std::size_t budget) {
  std::size_t moved = 0;
  set_blocked(false);
  for (;;) {
    if (moved >= budget) return StreamProgress::kMore;
    if (chunk_.request == nullptr && !take_chunk()) return StreamProgress::kIdle;

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
    written_ever_ += static_cast<std::uint64_t>(written);
    // A short write means a full socket buffer, and the kernel then tells the poller when there is room.
    if (written_ < header_.size() + chunk_.bytes) {
      set_blocked(true);
      return StreamProgress::kBlocked;
    }
    chunk_.request->chunk_moved(chunk_.bytes, chunk_.request->capacity_);
    chunk_.request = nullptr;
  }
}

}  // namespace bagua_net

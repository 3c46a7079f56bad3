#include "bench/ring_plan.h"

#include <algorithm>

namespace bagua_net::bench {
namespace {

// NCCL opens another channel only if each gets at least 32 KiB of traffic, and an all-reduce moves every byte twice.
constexpr std::size_t kMinChannelBytes = 16384;

std::size_t divide_up(std::size_t value, std::size_t divisor) { return (value + divisor - 1) / divisor; }
std::size_t align_up(std::size_t value, std::size_t alignment) { return divide_up(value, alignment) * alignment; }

}  // namespace

RingPlan::RingPlan(const RingGeometry& geometry, std::size_t buffer_bytes)
    : geometry_(geometry), buffer_bytes_(buffer_bytes), element_bytes_(buffer_bytes % 4 == 0 ? 4 : 1) {
  const std::size_t wanted = std::max<std::size_t>(1, buffer_bytes / kMinChannelBytes);
  active_channels_ = static_cast<int>(std::min<std::size_t>(wanted, static_cast<std::size_t>(geometry.channels)));
  channel_bytes_ = align_up(divide_up(buffer_bytes, static_cast<std::size_t>(active_channels_)), element_bytes_);
  largest_chunk_bytes_ = geometry.slice_bytes * static_cast<std::size_t>(std::max(1, geometry.depth / 2));
}

std::size_t RingPlan::channel_begin(int channel) const {
  return std::min(buffer_bytes_, channel_bytes_ * static_cast<std::size_t>(channel));
}

RingCursor::RingCursor(const RingPlan& plan, int channel, RingDirection direction)
    : nranks_(plan.geometry().nranks),
      first_chunk_(direction == RingDirection::kSend ? plan.geometry().rank
                                                     : (plan.geometry().rank + nranks_ - 1) % nranks_),
      end_(channel < plan.active_channels() ? plan.channel_begin(channel + 1) : 0),
      element_bytes_(plan.element_bytes()),
      slice_bytes_(plan.geometry().slice_bytes),
      largest_chunk_bytes_(plan.largest_chunk_bytes()),
      loop_begin_(plan.channel_begin(channel)) {
  if (at_end()) return;
  begin_loop();
  if (!find_message()) advance();
}

void RingCursor::begin_loop() {
  const std::size_t share = divide_up(end_ - loop_begin_, static_cast<std::size_t>(nranks_));
  chunk_bytes_ = std::min(largest_chunk_bytes_, align_up(share, element_bytes_));
  message_.step = 0;
  slice_offset_ = 0;
}

// The slice at slice_offset_ of this step's chunk, if there is one.
bool RingCursor::find_message() {
  const int chunk = ((first_chunk_ - message_.step) % nranks_ + nranks_) % nranks_;
  const std::size_t chunk_begin = loop_begin_ + static_cast<std::size_t>(chunk) * chunk_bytes_;
  const std::size_t chunk_end = std::min(end_, chunk_begin + chunk_bytes_);
  const std::size_t slice_begin = chunk_begin + slice_offset_;
  if (slice_begin >= chunk_end) return false;
  message_.offset = slice_begin;
  message_.bytes = std::min(slice_bytes_, chunk_end - slice_begin);
  return true;
}

void RingCursor::advance() {
  slice_offset_ += slice_bytes_;
  while (!find_message()) {
    slice_offset_ = 0;
    if (++message_.step < 2 * (nranks_ - 1)) continue;
    loop_begin_ += chunk_bytes_ * static_cast<std::size_t>(nranks_);
    if (at_end()) return;
    begin_loop();
  }
}

}  // namespace bagua_net::bench

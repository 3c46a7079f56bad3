#include "packet_ring.h"

#include <sys/mman.h>

#include <algorithm>
#include <cassert>
#include <cstring>
#include <new>

namespace netlab {

namespace {

constexpr std::size_t kAlignment = 16;
constexpr std::size_t kMaxRecordBytes = sizeof(PacketHeader) + kMaxPacketBytes;
static_assert(sizeof(PacketHeader) % kAlignment == 0 && kMaxRecordBytes % kAlignment == 0);

}  // namespace

PacketRing::PacketRing(std::size_t bytes) : capacity_(std::max(bytes, 2 * kMaxRecordBytes)) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* mapped = mmap(nullptr, capacity_, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (mapped == MAP_FAILED) {
    throw std::bad_alloc();
  }
  memory_ = static_cast<char*>(mapped);
}

PacketRing::~PacketRing() { munmap(memory_, capacity_); }

std::size_t PacketRing::record_bytes(std::size_t length) {
  return (sizeof(PacketHeader) + length + kAlignment - 1) / kAlignment * kAlignment;
}

char* PacketRing::room() {
  if (!wrapped_ && capacity_ - tail_ < kMaxRecordBytes && head_ > 0) {
    end_ = tail_;
    tail_ = 0;
    wrapped_ = true;
  }
  const std::size_t limit = wrapped_ ? head_ : capacity_;
  return limit - tail_ < kMaxRecordBytes ? nullptr : memory_ + tail_ + sizeof(PacketHeader);
}

void PacketRing::push(std::size_t length, std::int64_t release_ns) {
  assert(length <= kMaxPacketBytes);
  const PacketHeader header{release_ns, length};
  std::memcpy(memory_ + tail_, &header, sizeof(header));
  tail_ += record_bytes(length);
  ++packets_;
}

const PacketHeader& PacketRing::front() const { return *reinterpret_cast<const PacketHeader*>(memory_ + head_); }

const char* PacketRing::front_data() const { return memory_ + head_ + sizeof(PacketHeader); }

void PacketRing::pop() {
  assert(packets_ > 0);
  head_ += record_bytes(front().length);
  --packets_;
  if (packets_ == 0) {
    // From the start again: memory that was just used is in the cache.
    head_ = tail_ = 0;
    wrapped_ = false;
  } else if (wrapped_ && head_ == end_) {
    head_ = 0;
    wrapped_ = false;
  }
}

}  // namespace netlab

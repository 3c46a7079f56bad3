// PacketRing: the packets that are under way on one direction of a wire, oldest first, in one piece of memory.
//
// Owned by a DelayLine and used by its thread alone. The memory is mapped once and becomes resident as it is first
// used; nothing is allocated afterwards. A packet is never split at the end of the memory, so that it is read and
// written where it lies.
//
//   head                    tail               a record: PacketHeader, then the packet, rounded up to 16 bytes
//   v                       v
//   [ record record record | free            ] not wrapped
//
//          tail      head           end
//          v         v              v
//   [ record | free | record record | unused ] wrapped: the records from head to end are older than those before tail
#pragma once

#include <cstddef>
#include <cstdint>

namespace netlab {

// The largest packet that a TAP device gives: 64 KiB with Ethernet and virtio headers; and what reading needs spare.
constexpr std::size_t kMaxPacketBytes = 68UL * 1024;

struct PacketHeader {
  std::int64_t release_ns;  // CLOCK_MONOTONIC: when it leaves
  std::size_t length;
};

class PacketRing {
 public:
  // Too small a size is raised to that of two packets. Throws std::bad_alloc.
  explicit PacketRing(std::size_t bytes);
  ~PacketRing();
  PacketRing(const PacketRing&) = delete;
  PacketRing& operator=(const PacketRing&) = delete;

  // Where the next packet may be written, kMaxPacketBytes; null while the ring is full.
  char* room();
  // What was written there has this length, and is the youngest from now on.
  void push(std::size_t length, std::int64_t release_ns);

  bool empty() const { return packets_ == 0; }
  // The oldest packet; only if there is one.
  const PacketHeader& front() const;
  const char* front_data() const;
  void pop();

 private:
  static std::size_t record_bytes(std::size_t length);

  std::size_t capacity_;
  char* memory_ = nullptr;
  std::size_t head_ = 0;
  std::size_t tail_ = 0;
  std::size_t end_ = 0;  // while wrapped: where the older records end
  std::size_t packets_ = 0;
  bool wrapped_ = false;
};

}  // namespace netlab

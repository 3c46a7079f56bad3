// DelayLine: one direction of a wire. Every packet that one TAP device's host sends is handed to the other device a
// fixed time after it was taken, in order.
//
// Owned by main; run() is the body of a thread of its own, stop() and counters() may be called by any other. Packets
// pass with their virtio header, so that TCP's 64 KiB packets stay whole: one read and one write for each.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "packet_ring.h"

namespace netlab {

struct Counters {
  std::uint64_t packets;
  std::uint64_t bytes;
  std::uint64_t refused;    // the target took no packet: its interface was down
  std::uint64_t full;       // times that the ring had no room, so that packets waited at the source
  std::uint64_t late_ns;    // of all packets together: how much longer than the delay each was kept
  std::uint64_t latest_ns;  // of one
};

class DelayLine {
 public:
  // Neither descriptor is owned; `stop_event` becomes readable when run() shall return. Throws std::bad_alloc.
  DelayLine(int source, int target, int stop_event, std::int64_t delay_ns, std::size_t ring_bytes)
      : source_(source), target_(target), stop_event_(stop_event), delay_ns_(delay_ns), ring_(ring_bytes) {}

  void run();
  Counters counters() const;

 private:
  void release(std::int64_t now);
  // Whether any packet was there.
  bool take();
  // Until a packet arrives or leaves; false when run() shall return.
  bool wait();

  const int source_;
  const int target_;
  const int stop_event_;
  const std::int64_t delay_ns_;
  PacketRing ring_;

  // Written by run()'s thread, read by any: relaxed, since each is a figure by itself.
  std::atomic<std::uint64_t> packets_{0};
  std::atomic<std::uint64_t> bytes_{0};
  std::atomic<std::uint64_t> refused_{0};
  std::atomic<std::uint64_t> full_{0};
  std::atomic<std::uint64_t> late_ns_{0};
  std::atomic<std::uint64_t> latest_ns_{0};
};

}  // namespace netlab

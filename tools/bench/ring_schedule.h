// RingSchedule: one rank's part of a ring all-reduce over a RingTransport, as NCCL's proxy drives its network: receives
// posted up to `depth`, the oldest request of each connection tested once per pass, a slice passed on as soon as it has
// been received and a send is free. Owns the slots that the messages live in; one thread.
//
// A channel has 2 * depth slots of one slice, as many as an NCCL connection pair has buffer. Where NCCL's GPU kernel
// copies from a receive slot to a send slot (adding its own data), a slot here changes sides instead: the GPU's copy
// costs the host's CPUs nothing, so neither may it cost here. A slot is in one of these states:
//   free      in `free_slots`
//   receiving in `receives`: a posted irecv
//   ready     in `ready_slots`: received, to be passed on in the next step
//   sending   in `sends`: a posted isend
// receiving + ready <= depth and sending <= depth, so a free slot exists whenever one is wanted.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "bench/all_reduce_kernel.h"
#include "bench/page_buffer.h"
#include "bench/ring_plan.h"
#include "bench/ring_transport.h"

namespace bagua_net::bench {

// First in, first out, of fixed capacity: the timed loop must not allocate.
template <typename Item, std::size_t kCapacity>
class FixedQueue {
 public:
  bool empty() const { return size_ == 0; }
  std::size_t size() const { return size_; }
  Item& front() { return items_[first_]; }
  void push(const Item& item) {
    items_[(first_ + size_) % kCapacity] = item;
    ++size_;
  }
  void pop() {
    first_ = (first_ + 1) % kCapacity;
    --size_;
  }

 private:
  std::array<Item, kCapacity> items_{};
  std::size_t first_ = 0;
  std::size_t size_ = 0;
};

class RingSchedule {
 public:
  // `transport` has to outlive this and be connected before allocate_slots.
  RingSchedule(RingTransport* transport, const RingGeometry& geometry);

  // The transport must have deregistered them when this is destroyed.
  void allocate_slots();

  // Starts one all-reduce; the one before must be finished. `kernel` does what NCCL's GPU kernel does to the data;
  // timed runs have none.
  void begin(const RingPlan& plan, AllReduceKernel* kernel);
  bool finished() const { return unfinished_channels_ == 0; }
  // One pass over the channels: whether something was posted or completed.
  bool pass();

  // "channel 0: 3 messages received and 2 sent, 4 receives and 1 send under way; ...", for errors.
  std::string describe() const;

 private:
  struct Transfer {
    void* request = nullptr;
    std::uint8_t* slot = nullptr;
    RingMessage message;
  };
  struct Channel {
    PageBuffer memory;
    FixedQueue<std::uint8_t*, std::size_t{2} * kMaxDepth> free_slots;
    FixedQueue<std::uint8_t*, kMaxDepth> ready_slots;
    FixedQueue<Transfer, kMaxDepth> receives;
    FixedQueue<Transfer, kMaxDepth> sends;
    RingCursor next_receive;
    RingCursor next_send;
    std::uint64_t received = 0;
    std::uint64_t sent = 0;
    bool finished = true;
  };

  // Whether there was something to do.
  bool post_receive(int index, Channel* channel);
  bool test_receive(int index, Channel* channel);
  bool post_send(int index, Channel* channel);
  bool test_send(int index, Channel* channel);

  RingTransport* const transport_;
  const RingGeometry geometry_;
  const std::size_t depth_;
  const int last_step_;
  std::vector<Channel> channels_;
  AllReduceKernel* kernel_ = nullptr;
  int active_channels_ = 0;
  int unfinished_channels_ = 0;
};

}  // namespace bagua_net::bench

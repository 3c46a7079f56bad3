// RotatingTraffic: two ranks that send each other numbered messages over many comms in turn: message k travels over
// comm k modulo their number, both ways at once. However many comms there are, the same number of messages is under
// way in all, so that nothing but the number of connections differs. Driven as NCCL's proxy drives its network: the
// oldest request of each connection is tested once per pass. Owns the memory of the messages; one thread.
//
// Both ranks post in the order of the numbers, and a receive has its send: the oldest incomplete message of one side is
// under way on the other or about to be, so neither waits indefinitely.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "bench/page_buffer.h"
#include "bench/ring_schedule.h"
#include "bench/ring_transport.h"

namespace bagua_net::bench {

// Writes what is sent and looks at what has arrived. Timed runs have none.
class MessageAudit {
 public:
  virtual ~MessageAudit() = default;
  // Before the send. May be called again for the same message if the transport had no room.
  virtual void fill(std::uint64_t number, std::uint8_t* data, std::size_t bytes) = 0;
  virtual void check(std::uint64_t number, const std::uint8_t* data, std::size_t bytes) = 0;
};

class RotatingTraffic {
 public:
  // `transport` has to outlive this. At most kMaxDepth messages are under way each way.
  RotatingTraffic(RingTransport* transport, int comms, int in_flight, std::size_t max_message_bytes);

  Status allocate();
  // With every comm; the transport must be connected.
  Status register_memory();
  // The transport must have deregistered it.
  void free_memory();

  // Messages 0 ... count - 1 each way. The ones before must be finished. `audit` may be nullptr.
  void begin(std::size_t message_bytes, std::uint64_t count, MessageAudit* audit);
  bool finished() const { return sent_.completed == count_ && received_.completed == count_; }
  // *progressed: something was posted or completed.
  Status pass(bool* progressed);

  // "12 of 64 messages received and 14 sent, ...", for errors.
  std::string describe() const;

 private:
  struct Transfer {
    void* request = nullptr;
    std::uint8_t* slot = nullptr;
    std::uint64_t number = 0;
  };
  struct Direction {
    FixedQueue<std::uint8_t*, kMaxDepth> free_slots;
    std::vector<Transfer> under_way;  // by number
    std::uint64_t next = 0;           // message to be posted
    std::uint64_t completed = 0;
    // Per comm the pass in which its oldest request was found incomplete.
    std::vector<std::uint64_t> waits_in_pass;
  };

  Status post(Direction* direction, bool* progressed);
  Status test(Direction* direction, bool* progressed);
  int comm_of(std::uint64_t number) const { return static_cast<int>(number % static_cast<std::uint64_t>(comms_)); }

  RingTransport* const transport_;
  const int comms_;
  const int in_flight_;
  const std::size_t max_message_bytes_;
  PageBuffer memory_;
  Direction sent_;
  Direction received_;
  MessageAudit* audit_ = nullptr;
  std::size_t message_bytes_ = 0;
  std::uint64_t count_ = 0;
  std::uint64_t pass_ = 0;
};

}  // namespace bagua_net::bench

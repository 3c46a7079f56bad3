// SendStream: pulls chunks from its scheduler and writes them, header and payload in one call, or by reference, and
// then a chunk has moved when the peer has acknowledged it. Between hosts it also tells the scheduler how fast the peer
// receives what it writes.
#pragma once

#include <array>
#include <functional>

#include "transport/chunk_scheduler.h"
#include "transport/data_stream.h"
#include "transport/rate_estimator.h"
#include "transport/unacknowledged_chunks.h"
#include "wire/frame_header.h"

namespace bagua_net {

class SendStream final : public DataStream {
 public:
  // zero_copy: large chunks go out by reference where the system can do that; the peer acknowledges them.
  // kick: wakes another stream of the comm; nullptr: this stream does not measure. Called by the driver.
  SendStream(std::unique_ptr<ByteStream> bytes, FailureSink* failures, int index, ChunkScheduler* scheduler,
             bool zero_copy, std::function<void(int stream)> kick)
      : DataStream(std::move(bytes), failures, index),
        scheduler_(scheduler),
        kick_(std::move(kick)),
        may_zero_copy_(zero_copy),
        reads_acknowledgements_(zero_copy) {}

  StreamProgress progress(std::size_t budget) override;
  std::uint32_t poll_flags() const override;
  void abandon() override;
  using DataStream::reset;  // once no driver will come again
  // Asks the kernel how the connection is, for the statistics. Any thread.
  void sample_delivery() const;

  // A stream that is not in use finishes its chunk and takes no other. Any thread.
  void set_in_use(bool in_use) { in_use_.store(in_use, std::memory_order_relaxed); }
  // Has, or as far as the scheduler is concerned would have, no room for another chunk. Any thread.
  bool is_full() const { return is_blocked() || passed_over_.load(std::memory_order_relaxed); }

 private:
  bool take_chunk();
  ssize_t write_chunk();
  void end_chunk();
  Status read_acknowledgements();
  Pull pull();
  // False: it has looked since then, or the stream cannot tell.
  bool look_at_delivery(std::int64_t not_since_ns);
  void show(const Delivery& delivery, std::int64_t now_ns) const;

  ChunkScheduler* const scheduler_;
  const std::function<void(int stream)> kick_;
  Chunk chunk_;  // request == nullptr: none
  // A system call with one piece costs less than one with two: a small payload stands behind its header.
  static constexpr std::size_t kSmallBytes = 1024;
  std::array<std::uint8_t, kFrameHeaderBytes + kSmallBytes> front_{};
  std::size_t front_bytes_ = 0;
  std::size_t written_ = 0;                 // of header and payload together
  bool chunk_zero_copy_ = false;            // what is left of it is written by reference
  bool waits_for_acknowledgement_ = false;  // its header asks for one
  bool may_zero_copy_;
  const bool reads_acknowledgements_;
  UnacknowledgedChunks unacknowledged_;
  bool failed_ = false;  // what the peer says means nothing any more
  std::atomic<bool> in_use_{true};
  std::atomic<bool> passed_over_{false};

  // Only if it measures.
  std::int64_t looked_ns_ = 0;
  std::uint64_t written_ever_ = 0;
  std::uint64_t delivered_before_ = 0;  // bytes of the handshake
  Backlog backlog_;                     // when it looked last, and what it has taken since
  RateEstimator rate_estimator_;
};

}  // namespace bagua_net

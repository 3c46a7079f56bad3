// SendStream: pulls chunks from its scheduler and writes them, header and payload in one call. With zero-copy sending,
// a chunk is done when the peer has acknowledged it. Between hosts, the stream also measures how fast the peer
// receives, for the scheduler.
//
// With recovery, it keeps every chunk until the peer has acknowledged it. A small chunk is copied (with several paths:
// of a short message), so that its request is done once it is written. A large one stays in the caller's memory, and
// its request is done when it is acknowledged. On a path with a long round trip that would leave the network idle,
// because NCCL has few messages in flight, so large chunks are copied there, too. If the stream is lost, the comm takes
// the chunks that were not acknowledged.
#pragma once

#include <array>
#include <functional>

#include "transport/chunks/chunk.h"
#include "transport/chunks/chunk_scheduler.h"
#include "transport/chunks/replay_queue.h"
#include "transport/chunks/unacknowledged_chunks.h"
#include "transport/stream/data_stream.h"
#include "transport/tuning/rate_estimator.h"
#include "wire/frames.h"

namespace bagua_net {

class SendStream final : public DataStream {
 public:
  // zero_copy: large chunks go out by reference where the system can do that; the peer acknowledges them.
  // kick: wakes another stream of the comm; nullptr: this stream does not measure. Called by the driver.
  // replay: where chunks of lost streams wait; nullptr: no recovery, the first loss is a failure.
  // checksums: frames and acknowledgements have checksums.
  SendStream(std::unique_ptr<ByteStream> bytes, FailureSink* failures, int index, ChunkScheduler* scheduler,
             bool zero_copy, std::function<void(int stream)> kick, ReplayQueue* replay = nullptr,
             bool checksums = false)
      : DataStream(std::move(bytes), failures, index),
        scheduler_(scheduler),
        kick_(std::move(kick)),
        replay_(replay),
        may_zero_copy_(zero_copy),
        checksums_(checksums),
        header_bytes_(kFrameHeaderBytes + (checksums ? kFrameChecksumBytes : 0)),
        unacknowledged_(replay == nullptr ? kMostUnacknowledged : kMaxUnacknowledgedChunks, checksums) {}

  StreamProgress progress(std::size_t budget) override;
  std::uint32_t poll_flags() const override;
  bool release_memory() override;
  void say_end(std::uint64_t messages) override { send_end(messages, false); }
  // Ends this stream alone, and not the comm. Once no driver will come again.
  void give_back() { send_end(0, true); }
  // From now on it takes no new chunk. Once the peer has acknowledged what it carried, its driver gives it back. Any
  // thread.
  void begin_leaving() {
    set_in_use(false);
    leaving_.store(true, std::memory_order_relaxed);
  }
  // It is not to leave after all; without effect if it has been given back. Any thread.
  void stay() { leaving_.store(false, std::memory_order_relaxed); }
  // There are other paths. Its peer may say at any time that it has lost an address: a driver with a poller reads that
  // at once, others when they listen. And chunks are acknowledged, which says when they were delivered. Before it is
  // driven.
  void set_shares_paths() { shares_paths_ = true; }
  bool is_given_back() const override { return is_given_back_; }
  using DataStream::reset;  // once no driver will come again
  // Reads TCP_INFO for the statistics. Any thread.
  void sample_delivery() const;

  // Reads acknowledgements; the stream may be over afterwards. to_the_end: reads on to an end of input directly behind
  // an acknowledgement, which otherwise the next call finds. By the driver.
  void listen(bool to_the_end = false);
  // What was not acknowledged, once the stream is lost and no driver will come again.
  std::vector<Chunk> take_unfinished();
  // The peer or its kernel has everything that was sent. By the driver.
  bool is_delivered();
  // The peer has acknowledged everything that was sent. After is_delivered() was called.
  bool is_acknowledged() const { return state() == StreamState::kEnded || (!has_chunk_ && unacknowledged_.is_empty()); }
  // Data in the peer's kernel may be damaged. Sends the last chunk again, which requests an acknowledgement, unless one
  // is due anyway. By the driver, once nothing else is to be sent.
  void ask_for_acknowledgement();
  // The peer has acknowledged something since this was asked last. Any thread.
  bool was_acknowledged() { return was_acknowledged_.exchange(false, std::memory_order_relaxed); }

  // A stream that is not in use finishes its chunk and takes no other. Any thread.
  void set_in_use(bool in_use) { in_use_.store(in_use, std::memory_order_relaxed); }
  // The socket has no room for another chunk, or another stream would deliver it sooner. Any thread.
  bool is_full() const { return is_blocked() || passed_over_.load(std::memory_order_relaxed); }
  // Resends chunks of lost streams, until its first new chunk. Before it is driven.
  void begin_with_replay() { replays_.store(true, std::memory_order_relaxed); }
  // It may still resend chunks. Any thread.
  bool replays() const { return replays_.load(std::memory_order_relaxed); }
  // It may resend a chunk of this message: it has carried no later message yet. Any thread.
  bool may_resend(std::uint64_t message) const {
    return replays() && last_number_.load(std::memory_order_relaxed) <= message;
  }
  // It is writing a chunk that was sent before. Any thread.
  bool is_resending() const { return resends_.load(std::memory_order_relaxed); }

 private:
  static constexpr std::size_t kMostUnacknowledged = 64;
  // With recovery, an acknowledgement is asked for after so many chunks, or bytes, that nobody waits for.
  static constexpr std::size_t kAskAfterChunks = 64;
  static constexpr std::size_t kAskAfterBytes = 524288;

  bool recovers() const { return replay_ != nullptr; }
  // False: nothing to write now.
  bool take_chunk();
  bool pull_chunk();
  void begin_chunk();
  // A copy is to be kept of the chunk: its request does not wait for the acknowledgement then.
  bool should_copy() const;
  // The same, and the copy can wait until the chunk is written.
  bool should_copy_when_written() const;
  void copy(Chunk* chunk);
  // The rate of its path is measured by this chunk's message.
  bool is_measured() const;
  bool should_listen() const;
  bool keeps_much() const { return unacknowledged_.copied_bytes() >= listen_at_bytes_; }
  ssize_t write_chunk();
  void end_chunk();
  void send_end(std::uint64_t messages, bool of_stream);
  // It is leaving, and has nothing to write. True: it is over, or waits for an acknowledgement.
  bool end_in_order();
  StreamProgress end_of_output(int error_number);
  // The connection has ended. error_number 0: the peer has closed it.
  void peer_is_gone(int error_number);
  Pull pull(Chunk* chunk);
  // False: it has looked since then, or there is no TCP_INFO. is_acknowledged: something was, just now. at_once: as
  // PathLoad::look().
  bool look_at_delivery(std::int64_t not_since_ns, bool is_acknowledged = false, bool at_once = false);
  void show(const Delivery& delivery, std::int64_t now_ns) const;

  ChunkScheduler* const scheduler_;
  const std::function<void(int stream)> kick_;
  ReplayQueue* const replay_;
  BlockPool blocks_;
  Chunk chunk_;  // that is being written, if
  bool has_chunk_ = false;
  std::array<std::uint8_t, kFrameHeaderBytes + kFrameChecksumBytes> header_{};
  std::size_t written_ = 0;           // of header and payload together
  bool writes_by_reference_ = false;  // what is left of it
  bool may_zero_copy_;
  bool keeps_chunk_ = false;  // until it is acknowledged
  bool copies_when_written_ = false;
  const bool checksums_;
  const std::size_t header_bytes_;  // with checksums
  UnacknowledgedChunks unacknowledged_;
  std::atomic<std::uint64_t> last_number_{0};  // the message of the chunk that was taken last; written by the driver
  // Since the last chunk that asked for an acknowledgement.
  std::size_t unasked_chunks_ = 0;
  std::size_t unasked_bytes_ = 0;
  // So many unacknowledged chunks, or bytes of copies: an acknowledgement was asked for, and may have come.
  std::size_t listen_at_ = kAskAfterChunks;
  std::size_t listen_at_bytes_ = kAskAfterBytes;
  bool shares_paths_ = false;
  std::atomic<bool> was_acknowledged_{false};
  std::atomic<bool> replays_{false};
  std::atomic<bool> resends_{false};
  std::atomic<bool> in_use_{true};
  std::atomic<bool> leaving_{false};
  bool is_given_back_ = false;  // written by the driver, before the stream is over
  std::atomic<bool> passed_over_{false};

  // Only if it measures.
  std::int64_t looked_ns_ = 0;
  std::int64_t estimated_ns_ = 0;  // it looked for its own rate
  std::uint64_t written_ever_ = 0;
  std::uint64_t delivered_before_ = 0;  // bytes of the handshake
  Backlog backlog_;                     // when it looked last, and what it has taken since
  RateEstimator rate_estimator_;
};

}  // namespace bagua_net

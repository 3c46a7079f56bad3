// RecvStream: reads frames, and reads each payload directly into the memory of its receive. The same system call reads
// the bytes behind the payload into a small staging buffer: the next header, or several small messages. If a header
// asks for an acknowledgement, it is sent in the reverse direction, for this chunk and all before it.
#pragma once

#include <array>
#include <memory>
#include <optional>

#include "transport/chunks/receive_table.h"
#include "transport/stream/data_stream.h"
#include "wire/frames.h"

namespace bagua_net {

class RecvStream final : public DataStream {
 public:
  // has_joined: it joined after the comm began, and the peer may not need it any more.
  // recovers: if the connection breaks, the stream is lost, and its missing chunks arrive on another stream.
  // checksums: frames and acknowledgements have checksums. Damaged data counts as a connection that breaks.
  RecvStream(std::unique_ptr<ByteStream> bytes, FailureSink* failures, int index, ReceiveTable* table,
             bool has_joined = false, bool recovers = false, bool checksums = false)
      : DataStream(std::move(bytes), failures, index),
        table_(table),
        has_joined_(has_joined),
        recovers_(recovers),
        checksums_(checksums),
        header_bytes_(kFrameHeaderBytes + (checksums ? kFrameChecksumBytes : 0)) {}

  StreamProgress progress(std::size_t budget) override;
  std::uint32_t poll_flags() const override;
  void say_end(std::uint64_t messages) override;
  // Also for damaged data. Without recovery the comm fails.
  StreamProgress lose(Status why) override;

  // An acknowledgement, which its driver sends without being asked, will name this port. Any thread.
  void tell_lost_port(std::uint16_t port) {
    std::uint64_t ports = lost_ports_.load(std::memory_order_relaxed);
    while (!lost_ports_.compare_exchange_weak(ports, with_lost_port(ports, port), std::memory_order_relaxed)) continue;
  }
  // It works, and has read no part of a chunk. By the driver.
  bool is_idle() const { return !is_over() && part_ == Part::kHeader && staged() == 0; }
  // It has received a chunk that was never sent before. Any thread.
  bool has_new_chunks() const { return has_new_chunks_.load(std::memory_order_acquire); }
  // It joined later, and has received nothing. Only once no driver will come again.
  bool is_unused() const { return has_joined_ && begun_messages_ == 0; }
  // The sender has ended this stream alone. Once it is over.
  bool is_given_back() const override { return header_.end && header_.acknowledge; }
  // The number of messages that the sender has sent, if its end frame says so. Only once the stream is over.
  std::optional<std::uint64_t> sent_messages() const {
    return header_.end && !header_.acknowledge ? std::optional(header_.message_number) : std::nullopt;
  }

 private:
  // What is read next.
  enum class Part {
    kHeader,
    kPayload,   // into the memory of its receive
    kReplayed,  // to be discarded: it was received before, or is received on another stream
  };

  std::size_t staged() const { return staging_end_ - staging_begin_; }
  // Reads the staged header. kWanted and kReceived: the payload comes next.
  Status open_chunk(Arrival* arrival);
  void take_staged_payload();
  // The payload of the chunk is as it was sent.
  bool is_intact() const { return !checksums_ || part_ != Part::kPayload || checksum_ == expected_checksum_; }
  // False: the stream is over.
  bool finish_chunk();
  StreamProgress move(std::size_t budget);
  ssize_t read_more(std::size_t* asked);
  void send_acknowledgement();
  StreamProgress end_of_input();
  StreamProgress end_of_comm();

  // Enough for a header and a small message; larger would only copy more of a large one twice.
  static constexpr std::size_t kStagingBytes = 8192;
  static constexpr std::size_t kSinkBytes = 65536;

  ReceiveTable* const table_;
  const bool has_joined_;
  const bool recovers_;
  const bool checksums_;
  const std::size_t header_bytes_;  // with checksums
  Part part_ = Part::kHeader;
  FrameHeader header_;
  std::uint8_t* destination_ = nullptr;
  std::size_t remaining_ = 0;            // bytes of the payload to come
  std::uint32_t checksum_ = 0;           // of those that have come
  std::uint32_t expected_checksum_ = 0;  // of all
  std::array<std::uint8_t, kStagingBytes> staging_;
  std::size_t staging_begin_ = 0;
  std::size_t staging_end_ = 0;
  std::unique_ptr<std::uint8_t[]> sink_;  // of bytes that came before
  std::uint64_t received_chunks_ = 0;
  std::uint64_t begun_messages_ = 0;  // up to the last of which a chunk has come
  std::uint64_t asked_chunks_ = 0;    // of them, up to the last that asked for acknowledgement
  std::uint64_t acknowledged_chunks_ = 0;
  std::array<std::uint8_t, kAcknowledgementBytes> acknowledgement_{};
  std::size_t acknowledgement_left_ = 0;      // bytes of it to be written
  std::atomic<std::uint64_t> lost_ports_{0};  // that its peer does not know of
  std::atomic<bool> has_new_chunks_{false};
};

}  // namespace bagua_net

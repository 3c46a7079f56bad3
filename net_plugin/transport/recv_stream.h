// RecvStream: reads frames and puts each payload where its receive wants it. Every read also asks for what follows
// the payload into a small staging buffer, so the next header, or several whole small messages, cost no call of
// their own. A chunk whose header asks for it is acknowledged in the reverse direction.
#pragma once

#include <array>
#include <functional>

#include "transport/data_stream.h"
#include "transport/receive_table.h"
#include "wire/acknowledgement.h"
#include "wire/frame_header.h"

namespace bagua_net {

class RecvStream final : public DataStream {
 public:
  // on_end: called once, from the driver, when the peer ended the stream between two frames.
  // has_joined: after the comm began, and the peer may have given it up meanwhile.
  RecvStream(std::unique_ptr<ByteStream> bytes, FailureSink* failures, int index, ReceiveTable* table,
             std::function<void()> on_end, bool has_joined = false)
      : DataStream(std::move(bytes), failures, index),
        table_(table),
        on_end_(std::move(on_end)),
        has_joined_(has_joined) {}

  StreamProgress progress(std::size_t budget) override;
  std::uint32_t poll_flags() const override;

 private:
  std::size_t staged() const { return staging_end_ - staging_begin_; }
  bool in_payload() const { return request_ != nullptr; }
  Status open_chunk();  // reads the staged header; request_ stays nullptr when the receive is not posted yet
  void take_staged_payload();
  Status finish_chunk();
  void send_acknowledgement();
  StreamProgress end_of_input();

  // Enough for a header and a small message; larger would only copy more of a large one twice.
  static constexpr std::size_t kStagingBytes = 8192;

  ReceiveTable* const table_;
  const std::function<void()> on_end_;
  const bool has_joined_;
  FrameHeader header_;
  Request* request_ = nullptr;  // whose payload is being read
  std::uint8_t* destination_ = nullptr;
  std::size_t remaining_ = 0;  // bytes of the payload to come
  std::array<std::uint8_t, kStagingBytes> staging_;
  std::size_t staging_begin_ = 0;
  std::size_t staging_end_ = 0;
  std::uint64_t received_bytes_ = 0;  // of chunks that ask for acknowledgement
  std::uint64_t acknowledged_bytes_ = 0;
  std::array<std::uint8_t, kAcknowledgementBytes> acknowledgement_{};
  std::size_t acknowledgement_left_ = 0;  // bytes of it to be written
  bool was_used_ = false;                 // a chunk came
  bool ended_ = false;                    // on_end_ was called
};

}  // namespace bagua_net

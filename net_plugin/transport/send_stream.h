// SendStream: pulls chunks from its scheduler and writes them, header and payload in one call.
#pragma once

#include <array>

#include "transport/chunk_scheduler.h"
#include "transport/data_stream.h"
#include "wire/frame_header.h"

namespace bagua_net {

class SendStream final : public DataStream {
 public:
  SendStream(std::unique_ptr<ByteStream> bytes, FailureSink* failures, int index, ChunkScheduler* scheduler)
      : DataStream(std::move(bytes), failures, index), scheduler_(scheduler) {}

  StreamProgress progress(std::size_t budget) override;
  std::uint32_t poll_flags() const override;

 private:
  bool take_chunk();

  ChunkScheduler* const scheduler_;
  Chunk chunk_;  // request == nullptr: none
  std::array<std::uint8_t, kFrameHeaderBytes> header_{};
  std::size_t written_ = 0;  // of header and payload together
};

}  // namespace bagua_net

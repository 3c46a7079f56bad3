// RawClient: the sending end of raw mode. Its threads take the next block of the run from one shared counter, so a slow
// connection takes fewer. Its seconds end with the server's acknowledgement.
#pragma once

#include <atomic>

#include "bench/raw_end.h"

namespace bagua_net::bench {

class RawClient final : public RawEnd {
 public:
  using RawEnd::RawEnd;
  ~RawClient() override { stop_threads(); }

  Status connect() override;
  Status run(std::int64_t bytes, std::size_t memory_bytes) override;

 private:
  Status connect_stream(std::size_t stream, std::int64_t deadline);
  Status receive_answer(std::uint8_t expected);
  void send_blocks(std::size_t stream);

  // Guarded by mutex_.
  std::int64_t run_number_ = 0;  // a thread starts when it grows
  std::int64_t run_bytes_ = 0;
  std::size_t run_region_bytes_ = 0;
  std::size_t sending_threads_ = 0;
  // The next byte of the run that no thread has taken; relaxed: the mutex orders its reset.
  std::atomic<std::int64_t> next_byte_{0};
};

}  // namespace bagua_net::bench

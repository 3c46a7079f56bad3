// FaultyByteStream: a connection with the faults of a plan.
//
//   cut    a read or write ends at a random byte, and then the connection is closed or reset
//   drop   nothing that the other end sends arrives any more, acknowledgements of its kernel included; nobody is told
//   delay  the calling thread sleeps after it has moved bytes, as on a host that is too busy
//   flip   a bit of what is read or written is inverted, anywhere in the stream
//
// Where faults fall depends on the seed, on the number of the stream and on what it moves.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "transport/faults/fault_injector.h"
#include "transport/stream/byte_stream.h"

namespace bagua_net {

class FaultyByteStream final : public ByteStream {
 public:
  FaultyByteStream(std::unique_ptr<ByteStream> bytes, FaultInjector* faults, std::uint64_t number);

  ssize_t read(const iovec* pieces, std::size_t count) override;
  ssize_t write(const iovec* pieces, std::size_t count) override;
  ssize_t write_by_reference(const iovec& copied, const iovec& referred) override;

  bool delivery(Delivery* delivery) const override { return bytes_->delivery(delivery); }
  bool peer_liveness(PeerLiveness* liveness) const override { return bytes_->peer_liveness(liveness); }
  void probe_when_idle() override { bytes_->probe_when_idle(); }
  std::size_t undelivered_bytes() const override { return bytes_->undelivered_bytes(); }
  int fd() const override { return bytes_->fd(); }
  void shutdown() override { bytes_->shutdown(); }
  void reset() override { bytes_->reset(); }
  bool wait_until_released(int limit_ms) override { return bytes_->wait_until_released(limit_ms); }
  bool is_broken() const override { return bytes_->is_broken(); }

 private:
  // The bytes of one direction to be flipped: the next one, counted from the last that was moved.
  struct Flips {
    std::mt19937_64 random;
    std::uint64_t distance = 0;
    unsigned bit = 0;

    std::uint8_t flipped(std::uint8_t byte) const { return static_cast<std::uint8_t>(byte ^ 1u << bit); }
  };

  void draw_flip(Flips* flips);
  // A place in an operation on so many bytes; often within the first, where headers are.
  std::size_t random_place(std::size_t bytes);
  // What the operation returns that has moved so many bytes.
  ssize_t cut(ssize_t moved);
  void maybe_drop();
  void maybe_delay(ssize_t moved);
  ssize_t write_flipped(const iovec* pieces, std::size_t count, std::size_t bytes);

  const std::unique_ptr<ByteStream> bytes_;
  FaultInjector* const faults_;  // outlives the comm that has this stream
  std::mt19937_64 random_;
  Flips flips_in_;
  Flips flips_out_;
  bool has_gap_ = false;       // bytes were lost that came before a cut
  std::vector<iovec> pieces_;  // of one call
};

}  // namespace bagua_net

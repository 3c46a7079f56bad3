// What a TCP stream tells of itself, with real sockets.
#include <sys/uio.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "base/monotonic_clock.h"
#include "support/check.h"
#include "support/comm_parts.h"
#include "support/cut_connections.h"
#include "support/loopback.h"
#include "transport/stream/byte_stream.h"

namespace bagua_net {
namespace {

std::uint64_t fill(ByteStream* stream) {
  std::vector<std::uint8_t> bytes(65536);
  iovec piece{bytes.data(), bytes.size()};
  std::uint64_t written = 0;
  for (;;) {
    const ssize_t count = stream->write(&piece, 1);
    if (count < 0) return written;
    written += static_cast<std::uint64_t>(count);
  }
}

}  // namespace

TEST_CASE(a_peer_that_does_not_read_leaves_bytes_unsent) {
  auto [near, far] = tcp_pair();
  const std::unique_ptr<ByteStream> stream = make_tcp_byte_stream(std::move(near));
  Delivery before;
  CHECK(stream->delivery(&before));
  CHECK_EQ(before.unsent_bytes, std::uint64_t{0});
  const std::uint64_t written = fill(stream.get());
  // Until the other end's kernel has acknowledged what it has room for.
  Delivery delivery;
  const std::int64_t end_ms = monotonic_ms() + 30000;
  do {
    CHECK(monotonic_ms() < end_ms);
    CHECK(stream->delivery(&delivery));
  } while (delivery.bytes == before.bytes);
  CHECK(delivery.unsent_bytes > 0);
  CHECK(delivery.bytes - before.bytes + delivery.unsent_bytes <= written);
  CHECK(delivery.least_round_trip_us > 0);
  CHECK(delivery.least_round_trip_us <= delivery.round_trip_us);
  CHECK(delivery.permitted_bytes_per_ns > 0);
}

TEST_CASE(the_kernel_says_how_long_data_is_unanswered_at_least) {
  auto [near, far] = tcp_pair();
  const std::unique_ptr<ByteStream> stream = make_tcp_byte_stream(std::move(near));
  // Real time, without data: what is told of it is far above the kernel's ticks. A slow machine makes it longer only.
  const std::int64_t pause_ms = 1000;
  std::this_thread::sleep_for(std::chrono::milliseconds(pause_ms));
  silence(far.get());
  const std::int64_t begin_ms = monotonic_ms();
  std::uint8_t byte = 1;
  const iovec piece{&byte, 1};
  CHECK_EQ(stream->write(&piece, 1), 1);
  // We may lose the CPU between any two lines: of each time, what bounds it from the side that the check needs.
  const std::int64_t sent_ms = monotonic_ms();
  std::int64_t looked_ms = 0;
  PeerLiveness liveness;
  wait_until(
      [&] {
        looked_ms = monotonic_ms();
        CHECK(stream->peer_liveness(&liveness));
        CHECK(liveness.unanswered_ms <= monotonic_ms() - begin_ms + 20);  // the kernel's clock is a coarse one
        return liveness.transmissions >= 3;
      },
      "three transmissions");
  CHECK(liveness.went_out);
  CHECK(liveness.ms >= pause_ms);
  CHECK(liveness.unanswered_ms >= (looked_ms - sent_ms) / 2);
  hear_again(far.get());
  wait_until([&] { return stream->peer_liveness(&liveness) && liveness.transmissions == 0; }, "the answer");
}

// Real time: the kernel asks after a second.
TEST_CASE(a_peer_to_which_nothing_is_under_way_is_asked_whether_it_is_there) {
  auto [near, far] = tcp_pair();
  const std::unique_ptr<ByteStream> stream = make_tcp_byte_stream(std::move(near));
  silence(far.get());
  stream->probe_when_idle();
  PeerLiveness liveness;
  wait_until([&] { return stream->peer_liveness(&liveness) && liveness.transmissions >= 2; }, "two probes");
  hear_again(far.get());
  wait_until([&] { return stream->peer_liveness(&liveness) && liveness.transmissions == 0; }, "the answer");
}

}  // namespace bagua_net

// What a stream's pace is taken to be: of a measured rate and of what TCP permits.
#include <cstdint>

#include "support/check.h"
#include "transport/tuning/rate_estimator.h"

namespace bagua_net {
namespace {

using check::is_close;

constexpr double kMegabytesPerSecond = 1e-3;  // in bytes per ns
constexpr std::int64_t kStepUs = 2000;

// A stream that is looked at every 2 ms while it is busy.
struct WatchedStream {
  RateEstimator meter;
  Delivery delivery;
  std::int64_t now_ns = 1'000'000'000;

  WatchedStream(std::int64_t round_trip_us, double permitted) {
    delivery.round_trip_us = delivery.least_round_trip_us = round_trip_us;
    delivery.permitted_bytes_per_ns = permitted * kMegabytesPerSecond;
  }

  void run(int milliseconds, double megabytes_per_second, std::uint64_t unsent_bytes) {
    delivery.unsent_bytes = unsent_bytes;
    for (std::int64_t us = 0; us < std::int64_t{milliseconds} * 1000; us += kStepUs) {
      now_ns += kStepUs * 1000;
      delivery.busy_us += kStepUs;
      delivery.bytes += static_cast<std::uint64_t>(megabytes_per_second * static_cast<double>(kStepUs));
      meter.look(delivery, now_ns);
    }
  }
  double pace() const { return meter.pace().bytes_per_ns / kMegabytesPerSecond; }
};

}  // namespace

TEST_CASE(nothing_is_known_at_first) { CHECK_EQ(RateEstimator().pace().bytes_per_ns, 0.0); }

TEST_CASE(without_a_queue_what_tcp_permits_counts_on_a_long_path) {
  WatchedStream stream(2000, 1000);
  stream.run(1000, 5, 0);
  CHECK(is_close(stream.pace(), 1000));
  CHECK_EQ(stream.meter.pace().round_trip_ns, 2e6);
}

TEST_CASE(without_a_queue_what_was_delivered_is_a_lower_bound_on_a_short_path) {
  WatchedStream stream(100, 1000);
  stream.run(500, 5, 0);
  CHECK(is_close(stream.pace(), 5));
  stream.run(100, 50, 0);
  CHECK(is_close(stream.pace(), 50));
  stream.run(500, 5, 0);
  CHECK(is_close(stream.pace(), 50));
}

TEST_CASE(a_queue_in_the_socket_makes_a_rate_of_what_is_delivered) {
  WatchedStream stream(100, 1000);
  stream.run(200, 25, 100'000);
  CHECK(is_close(stream.pace(), 25));
}

TEST_CASE(a_queue_in_the_network_does_so_too) {
  WatchedStream stream(100, 1000);
  stream.run(200, 25, 0);
  stream.delivery.round_trip_us = 6500;
  stream.run(1000, 2.5, 0);
  CHECK(is_close(stream.pace(), 2.5));
}

TEST_CASE(jitter_is_no_queue) {
  WatchedStream stream(40'000, 1000);
  stream.delivery.round_trip_us = 46'000;
  stream.run(1000, 2.5, 0);
  CHECK(is_close(stream.pace(), 1000));
}

TEST_CASE(a_path_that_has_yet_to_fill_is_no_rate) {
  // 50 ms of which the first round trip brings nothing would be a fifth of the rate.
  WatchedStream stream(40'000, 1000);
  stream.run(40, 0, 100'000);
  stream.run(40, 100, 100'000);
  CHECK(is_close(stream.pace(), 1000));
  stream.run(200, 100, 100'000);
  CHECK(is_close(stream.pace(), 100));
}

TEST_CASE(tcp_permitting_less_now_counts_at_once_on_a_long_path) {
  WatchedStream stream(2000, 1000);
  stream.run(200, 25, 100'000);
  CHECK(is_close(stream.pace(), 25));
  stream.delivery.permitted_bytes_per_ns = 1 * kMegabytesPerSecond;
  stream.run(2, 25, 100'000);
  CHECK(is_close(stream.pace(), 1));
}

TEST_CASE(a_rate_grows_old) {
  for (const std::int64_t round_trip_us : {100, 2000}) {
    WatchedStream stream(round_trip_us, 1000);
    stream.run(200, 25, 100'000);
    stream.run(900, 1, 0);
    CHECK(!stream.meter.pace().is_old);
    stream.run(200, 1, 0);
    CHECK(stream.meter.pace().is_old);
    CHECK(is_close(stream.pace(), 25));
    stream.run(100, 26, 100'000);
    CHECK(!stream.meter.pace().is_old);
  }
}

TEST_CASE(what_tcp_permits_does_not_grow_old) {
  WatchedStream stream(2000, 10);
  stream.run(200, 25, 100'000);
  stream.run(2000, 1, 0);
  CHECK(is_close(stream.pace(), 10));
  CHECK(!stream.meter.pace().is_old);
}

TEST_CASE(a_rate_follows_the_stream) {
  WatchedStream stream(100, 1000);
  stream.run(200, 25, 100'000);
  stream.run(500, 50, 100'000);
  CHECK(is_close(stream.pace(), 50));
}

// Otherwise a slow stream delays a chunk of each small message, which never keep it busy for long enough to be
// measured.
TEST_CASE(an_old_rate_is_tried_with_one_chunk_at_a_time) {
  WatchedStream stream(100, 1000);
  stream.run(500, 5, 1);
  stream.run(1100, 0, 0);
  CHECK(stream.meter.pace().is_old);
  // 64 KiB would take 13 ms.
  stream.meter.begin_trial(65536, stream.now_ns);
  CHECK(!stream.meter.pace().is_old);
  stream.run(4, 5, 0);
  CHECK(!stream.meter.pace().is_old);
  stream.run(10, 5, 0);
  CHECK(!stream.meter.pace().is_old);  // it takes as long as the rate says: that holds for another second
  stream.run(900, 0, 0);
  CHECK(!stream.meter.pace().is_old);
  stream.run(200, 0, 0);
  CHECK(stream.meter.pace().is_old);
  // Now it is fast: it may take the next one at once, until there is a new rate.
  stream.meter.begin_trial(65536, stream.now_ns);
  stream.run(4, 50, 0);
  CHECK(stream.meter.pace().is_old);
}

}  // namespace bagua_net

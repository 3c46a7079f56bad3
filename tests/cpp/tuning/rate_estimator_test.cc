// What a stream's pace is taken to be: of a measured rate and of what TCP permits. And how fast the connections over a
// path are together, from what each delivered and when it had something under way.
#include "transport/tuning/rate_estimator.h"

#include <cstdint>

#include "support/check.h"

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

// --- the rate of a path

namespace {

using check::is_close;

constexpr std::int64_t kStepNs = 2'000'000;

// Looks every 2 ms at one connection after the other.
struct Watched {
  PathRate rate;
  std::int64_t now_ns = 1'000'000'000;

  // bytes: of each connection, in a step in which it is busy.
  void together(int connections, std::uint64_t bytes, int steps) {
    for (int step = 0; step < steps; ++step) {
      now_ns += kStepNs;
      for (int connection = 0; connection < connections; ++connection) {
        rate.add({bytes, now_ns - kStepNs, now_ns, kStepNs, false, true});
      }
    }
  }
  void alone(std::uint64_t bytes, int steps, bool queued) {
    for (int step = 0; step < steps; ++step) {
      now_ns += kStepNs;
      rate.add({bytes, now_ns - kStepNs, now_ns, kStepNs, false, queued});
    }
  }
  // Bytes per step.
  double least() const { return rate.least() * kStepNs; }
  double most() const { return rate.most() * kStepNs; }
};

}  // namespace

TEST_CASE(no_rate_is_known_before_40_ms_of_traffic) {
  Watched path;
  path.alone(1000, 19, true);
  CHECK_EQ(path.rate.least(), 0.0);
  CHECK_EQ(path.rate.most(), 0.0);
  path.alone(1000, 1, true);
  CHECK(is_close(path.least(), 1000));
  CHECK(is_close(path.most(), 1000));
}

TEST_CASE(connections_that_are_busy_together_have_the_sum) {
  Watched path;
  path.together(4, 250, 100);
  // A sample ends between two of them.
  CHECK(path.least() > 900 && path.least() < 1050);
  CHECK(path.most() > 900 && path.most() < 1050);
}

// One is looked at less often: what it has delivered is known later, and so is that it was busy earlier.
TEST_CASE(time_in_which_several_were_busy_counts_once) {
  Watched path;
  for (int round = 0; round < 50; ++round) {
    const std::int64_t begin_ns = path.now_ns;
    path.now_ns += kStepNs;  // in which the second one is not busy
    path.alone(500, 3, true);
    path.rate.add({2500, begin_ns, path.now_ns, 4 * kStepNs, false, true});
    path.now_ns += 4 * kStepNs;
  }
  CHECK(path.least() > 950 && path.least() < 1050);  // 4000 bytes in four steps
}

// Short bursts wait for round trips. If they made a path slow, it would get less, in shorter bursts.
TEST_CASE(without_a_queue_a_path_is_as_fast_as_it_was) {
  Watched path;
  path.alone(1000, 100, true);
  path.alone(10, 400, false);
  CHECK(path.least() > 800);
  CHECK(path.most() > 800);
  path.alone(10, 20 * 500, false);  // it is not known for ever
  CHECK(path.least() < 20);
  CHECK(path.most() < 20);
  path.alone(500, 400, true);
  CHECK(is_close(path.least(), 500));
  CHECK(is_close(path.most(), 500));
}

// Otherwise a path that gets less than it could carry would look slower, and get less and less.
TEST_CASE(a_path_that_is_idle_in_between_is_no_slower) {
  Watched path;
  for (int step = 0; step < 300; ++step) {
    path.together(4, 250, 1);
    path.now_ns += 4 * kStepNs;
  }
  CHECK(path.least() > 900);
  CHECK(path.most() > 900);
}

TEST_CASE(one_that_stands_still_for_a_while_is_no_slower_and_one_that_stays_slow_is) {
  Watched path;
  path.alone(1000, 200, true);
  path.alone(0, 100, true);  // 200 ms: a CPU was busy
  CHECK(is_close(path.least(), 1000));
  path.alone(100, 200, true);
  CHECK(is_close(path.least(), 100));
  CHECK(is_close(path.most(), 100));
}

// Its samples take longer, too: eight of them would be seconds.
TEST_CASE(a_path_that_became_slow_is_known_after_half_a_second) {
  Watched path;
  path.alone(1000, 200, true);
  for (int look = 0; look < 9; ++look) {  // three samples
    path.now_ns += 100'000'000;
    path.rate.add({5000, path.now_ns - 100'000'000, path.now_ns, 100'000'000, false, true});
  }
  CHECK(is_close(path.least(), 100));
}

// One lost packet of a path that is found full is none of them.
TEST_CASE(where_packets_are_lost_the_lowest_of_the_last_samples_counts) {
  for (const std::uint64_t lost : {1u, 100u}) {
    Watched path;
    path.alone(100'000, 40, true);
    path.now_ns += kStepNs;
    path.rate.add({100'000, path.now_ns - kStepNs, path.now_ns, kStepNs, false, true, lost});
    path.alone(50'000, 39, true);
    path.alone(100'000, 20, true);
    CHECK(is_close(path.least(), lost == 1 ? 100'000 : 50'000));
  }
}

// The kernel of the peer had everything soon: its program was late.
TEST_CASE(a_peer_that_reads_late_is_no_slow_path) {
  Watched path;
  for (int burst = 0; burst < 100; ++burst) {
    const std::int64_t waits_ns = burst % 10 == 0 ? 60'000'000'000 : 5 * kStepNs;
    path.rate.add({1000, path.now_ns, path.now_ns + waits_ns, kStepNs, true, false});
    path.now_ns += waits_ns;
  }
  CHECK(path.rate.measured_ns() > 0);
  CHECK(path.least() > 450 && path.least() < 1050);
}

// A path that is used for moments only is measured, too, and by looks that cost the same as before.
TEST_CASE(many_short_bursts_make_a_sample) {
  Watched path;
  constexpr std::int64_t kBurstNs = kStepNs / 100;
  for (int burst = 0; burst < 5000; ++burst) {
    path.now_ns += 5 * kBurstNs;
    path.rate.add({10, path.now_ns - kBurstNs, path.now_ns, kBurstNs, true, false});
  }
  CHECK(is_close(path.least(), 1000));
}

// The acknowledgement at the end of each burst finds nothing queued, and says nothing about it.
TEST_CASE(a_queue_is_what_is_seen_before_the_end) {
  Watched path;
  path.alone(1000, 200, true);
  for (int burst = 0; burst < 200; ++burst) {
    path.alone(100, 1, true);
    for (int look = 0; look < 3; ++look) {
      path.now_ns += kStepNs;
      path.rate.add({100, path.now_ns - kStepNs, path.now_ns, kStepNs, true, false});
    }
  }
  CHECK(is_close(path.most(), 100));
}

}  // namespace bagua_net

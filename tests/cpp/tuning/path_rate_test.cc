// How fast the connections over a path are together, from what each delivered and when it had something under way.
#include "transport/tuning/path_rate.h"

#include "support/check.h"

namespace bagua_net {
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

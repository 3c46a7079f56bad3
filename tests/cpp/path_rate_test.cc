// How fast the connections over a path are together, from what each delivered and how long it was busy.
#include "transport/tuning/path_rate.h"

#include "support/check.h"

namespace bagua_net {
namespace {

constexpr std::int64_t kStepUs = 2000;

// Looks every 2 ms at one connection after the other.
struct Watched {
  PathRate rate;
  std::int64_t now_ns = 1'000'000'000;

  // bytes: of each connection, in a step in which it is busy.
  void together(std::size_t connections, std::uint64_t bytes, int steps) {
    for (int step = 0; step < steps; ++step) {
      now_ns += kStepUs * 1000;
      for (std::size_t connection = 0; connection < connections; ++connection) {
        rate.add(connection, bytes, kStepUs, true, now_ns);
      }
    }
  }
  void in_turn(std::size_t connections, std::uint64_t bytes, int steps, bool queued) {
    for (int step = 0; step < steps; ++step) {
      now_ns += kStepUs * 1000;
      rate.add(static_cast<std::size_t>(step) % connections, bytes, kStepUs, queued, now_ns);
    }
  }
  // Bytes per step.
  double least() const { return rate.least() * 1e3 * kStepUs; }
  double most() const { return rate.most() * 1e3 * kStepUs; }
};

bool is_close(double value, double expected) { return value > 0.99 * expected && value < 1.01 * expected; }

}  // namespace

TEST_CASE(no_rate_is_known_before_50_ms_of_traffic) {
  Watched path;
  path.in_turn(1, 1000, 24, true);
  CHECK_EQ(path.rate.least(), 0.0);
  CHECK_EQ(path.rate.most(), 0.0);
  path.in_turn(1, 1000, 1, true);
  CHECK(is_close(path.least(), 1000));
  CHECK(is_close(path.most(), 1000));
}

TEST_CASE(connections_that_are_busy_together_have_the_sum) {
  Watched path;
  path.together(4, 250, 100);
  // A sample ends between two of them.
  CHECK(path.least() > 900 && path.least() < 1010);
  CHECK(path.most() > 900 && path.most() < 1010);
}

TEST_CASE(connections_that_are_busy_in_turn_have_the_rate_of_one) {
  Watched path;
  path.in_turn(3, 1000, 300, true);
  CHECK(is_close(path.least(), 1000));
  CHECK(path.most() > 1000);  // they might have been busy together
}

TEST_CASE(without_a_queue_a_path_may_be_as_fast_as_it_was) {
  Watched path;
  path.in_turn(1, 1000, 100, true);
  path.in_turn(1, 10, 400, false);
  CHECK(path.least() < 20);
  CHECK(is_close(path.most(), 1000));
  path.in_turn(1, 500, 400, true);
  CHECK(is_close(path.least(), 500));
  CHECK(is_close(path.most(), 500));
}

// Otherwise a path that gets less than it could carry would look slower, and get less and less.
TEST_CASE(a_path_that_is_idle_in_between_is_no_slower) {
  Watched path;
  for (int step = 0; step < 300; ++step) {
    path.together(4, 250, 1);
    path.now_ns += 4 * kStepUs * 1000;
  }
  CHECK(path.least() > 240);  // each of the four may have been the only one
  CHECK(path.most() > 900);
}

}  // namespace bagua_net

CHECK_MAIN

// StreamGrowth against a simulated network and clock: a limit of each flow and one of the link decide what a number of
// connections carries.
#include "transport/tuning/stream_growth.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "support/check.h"
#include "transport/comm/comm_growth.h"

namespace bagua_net {
namespace {

constexpr std::int64_t kSecond = 1'000'000'000;
constexpr std::int64_t kMillisecond = 1'000'000;
constexpr std::size_t kMegabyte = 1'000'000;

struct Network {
  double flow_limit;  // bytes a second
  double link_limit;

  double rate(int streams) const { return std::min(streams * flow_limit, link_limit); }
};

constexpr Network kCapped{25e6, 200e6};
constexpr Network kPlain{1e12, 200e6};

struct Change {
  std::int64_t at_ns;
  int from;
  int to;
};

// One sender that always has a message under way, at the rate that the network gives to the connections in use.
class Sender {
 public:
  explicit Sender(StreamGrowth* growth) : growth_(growth) { growth_->begin_busy(now_ns_); }

  // Stays busy for so long; the messages find their connections full, or do not.
  void send_for(std::int64_t duration_ns, const Network& network, bool full = true) {
    for (const std::int64_t end_ns = now_ns_ + duration_ns; now_ns_ < end_ns;) {
      const int before = growth_->target();
      constexpr std::size_t kMessageBytes = kMegabyte;
      now_ns_ += static_cast<std::int64_t>(1e9 * kMessageBytes / network.rate(before));
      growth_->add_posted(full);
      growth_->add_sent(kMessageBytes, now_ns_);
      if (growth_->target() != before) changes_.push_back({now_ns_, before, growth_->target()});
    }
  }

  void pause_for(std::int64_t duration_ns) {
    growth_->end_busy(now_ns_);
    now_ns_ += duration_ns;
    growth_->begin_busy(now_ns_);
  }

  std::int64_t now_ns() const { return now_ns_; }
  const std::vector<Change>& changes() const { return changes_; }

  std::vector<int> targets() const {
    std::vector<int> targets;
    for (const Change& change : changes_) targets.push_back(change.to);
    return targets;
  }

  // From the end of each trial that failed to the beginning of the next.
  std::vector<std::int64_t> pauses() const {
    std::vector<std::int64_t> pauses;
    for (std::size_t i = 1; i < changes_.size(); ++i) {
      if (changes_[i - 1].to < changes_[i - 1].from) pauses.push_back(changes_[i].at_ns - changes_[i - 1].at_ns);
    }
    return pauses;
  }

 private:
  StreamGrowth* const growth_;
  std::int64_t now_ns_ = 1000 * kSecond;
  std::vector<Change> changes_;
};

void check_targets(const Sender& sender, const std::vector<int>& expected) {
  const std::vector<int> targets = sender.targets();
  CHECK_EQ(targets.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) CHECK_EQ(targets[i], expected[i]);
}

}  // namespace

TEST_CASE(grows_to_the_number_that_fills_the_link_and_stays) {
  StreamGrowth growth(1, 64);
  Sender sender(&growth);
  sender.send_for(5 * kSecond, kCapped);
  // Each gain is lost again before it is kept. The link is full with 8: the last trial gained nothing.
  check_targets(sender, {4, 1, 4, 16, 4, 16, 64, 16});
  CHECK(sender.changes()[5].at_ns - sender.changes()[0].at_ns <= 2 * kSecond);
  const std::size_t settled = sender.changes().size();
  sender.send_for(3600 * kSecond, kCapped);
  CHECK_EQ(growth.target(), 16);
  // Later trials never keep what they tried, and become rare.
  for (std::size_t i = settled; i < sender.changes().size(); ++i) {
    CHECK_EQ(sender.changes()[i].to, (i - settled) % 2 == 0 ? 64 : 16);
  }
  CHECK(sender.changes().size() < 60);
}

TEST_CASE(a_link_that_limits_no_flow_keeps_one_connection) {
  StreamGrowth growth(1, 64);
  Sender sender(&growth);
  sender.send_for(3 * kSecond, kPlain);
  check_targets(sender, {4, 1});
}

TEST_CASE(pauses_between_trials_double_up_to_a_limit) {
  StreamGrowth growth(1, 64);
  Sender sender(&growth);
  sender.send_for(3 * 3600 * kSecond, kPlain);
  for (const Change& change : sender.changes()) CHECK(change.to <= 4);
  const std::vector<std::int64_t> pauses = sender.pauses();
  CHECK(pauses.size() > 10);
  std::int64_t expected_s = 5;
  for (const std::int64_t pause : pauses) {
    CHECK(pause >= expected_s * kSecond);
    CHECK(pause <= (expected_s + 1) * kSecond);  // a trial begins with the next window
    expected_s = std::min<std::int64_t>(2 * expected_s, 300);
  }
  CHECK_EQ(expected_s, 300);
}

TEST_CASE(a_trial_that_gains_makes_the_next_pause_short_again) {
  StreamGrowth growth(1, 64);
  Sender sender(&growth);
  sender.send_for(600 * kSecond, kPlain);
  CHECK_EQ(growth.target(), 1);
  const std::size_t plain_changes = sender.changes().size();
  sender.send_for(600 * kSecond, kCapped);  // say, the route changed
  CHECK_EQ(growth.target(), 16);
  // The first trial that failed on the new route was followed by one soon after.
  const std::vector<Change>& changes = sender.changes();
  for (std::size_t i = plain_changes; i + 1 < changes.size(); ++i) {
    const std::int64_t until_next_ns = changes[i + 1].at_ns - changes[i].at_ns;
    // Up, or back to confirm a gain.
    if (changes[i].to > changes[i].from || until_next_ns < kSecond) continue;
    CHECK(until_next_ns <= 6 * kSecond);
    return;
  }
  check::fail(__FILE__, __LINE__, "no trial failed on the new route");
}

TEST_CASE(a_small_gain_is_none_and_a_clear_one_counts) {
  for (const double gain : {1.0, 1.1, 1.3, 2.0}) {
    StreamGrowth growth(1, 2);
    Sender sender(&growth);
    sender.send_for(3 * kSecond, {100e6, gain * 100e6});
    CHECK_EQ(growth.target(), gain > 1.2 ? 2 : 1);
  }
}

TEST_CASE(a_trial_that_costs_rate_is_taken_back) {
  StreamGrowth growth(4, 64);
  Sender sender(&growth);
  while (growth.target() == 4) sender.send_for(kMillisecond, kPlain);
  CHECK_EQ(growth.target(), 16);
  sender.send_for(3 * kSecond, {10e6, 100e6});  // a quarter of what 4 moved
  check_targets(sender, {16, 4});
}

TEST_CASE(connections_that_are_not_full_start_no_trial) {
  StreamGrowth growth(1, 64);
  Sender sender(&growth);
  sender.send_for(60 * kSecond, kCapped, false);
  CHECK_EQ(growth.target(), 1);
  CHECK(sender.changes().empty());
}

TEST_CASE(comms_that_move_more_than_networks_allow_to_a_connection_start_no_trial) {
  // The limit is 2 Gb/s for each comm while it is busy, however many there are.
  for (const auto& [comms, gigabit, tries] :
       {std::tuple{8, 18.0, false}, {8, 14.0, true}, {1, 2.5, false}, {1, 1.5, true}}) {
    StreamGrowth growth(1, 64);
    std::int64_t now_ns = 0;
    for (int comm = 0; comm < comms; ++comm) growth.begin_busy(now_ns);
    for (int message = 0; message < 100000 && growth.target() == 1; ++message) {
      now_ns += static_cast<std::int64_t>(8.0 * kMegabyte / gigabit);
      growth.add_posted(true);
      growth.add_sent(kMegabyte, now_ns);
    }
    CHECK_EQ(growth.target() > 1, tries);
  }
}

TEST_CASE(an_interface_that_moves_half_of_what_it_tells_starts_no_trial) {
  for (const auto& [gigabit, tries] : {std::pair{1.6, false}, {1.4, true}}) {
    StreamGrowth growth(1, 64, 3.0 / 8);
    Sender sender(&growth);
    sender.send_for(kSecond, {1e12, gigabit * 1e9 / 8});
    CHECK_EQ(growth.trials() > 0, tries);
  }
}

TEST_CASE(most_messages_of_a_window_must_find_connections_full) {
  for (const int full_of_ten : {3, 5, 7}) {
    StreamGrowth growth(1, 2);
    std::int64_t now_ns = 0;
    growth.begin_busy(now_ns);
    for (int message = 0; message < 1000; ++message) {
      now_ns += 5 * kMillisecond;
      growth.add_posted(message % 10 < full_of_ten);
      growth.add_sent(kMegabyte, now_ns);
      CHECK(growth.target() == 1 || full_of_ten > 5);
      if (growth.target() == 2) break;
    }
    CHECK_EQ(growth.target(), full_of_ten > 5 ? 2 : 1);
  }
}

TEST_CASE(never_more_than_allowed) {
  const Network endless{1e6, 1e15};
  for (const auto& [initial, most] : {std::pair{1, 12}, {5, 16}, {1, 1}, {16, 16}, {3, 64}}) {
    StreamGrowth growth(initial, most);
    CHECK_EQ(growth.target(), initial);
    Sender sender(&growth);
    sender.send_for(600 * kSecond, endless);
    CHECK_EQ(growth.target(), most);
    for (const Change& change : sender.changes()) {
      CHECK_EQ(std::max(change.to, change.from), std::min(4 * std::min(change.to, change.from), most));
    }
  }
}

TEST_CASE(never_fewer_than_it_began_with) {
  StreamGrowth growth(5, 16);
  Sender sender(&growth);
  sender.send_for(3600 * kSecond, kPlain);
  for (const Change& change : sender.changes()) CHECK(change.to == 5 || change.to == 16);
  CHECK_EQ(growth.target(), 5);
}

TEST_CASE(busy_time_of_several_comms_is_their_union) {
  // A window is 100 ms in use. Four comms that are busy side by side do not shorten it.
  StreamGrowth growth(1, 2);
  constexpr int kComms = 4;
  for (int comm = 0; comm < kComms; ++comm) growth.begin_busy(0);
  std::int64_t now_ns = 0;
  while (growth.target() == 1) {
    now_ns += kMillisecond;
    growth.add_posted(true);
    growth.add_sent(kMegabyte, now_ns);
    CHECK(now_ns <= kSecond);
  }
  CHECK_EQ(now_ns, 100 * kMillisecond);
}

TEST_CASE(a_window_has_enough_messages_to_count) {
  StreamGrowth growth(1, 2);
  growth.begin_busy(0);
  for (int second = 1; second < 10; ++second) {
    growth.add_posted(true);
    growth.add_sent(kMegabyte, second * kSecond);
    CHECK_EQ(growth.target(), 1);
  }
  growth.add_posted(true);
  growth.add_sent(kMegabyte, 10 * kSecond);
  CHECK_EQ(growth.target(), 2);
}

TEST_CASE(comms_that_take_turns_and_overlap_are_one_busy_time) {
  StreamGrowth growth(1, 2);
  // 0 to 30 and 20 to 50 ms are 50 ms; the pause to 500 ms is none; 500 to 550 ms makes 100.
  growth.begin_busy(0);
  growth.begin_busy(20 * kMillisecond);
  growth.end_busy(30 * kMillisecond);
  growth.end_busy(50 * kMillisecond);
  growth.begin_busy(500 * kMillisecond);
  for (int message = 0; message < 20; ++message) {
    growth.add_posted(true);
    growth.add_sent(kMegabyte, 549 * kMillisecond);
  }
  CHECK_EQ(growth.target(), 1);
  growth.add_posted(true);
  growth.add_sent(kMegabyte, 550 * kMillisecond);
  CHECK_EQ(growth.target(), 2);
}

TEST_CASE(idle_time_between_bursts_does_not_count) {
  StreamGrowth growth(1, 64);
  Sender sender(&growth);
  std::int64_t idle_ns = kMillisecond;
  for (int burst = 0; burst < 4000 && sender.changes().size() < 6; ++burst) {
    sender.send_for(10 * kMillisecond, kCapped);
    sender.pause_for(idle_ns);
    idle_ns += kMillisecond;  // bursts get rarer: with the idle time the rate would only fall
  }
  check_targets(sender, {4, 1, 4, 16, 4, 16});
}

TEST_CASE(medium_messages_that_wait_for_each_other_use_more_connections) {
  // Of 64 KiB, as NCCL sends them in an all-reduce of 256 KiB over two channels: a comm's next one waits for the peer's
  // answer to the one before, and the kernel takes it at once.
  const auto streams_after_two_seconds = [](std::int64_t with_one_ns) {
    constexpr std::size_t kMediumBytes = 65536;
    StreamGrowth growth(1, 64);
    SendPolicy policy;
    policy.growth = &growth;
    policy.most_streams = 64;
    std::size_t streams[2] = {1, 1};
    std::size_t opening = 0;
    policy.open_streams = [&](int count) { opening = static_cast<std::size_t>(count); };
    CommGrowth comms[2] = {{policy, 1}, {policy, 1}};
    CHECK(comms[0].counts(kMediumBytes));
    CHECK(!comms[0].counts(kMediumBytes / kLimitedFlowShare));
    std::int64_t now_ns = 1000 * kSecond;
    for (const std::int64_t end_ns = now_ns + 2 * kSecond; now_ns < end_ns;) {
      for (int channel = 0; channel < 2; ++channel) {
        comms[channel].add_posted(true, now_ns);
        comms[channel].add_sent(kMediumBytes, now_ns);
        comms[channel].request(streams[channel], now_ns);
        streams[channel] += std::exchange(opening, 0);
      }
      now_ns += with_one_ns / std::min(growth.target(), 8);
    }
    CHECK_EQ(streams[0], streams[1]);
    CHECK(comms[0].kept() <= streams[0]);
    return streams[0];
  };
  CHECK_EQ(streams_after_two_seconds(2600000), 16u);  // the link is full with 8
  // Pauses, in which the job does something else.
  CHECK_EQ(streams_after_two_seconds(100 * kMillisecond), 1u);
}

TEST_CASE(a_long_pause_within_a_trial_does_not_decide_it) {
  StreamGrowth growth(1, 64);
  Sender sender(&growth);
  while (growth.target() == 1) sender.send_for(kMillisecond, kCapped);
  sender.pause_for(3600 * kSecond);
  sender.send_for(5 * kSecond, kCapped);
  check_targets(sender, {4, 1, 4, 16, 4, 16, 64, 16});
}

TEST_CASE(a_rate_that_rises_by_itself_is_no_gain) {
  StreamGrowth growth(1, 64);
  Sender sender(&growth);
  while (growth.target() == 1) sender.send_for(kMillisecond, kPlain);
  sender.send_for(3 * kSecond, {1e12, 400e6});  // the link became faster, for any number of connections
  check_targets(sender, {4, 1});                // it looked like a gain until the number went back
}

TEST_CASE(larger_messages_are_no_gain_of_a_trial) {
  // A message takes as long whatever its size, so larger ones are faster over any number of connections.
  for (const bool larger_only_during_the_trial : {false, true}) {
    StreamGrowth growth(1, 64);
    std::int64_t now_ns = 1000 * kSecond;
    growth.begin_busy(now_ns);
    std::size_t bytes = 65536;
    for (int message = 0; message < 3000; ++message) {
      now_ns += kMillisecond;
      growth.add_posted(true);
      const int before = growth.target();
      growth.add_sent(bytes, now_ns);
      if (growth.target() > before) bytes = 262144;
      if (growth.target() < before && larger_only_during_the_trial) bytes = 65536;
    }
    CHECK_EQ(growth.target(), 1);
    CHECK_EQ(growth.gains(), 0u);
  }
}

TEST_CASE(chance_rarely_makes_it_grow) {
  // The rate of one connection as of two varies by 5 % (standard deviation) from window to window.
  const int seeds = check::rounds(100);
  int grown = 0;
  for (int seed = 0; seed < seeds; ++seed) {
    StreamGrowth growth(1, 16);
    Sender sender(&growth);
    std::mt19937 random(static_cast<unsigned>(seed));
    std::normal_distribution<double> rate(200e6, 10e6);
    for (int window = 0; window < 10 * 600; ++window) sender.send_for(100 * kMillisecond, {1e12, rate(random)});
    grown += growth.target() > 1 ? 1 : 0;
  }
  CHECK(10 * grown <= seeds);  // within ten minutes of traffic
}

}  // namespace bagua_net

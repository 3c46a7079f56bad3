// Comms that ask for more streams, or take some out of use, as StreamGrowth finds that they gain or not, while messages
// are under way.
#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "support/cut_connections.h"
#include "support/growing_comms.h"
#include "support/process_limits.h"
#include "support/stalling_stream.h"

namespace bagua_net {
namespace {

// The streams go from 2 to 4 and back to 2.
void streams_go_out_of_use(int workers) {
  GrowingComms connection(workers, 2, 2, 4);
  Windows windows(connection.growth);
  windows.pass_until(4);
  CHECK_EQ(connection.growth.target(), 4);
  connection.exchange({4u << 20});
  CHECK_EQ(connection.asked.size(), 1u);
  CHECK_EQ(connection.asked[0], 2);
  connection.join();
  connection.join();
  const Deadline deadline;
  while (connection.used_streams() < 4) {
    deadline.check("traffic on four streams");
    // On a busy machine the comm's own messages may already have ended the trial.
    windows.pass_until(4);
    connection.exchange({100, 4u << 20, 4u << 20, 4u << 20, 4u << 20});
  }
  // Messages are under way on all four when the number goes back.
  int rounds = 0;
  connection.exchange(std::vector<std::size_t>(16, 4u << 20), [&] {
    if (++rounds != 8) return;
    windows.pass_until(4);
    windows.pass_until_back_at(2);
  });
  CHECK_EQ(connection.growth.target(), 2);
  connection.exchange({kLarge});
  const std::vector<std::uint64_t> before = connection.received_by_stream();
  connection.exchange(std::vector<std::size_t>(16, 1u << 20));
  const std::vector<std::uint64_t> after = connection.received_by_stream();
  CHECK(after[0] + after[1] >= before[0] + before[1] + (16u << 20));
  // The end of the stream counts as a byte.
  CHECK(after[2] <= before[2] + 1);
  CHECK(after[3] <= before[3] + 1);
}

// A comm with so many messages of 512 KiB in flight on a path whose round trip takes 10 ms: true if more connections
// are tried within ten seconds.
bool is_tried(std::size_t in_flight, double bytes_per_ns) {
  constexpr double kRoundTripNs = 1e7;
  constexpr std::size_t kBytes = 524288;
  StreamGrowth growth(4, 16);
  SendPolicy policy;
  policy.growth = &growth;
  CommGrowth comm(policy, 4);
  std::deque<double> done_ns;
  double now_ns = 1e9;
  double leaves_ns = now_ns;
  while (now_ns < 11e9 && growth.target() == 4) {
    if (done_ns.size() == in_flight) {
      now_ns = std::max(now_ns, done_ns.front());
      done_ns.pop_front();
      comm.add_sent(kBytes, static_cast<std::int64_t>(now_ns));
    }
    comm.add_posted(comm.is_held_up(kRoundTripNs, static_cast<std::int64_t>(now_ns)),
                    static_cast<std::int64_t>(now_ns));
    leaves_ns = std::max(leaves_ns, now_ns) + kBytes / bytes_per_ns;
    done_ns.push_back(leaves_ns + kRoundTripNs);
  }
  return growth.trials() > 0;
}

}  // namespace

TEST_CASE(streams_go_out_of_use_on_one_thread) { streams_go_out_of_use(0); }

TEST_CASE(streams_go_out_of_use_with_workers) { streams_go_out_of_use(2); }

TEST_CASE(a_message_is_held_up_when_it_is_under_way_for_two_round_trips) {
  StreamGrowth growth(1, 4);
  SendPolicy policy;
  policy.growth = &growth;
  CommGrowth comm(policy, 1);
  constexpr std::int64_t kMillisecond = 1'000'000;
  constexpr double kRoundTripNs = 10.0 * kMillisecond;
  CHECK(!comm.is_held_up(kRoundTripNs, 100 * kMillisecond));
  comm.add_posted(false, 100 * kMillisecond);
  comm.add_posted(false, 115 * kMillisecond);
  CHECK(!comm.is_held_up(kRoundTripNs, 119 * kMillisecond));
  CHECK(comm.is_held_up(kRoundTripNs, 121 * kMillisecond));
  CHECK(comm.is_held_up(0, 101 * kMillisecond));
  comm.add_sent(kLarge, 122 * kMillisecond);
  CHECK(!comm.is_held_up(kRoundTripNs, 134 * kMillisecond));
  CHECK(comm.is_held_up(kRoundTripNs, 136 * kMillisecond));
  comm.add_sent(kLarge, 137 * kMillisecond);
  CHECK(!comm.is_held_up(kRoundTripNs, 200 * kMillisecond));
}

TEST_CASE(on_a_long_path_more_connections_are_tried_where_their_rate_is_the_limit) {
  CHECK(is_tried(8, 0.1));    // 33 ms of messages for 10 ms of path
  CHECK(!is_tried(2, 0.15));  // the path is empty most of the time
}

TEST_CASE(streams_are_asked_for_once_and_as_many_as_are_missing) {
  for (const int workers : {0, 2}) {
    GrowingComms connection(workers, 2, 8, 8);
    connection.exchange({100, kLarge / kLimitedFlowShare, 0});
    CHECK(connection.asked.empty());  // small messages ask for nothing
    connection.exchange({kLarge, kLarge, 4u << 20});
    CHECK_EQ(connection.asked.size(), 1u);
    CHECK_EQ(connection.asked[0], 6);
    connection.join();
    connection.join();
    connection.exchange(std::vector<std::size_t>(100, kLarge));
    CHECK_EQ(connection.asked.size(), 1u);
  }
}

TEST_CASE(a_comm_asks_for_no_more_than_its_peer_allows) {
  SendPolicy policy;
  policy.most_streams = 3;
  GrowingComms connection(0, 1, 16, 16, policy);
  connection.exchange({kLarge, kLarge});
  CHECK_EQ(connection.asked.size(), 1u);
  CHECK_EQ(connection.asked[0], 2);
}

TEST_CASE(a_further_trial_asks_for_the_difference) {
  GrowingComms connection(0, 2, 2, 16);
  connection.exchange({kLarge});
  CHECK(connection.asked.empty());
  Windows windows(connection.growth);
  for (const int target : {8, 16}) {
    windows.pass_until(target);
    connection.exchange({kLarge});
  }
  CHECK_EQ(connection.asked.size(), 2u);
  CHECK_EQ(connection.asked[0], 6);  // from 2 to 8
  CHECK_EQ(connection.asked[1], 8);  // from 8 to 16, though the first six have not come
}

TEST_CASE(streams_that_gained_nothing_are_closed) {
  for (const bool recovers : {false, true}) {
    GrowingComms connection(recovers ? 2 : 0, 2, 2, 8, {}, recovers);
    Windows windows(connection.growth);
    const Deadline deadline;
    // More often than there are places for streams that nobody has closed.
    for (int trial = 0; trial < check::rounds(12); ++trial) {
      windows.pass_until(8);
      const std::size_t first = connection.watched.size();
      for (int joins = 0; joins < 6; ++joins) connection.join();
      connection.exchange(std::vector<std::size_t>(20, kLarge));
      windows.pass_until_back_at(2);
      while (!connection.have_ended(first) || !connection.receiver_arrivals->has_room(3)) {
        deadline.check("the end of the streams");
        connection.exchange({kLarge, 4u << 20});
      }
      CHECK(!connection.has_ended(0) && !connection.has_ended(1));
    }
    // All the others are lost: the sender has not closed the comm.
    if (!recovers) continue;
    std::vector<std::uint8_t> room(100);
    Request* const receive = connection.receive(room);
    for (int index = 0; index < 2; ++index) cut(connection.watched[static_cast<std::size_t>(index)].get(), Cut::kReset);
    check_contains(outcome(receive).message(), "has opened no connection");
  }
}

TEST_CASE(without_room_for_more_streams_a_comm_goes_on_with_those_it_has) {
  OptionalConnections optional;
  SendPolicy policy;
  policy.optional = std::make_shared<OptionalConnections::Share>(&optional);
  GrowingComms connection(0, 1, 16, 16, policy);
  {
    const DescriptorLimit limit(2 * (open_descriptors() + 6));
    connection.exchange({kLarge, kLarge});
  }
  CHECK_EQ(connection.asked.size(), 1u);
  CHECK(connection.asked[0] > 0 && connection.asked[0] <= 6);
  CHECK_EQ(policy.optional->taken(), connection.asked[0]);
  connection.exchange({kLarge, kLarge});
}

TEST_CASE(a_comm_that_is_closed_in_mid_message_leaves_no_busy_time) {
  GrowingComms connection(0, 1, 1, 2);
  const std::vector<std::uint8_t> sent(16u << 20);
  connection.send(sent);
  connection.sender.reset();
  StreamGrowth& growth = connection.growth;
  // Sends ten messages in no time, all of which wait for connections or none.
  const auto send_at = [&growth](std::int64_t at_ns, bool waits) {
    for (int message = 0; message < 10; ++message) {
      growth.add_posted(waits);
      growth.add_sent(kLarge, at_ns);
    }
  };
  constexpr std::int64_t kHourNs = 3'600'000'000'000;
  std::int64_t now_ns = monotonic_ns();
  // Ends the window in which the comm was busy, however long that took on this machine.
  growth.begin_busy(now_ns);
  send_at(now_ns + kHourNs, false);
  growth.end_busy(now_ns + kHourNs);
  // Two moments an hour apart, with enough messages for a trial if that hour were busy time.
  for (int moment = 0; moment < 2; ++moment) {
    now_ns += 2 * kHourNs;
    growth.begin_busy(now_ns);
    send_at(now_ns, true);
    growth.end_busy(now_ns);
  }
  CHECK_EQ(connection.growth.target(), 1);
}

TEST_CASE(a_message_whose_streams_went_out_of_use_before_they_took_it_is_sent) {
  GrowingComms connection(1, 2, 2, 4);
  Windows windows(connection.growth);
  windows.pass_until(4);
  connection.exchange({kLarge});
  connection.join();
  connection.join();
  connection.exchange({kLarge});  // takes them in
  CHECK_EQ(connection.growth.target(), 4);
  // Message m wakes as many of the streams 1 to 3 as it has chunks, from 1 + m % 3 on: here 2 and 3.
  while (connection.traffic.messages() % 3 != 1) connection.exchange({100});

  StalledWorker stalled(&connection.sending_pool);
  const std::vector<std::uint8_t> striped(kLarge + 1, 7);
  const std::vector<std::uint8_t> whole(kLarge, 8);  // large, and written by the thread that posts it
  std::vector<std::uint8_t> first_room(striped.size());
  std::vector<std::uint8_t> second_room(whole.size());
  Request* sends[2] = {};
  Request* const receives[2] = {connection.receive(first_room), connection.receive(second_room)};
  // In a thread of its own, which has moved nothing yet and hence time left for `whole`.
  std::thread([&] {
    [[maybe_unused]] Status ignored = connection.sender->isend(striped.data(), striped.size(), nullptr, &sends[0]);
    windows.pass_until_back_at(2);
    ignored = connection.sender->isend(whole.data(), whole.size(), nullptr, &sends[1]);
  }).join();
  CHECK_EQ(connection.growth.target(), 2);
  CHECK(sends[0] != nullptr && sends[1] != nullptr);
  stalled.release();
  CHECK_OK(outcome({sends[0], sends[1], receives[0], receives[1]}));
  CHECK(first_room == striped);
  CHECK(second_room == whole);
}

}  // namespace bagua_net

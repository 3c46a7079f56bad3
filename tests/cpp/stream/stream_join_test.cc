// Comms whose streams join while messages are under way: nothing is lost, nothing hangs, and every message arrives in
// its own receive.
#include <fcntl.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "support/cut_connections.h"
#include "support/growing_comms.h"
#include "support/raw_handshake.h"
#include "wire/frames.h"

namespace bagua_net {
namespace {

void streams_join_on_both_ends(int workers, std::size_t first_streams) {
  for (unsigned seed = 1; seed <= check::seeds(3); ++seed) {
    std::mt19937 random(seed);
    constexpr std::size_t kMax = 8;
    GrowingComms connection(workers, first_streams, kMax, kMax);
    std::vector<OwnedFd> nears;
    std::vector<OwnedFd> fars;
    for (std::size_t i = first_streams; i < kMax; ++i) {
      auto [near, far] = tcp_pair();
      connection.watch(far);
      nears.push_back(std::move(near));
      fars.push_back(std::move(far));
      // From here on the sender may use it, as the service promises.
      connection.receiver_arrivals->announce();
    }
    std::shuffle(nears.begin(), nears.end(), random);
    std::shuffle(fars.begin(), fars.end(), random);
    const auto hand_in = [&] {
      if (!nears.empty() && random() % 20 == 0) {
        connection.sender_arrivals->hand_in(std::move(nears.back()));
        nears.pop_back();
      }
      if (!fars.empty() && random() % 20 == 0) {
        connection.receiver_arrivals->hand_in_announced(std::move(fars.back()));
        fars.pop_back();
      }
    };
    const Deadline deadline;
    do {
      deadline.check("traffic on every stream");
      std::vector<std::size_t> sizes;
      for (int i = 0; i < check::rounds(40); ++i)
        sizes.push_back(random() % 3 == 0 ? random() % 200 : random() % (4u << 20));
      connection.exchange(sizes, hand_in);
    } while (connection.used_streams() < kMax);
  }
}

void write_frame(int socket, std::uint64_t number, std::uint8_t value) {
  std::vector<std::uint8_t> frame(kFrameHeaderBytes + 1, value);
  encode_frame_header({1, number, 0, 1}, frame.data());
  CHECK_EQ(::send(socket, frame.data(), frame.size(), MSG_NOSIGNAL), static_cast<ssize_t>(frame.size()));
}

// One message of the size of the room.
void exchange(CommPair& pair, std::vector<std::uint8_t>& room) {
  const std::vector<std::uint8_t> message = make_message(0, room.size());
  Request* const receive = pair.receive(room);
  CHECK_OK(outcome({pair.send(message), receive}));
  CHECK(room == message);
}

struct ReplacingPair : CommPair {
  ReplacingPair() : CommPair(settings()) {}
  static Settings settings() {
    Settings settings = over_tcp(2, 0);
    settings.watched = Watched::kSenders;
    settings.receiving.recovers = true;
    settings.sending.replace_stream = [](Joining, std::size_t) {};
    return settings;
  }
  // The receiver's end of a new connection joins. Returns the other one.
  OwnedFd replace(Joining joining) {
    auto [near, far] = tcp_pair();
    receiver_arrivals->hand_in(std::move(far), joining);
    return std::move(near);
  }
  std::uint64_t lost() const { return receiving_slot->counters.streams_lost.get(); }
};

}  // namespace

TEST_CASE(streams_join_in_mid_traffic_on_one_thread) { streams_join_on_both_ends(0, 1); }

TEST_CASE(streams_join_in_mid_traffic_with_workers) { streams_join_on_both_ends(2, 2); }

TEST_CASE(streams_that_only_the_receiver_takes_in_disturb_nothing) {
  for (const int workers : {0, 2}) {
    GrowingComms connection(workers, 2, 8, 8);
    std::vector<OwnedFd> nears;
    for (int i = 0; i < 4; ++i) {
      auto [near, far] = tcp_pair();
      connection.receiver_arrivals->hand_in(std::move(far));
      nears.push_back(std::move(near));
    }
    connection.exchange({100, 1u << 20, 0, 3u << 20});
    nears.clear();  // and end again, unused
    connection.exchange({100, 1u << 20, 0, 3u << 20});
  }
}

TEST_CASE(a_stream_that_the_sender_uses_before_the_receiver_has_it_waits) {
  GrowingComms connection(0, 1, 2, 2);
  connection.exchange({kLarge});
  connection.receiver_arrivals->announce();
  auto ends = tcp_pair();
  connection.watch(ends.second);
  connection.sender_arrivals->hand_in(std::move(ends.first));
  int rounds = 0;
  // Until the sender has used it: what it carries is missing at the receiver, which goes on waiting.
  const Deadline deadline;
  while (connection.used_streams() < 2) {
    deadline.check("traffic on the second stream");
    connection.exchange(std::vector<std::size_t>(4, 8u << 20), [&] {
      if (++rounds == 200) connection.receiver_arrivals->hand_in_announced(std::move(ends.second));
    });
  }
}

TEST_CASE(a_comm_goes_on_without_an_idle_stream_that_cannot_be_replaced) {
  // By the thread that progresses the streams.
  std::atomic<int> asked_for_first{0};
  std::atomic<int> asked_for_another{0};
  CommPair::Settings settings = ReplacingPair::settings();
  settings.sending.replace_stream = [&](Joining joining, std::size_t) {
    ++(joining == Joining::kReplacesFirst ? asked_for_first : asked_for_another);
  };
  CommPair pair(settings);
  std::vector<std::uint8_t> room(1000);
  exchange(pair, room);
  ::shutdown(pair.watched[1].get(), SHUT_RDWR);
  const Deadline deadline;
  while (asked_for_another == 0) {
    deadline.check("the loss");
    exchange(pair, room);
  }
  CHECK(asked_for_another == 1 && asked_for_first == 0);
  pair.sender_arrivals->report({Joining::kReplaces, "it was refused"});
  for (int again = 0; again < 10; ++again) exchange(pair, room);

  // What a lost stream may not have delivered is sent over a replacement only.
  ::shutdown(pair.watched[0].get(), SHUT_RDWR);
  const std::vector<std::uint8_t> large(8u << 20);
  Request* const last = pair.send(large);
  wait_until([&] { return !is_done(last) && asked_for_first > 0; }, "the loss of the last");
  pair.sender_arrivals->report({Joining::kReplacesFirst, "it was refused"});
  check_names(outcome(last), "could not be opened again: it was refused");
}

// As where the peer's process has no descriptor left just then: the comm was healthy before it moved.
TEST_CASE(a_first_stream_that_moves_back_and_is_not_accepted_is_asked_for_again) {
  struct Answered final : PathProbe {
    State look() override { return State::kAnswered; }
    std::size_t packet_bytes() const override { return 1000; }
  };
  std::atomic<int> asked_for_first{0};
  CommPair::Settings settings = ReplacingPair::settings();
  settings.sending_workers = 1;  // small messages are those of the first stream
  settings.sending.replace_stream = [&](Joining joining, std::size_t) {
    asked_for_first += joining == Joining::kReplacesFirst;
  };
  settings.sending.path_states =
      std::make_shared<PathStates>(0, [](const NicPath&) { return std::make_unique<Answered>(); });
  for (const char* const name : {"near", "far"}) settings.sending.paths.emplace_back().interface.name = name;
  settings.sending.first_paths = settings.sending.own_paths = {0, 1};
  CommPair pair(settings);
  const std::vector<std::uint8_t> message = make_message(0, 1000);
  std::vector<std::uint8_t> room(message.size());
  const auto join = [&](std::size_t path) {
    auto [near, far] = tcp_pair();
    pair.receiver_arrivals->hand_in(std::move(far), Joining::kReplacesFirst);
    pair.sender_arrivals->hand_in(std::move(near), Joining::kReplacesFirst, path);
  };
  const NetworkInterface& near = settings.sending.paths[0].interface;
  settings.sending.path_states->set_link(near, false);
  pair.sender->on_links_changed();
  wait_until([&] { return pair.sender->recover(), asked_for_first == 1; }, "the loss");
  join(1);
  exchange(pair, room);
  settings.sending.path_states->set_link(near, true);
  Request* const receive = pair.receive(room);
  wait_until([&] { return pair.sender->recover(), !is_done(receive) && asked_for_first == 2; }, "the move");
  Request* const send = pair.send(message);
  pair.sender_arrivals->report({Joining::kReplacesFirst, "it was refused"});
  wait_until([&] { return !is_done(receive) && asked_for_first == 3; }, "another request");
  join(0);
  CHECK_OK(outcome({send, receive}));
}

// The sender knows first where a NIC is dead: its kernel says so, and the receiver's hears nothing.
TEST_CASE(a_replacement_has_a_place_though_the_receiver_has_not_noticed_the_loss) {
  CommPair::Settings settings = over_tcp(kMaxStreams, 0);
  settings.watched = CommPair::Watched::kReceivers;
  settings.receiving.recovers = true;
  settings.sending.replace_stream = [](Joining, std::size_t) {};  // or it would fail when a stream of its own ends
  CommPair pair(settings);
  std::vector<std::uint8_t> room(100000);
  exchange(pair, room);
  silence(pair.watched.back().get());
  std::vector<OwnedFd> nears;
  for (int i = 0; i < 2; ++i) {
    auto [near, far] = tcp_pair();
    pair.receiver_arrivals->hand_in(std::move(far), Joining::kReplaces);
    nears.push_back(std::move(near));
  }
  Request* const receive = pair.receive(room);
  write_frame(nears[1].get(), 1, 7);
  CHECK_OK(outcome(receive));
  CHECK_EQ(room[0], 7);
  CHECK_EQ(pair.receiving_slot->counters.streams_lost.get(), 2u);
}

TEST_CASE(a_stream_that_joins_a_failed_comm_is_shut_down) {
  for (const int workers : {0, 2}) {
    GrowingComms connection(workers, 2, 4, 4);
    std::uint8_t byte = 0;
    Request* receive = connection.receive(&byte, 1);
    connection.receiver->fail(Status::remote_error("broken"));
    auto [near, far] = tcp_pair();
    connection.receiver_arrivals->hand_in(std::move(far));
    check_names(outcome(receive), "broken");
    CHECK(has_ended(near.get()));
  }
}

TEST_CASE(a_failure_reaches_streams_that_joined) {
  for (const int workers : {0, 2}) {
    GrowingComms connection(workers, 2, 4, 4);
    connection.join();
    connection.exchange({4u << 20, 4u << 20});
    connection.sender->fail(Status::remote_error("broken"));
    for (const OwnedFd& far : connection.watched) CHECK(has_ended(far.get()));
  }
}

TEST_CASE(a_stream_that_joins_after_deregistration_stopped_the_comm_is_closed) {
  GrowingComms connection(2, 2, 4, 4);
  std::vector<std::uint8_t> room(100);
  MemoryRegistration* registration = nullptr;
  CHECK_OK(connection.receiver->register_memory(room.data(), room.size(), &registration));
  Request* receive = connection.receive(room.data(), room.size(), registration);
  CHECK_OK(connection.receiver->deregister_memory(registration));
  auto [near, far] = tcp_pair();
  write_frame(near.get(), 0, 7);
  connection.receiver_arrivals->hand_in(std::move(far));
  CHECK(!outcome(receive).is_ok());
  CHECK(has_ended(near.get()));
  // A worker that had got the stream would have read the frame by the end of the workers.
  connection.receiver.reset();
  connection.receiving_pool.stop();
  CHECK_EQ(int{room[0]}, 0);
}

TEST_CASE(a_receive_waits_for_an_announced_stream_when_the_others_have_ended) {
  for (const int workers : {0, 2}) {
    GrowingComms connection(workers, 2, 4, 4);
    auto [near, far] = tcp_pair();
    connection.receiver_arrivals->announce();
    connection.sender.reset();  // ends both streams
    std::uint8_t byte = 0;
    Request* receive = connection.receive(&byte, 1);
    for (int i = 0; i < 1000; ++i) CHECK(!is_done(receive));
    write_frame(near.get(), 0, 7);
    connection.receiver_arrivals->hand_in_announced(std::move(far));
    CHECK_OK(outcome(receive));
    CHECK_EQ(int{byte}, 7);
    near.reset();
    // Now nothing more can come.
    CHECK(outcome(connection.receive(&byte, 1)).code() == StatusCode::kRemoteError);
  }
}

TEST_CASE(the_end_of_a_stream_right_behind_a_message_is_noticed) {
  for (const int workers : {0, 2}) {
    GrowingComms connection(workers, 2, 4, 4);
    auto [near, far] = tcp_pair();
    write_frame(near.get(), 0, 7);
    near.reset();
    connection.receiver_arrivals->hand_in(std::move(far));
    std::uint8_t byte = 0;
    CHECK_OK(outcome(connection.receive(&byte, 1)));
    connection.sender.reset();
    CHECK(outcome(connection.receive(&byte, 1)).code() == StatusCode::kRemoteError);
  }
}

TEST_CASE(closing_a_comm_closes_what_it_has_not_taken_in) {
  GrowingComms connection(0, 1, 4, 4);
  auto [near, near_peer] = tcp_pair();
  auto [far, far_peer] = tcp_pair();
  connection.sender_arrivals->hand_in(std::move(near));
  connection.receiver_arrivals->hand_in(std::move(far));
  connection.sender_arrivals.reset();
  connection.receiver_arrivals.reset();
  connection.sender.reset();
  connection.receiver.reset();
  CHECK(has_ended(near_peer.get()));
  CHECK(has_ended(far_peer.get()));
}

// A sender moves its first stream to a shorter path, and the replacement is there before the end of the old one. It is
// lost only in the middle of a chunk.
TEST_CASE(a_first_stream_that_is_replaced_while_nothing_comes_is_not_lost) {
  for (const bool has_begun : {false, true}) {
    ReplacingPair pair;
    std::uint8_t byte = 0;
    Request* receive = pair.receive(&byte, 1);
    std::array<std::uint8_t, kFrameHeaderBytes> header;
    encode_frame_header({1, 0, 0, 1}, header.data());
    if (has_begun) send_bytes(pair.watched[0], header.data(), header.size());
    const OwnedFd near = pair.replace(Joining::kReplacesFirst);
    write_frame(near.get(), 0, 7);
    CHECK_OK(outcome(receive));
    CHECK_EQ(int{byte}, 7);
    CHECK_EQ(pair.lost(), std::uint64_t{has_begun});
  }
}

TEST_CASE(a_replacement_that_is_given_up_before_it_is_used_is_not_lost) {
  ReplacingPair pair;
  std::uint8_t byte = 0;
  Request* receive = pair.receive(&byte, 1);
  ::shutdown(pair.watched[1].get(), SHUT_RDWR);
  const Deadline deadline;
  while (pair.lost() == 0) {
    deadline.check("the loss of the second stream");
    CHECK(!is_done(receive));
  }
  OwnedFd given_up = pair.replace(Joining::kReplaces);
  for (int i = 0; i < 100; ++i) CHECK(!is_done(receive));
  reset_connection(&given_up);
  for (int i = 0; i < 100; ++i) CHECK(!is_done(receive));
  const OwnedFd near = pair.replace(Joining::kReplaces);
  write_frame(near.get(), 0, 7);
  CHECK_OK(outcome(receive));
  CHECK_EQ(pair.lost(), std::uint64_t{1});
}

TEST_CASE(more_streams_than_fit_are_closed) {
  GrowingComms connection(0, 1, 4, 4);
  std::vector<OwnedFd> nears;
  for (int i = 0; i < kMaxStreams; ++i) {
    auto [near, far] = tcp_pair();
    nears.push_back(std::move(near));
    connection.receiver_arrivals->hand_in(std::move(far));
  }
  connection.exchange({100, kLarge});
  CHECK(has_ended(nears.back().get()));
  connection.exchange({100, kLarge});
}

}  // namespace bagua_net

// A stream of a comm with several paths that moves back to its own: it goes on until the next connection is ready, and
// whatever becomes of that one, no comm fails and every byte arrives. The test is in the place of the connection
// service. Whether a path works: path_states_test.cc; when one is returned to: place_paths_test.cc.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "support/comm_pair.h"
#include "support/cut_connections.h"

namespace bagua_net {
namespace {

struct Answered final : PathProbe {
  State look() override { return State::kAnswered; }
  std::size_t packet_bytes() const override { return 1000; }
};

// Of one stream, or several, of which those from place `first` on, `away` of them, began over another path than their
// own.
struct MovingPair {
  std::atomic<Prepared> next{Prepared::kWaiting};
  std::atomic<int> questions{0};
  std::atomic<int> requests{0};
  std::atomic<std::size_t> requested_path{99};
  CommPair pair;
  std::vector<std::uint8_t> message;
  std::vector<std::uint8_t> room;

  explicit MovingPair(int workers, std::size_t streams = 1, std::size_t first = 0, std::size_t away = 1)
      : pair(settings(workers, streams, first, away)) {}

  void look() { pair.sender->recover(); }
  void look_until(const std::function<bool()>& is_due, const char* what) {
    wait_until([&] { return look(), is_due(); }, what);
  }
  void exchange(std::size_t bytes) {
    begin_exchange(bytes);
    finish_exchange();
  }
  void begin_exchange(std::size_t bytes) {
    message = make_message(bytes, bytes);
    room.assign(bytes, 0);
    send_ = pair.send(message);
  }
  void finish_exchange() {
    Request* const receive = pair.receive(room);
    CHECK_OK(outcome({send_, receive}));
    CHECK(room == message);
  }
  // The requested connection is accepted.
  void join() {
    auto [near, far] = tcp_pair();
    pair.receiver_arrivals->hand_in(std::move(far), Joining::kReplacesFirst);
    pair.sender_arrivals->hand_in(std::move(near), Joining::kReplacesFirst, requested_path);
  }
  std::uint64_t lost() const {
    return pair.sending_slot->counters.streams_lost.get() + pair.receiving_slot->counters.streams_lost.get();
  }

 private:
  CommPair::Settings settings(int workers, std::size_t streams, std::size_t first, std::size_t away) {
    CommPair::Settings settings = over_tcp(streams, workers);
    settings.watched = CommPair::Watched::kSenders;
    settings.receiving.recovers = true;
    settings.sending.path_states =
        std::make_shared<PathStates>(0, [](const NicPath&) { return std::make_unique<Answered>(); });
    for (const char* const name : {"its own", "another"}) {
      settings.sending.paths.emplace_back().interface.name = name;
    }
    settings.sending.first_paths.assign(streams, 1);
    settings.sending.own_paths.assign(streams, 1);
    std::fill_n(settings.sending.own_paths.begin() + static_cast<std::ptrdiff_t>(first), away, 0);
    settings.sending.replace_stream = [this](Joining, std::size_t path) {
      requested_path = path;
      ++requests;
    };
    settings.sending.prepare_stream = [=](std::size_t place, std::size_t path) {
      CHECK(place - first < away && path == 0);
      ++questions;
      return next.load();
    };
    return settings;
  }

  Request* send_ = nullptr;
};

constexpr std::size_t kSizes[] = {1000, 300000};

}  // namespace

TEST_CASE(the_only_stream_goes_on_until_its_next_connection_is_ready) {
  for (const int workers : {0, 2}) {
    MovingPair comm(workers);
    const int asked = comm.questions;
    comm.look_until([&] { return comm.questions > asked + 20; }, "questions");
    for (const std::size_t bytes : kSizes) comm.exchange(bytes);
    CHECK_EQ(comm.requests, 0);
    comm.next = Prepared::kReady;
    comm.look_until([&] { return comm.requests == 1; }, "the move");
    CHECK_EQ(comm.requested_path, std::size_t{0});
    comm.join();
    for (const std::size_t bytes : kSizes) comm.exchange(bytes);
    CHECK_EQ(comm.requests, 1);
    CHECK_EQ(comm.lost(), std::uint64_t{0});
  }
}

// The peer has no descriptors left, or a firewall answers in its place.
TEST_CASE(the_only_stream_goes_on_if_its_next_connection_is_refused) {
  MovingPair comm(0);
  comm.next = Prepared::kFailed;
  comm.look_until(
      [&] {
        comm.exchange(1000);
        return comm.questions == 2;  // after a pause
      },
      "another question");
  CHECK_EQ(comm.requests, 0);
  CHECK_EQ(comm.lost(), std::uint64_t{0});
}

// The receiver is late: what the stream carries is not acknowledged, so it cannot end.
TEST_CASE(a_stream_that_has_not_left_stays_if_its_next_connection_is_gone) {
  for (const int workers : {0, 2}) {
    MovingPair comm(workers);
    comm.begin_exchange(300000);
    comm.next = Prepared::kReady;
    comm.look_until([&] { return comm.questions > 1; }, "the beginning of the move");
    comm.next = Prepared::kWaiting;
    const int asked = comm.questions;
    comm.look_until([&] { return comm.questions > asked; }, "the end of the move");
    comm.finish_exchange();
    for (const std::size_t bytes : kSizes) comm.exchange(bytes);
    CHECK_EQ(comm.requests, 0);
    // And later it moves.
    comm.next = Prepared::kReady;
    comm.look_until([&] { return comm.requests == 1; }, "the move");
    comm.join();
    comm.exchange(1000);
    CHECK_EQ(comm.lost(), std::uint64_t{0});
  }
}

TEST_CASE(a_stream_that_is_lost_while_it_leaves_goes_over_its_next_connection) {
  for (const int workers : {0, 2}) {
    MovingPair comm(workers);
    comm.begin_exchange(300000);
    comm.next = Prepared::kReady;
    comm.look_until([&] { return comm.questions > 1; }, "the beginning of the move");
    cut(comm.pair.watched[0].get(), Cut::kReset);
    comm.look_until([&] { return comm.requests == 1; }, "the loss");
    CHECK_EQ(comm.requested_path, std::size_t{0});
    comm.join();
    comm.finish_exchange();
    comm.exchange(1000);
    CHECK_EQ(comm.requests, 1);
  }
}

TEST_CASE(a_comm_may_be_closed_while_its_stream_leaves) {
  for (const Prepared last : {Prepared::kWaiting, Prepared::kReady}) {
    MovingPair comm(0);
    comm.exchange(1000);
    comm.next = last;
    comm.look_until([&] { return comm.questions > 1; }, "the beginning of the move");
    comm.pair.sender.reset();
    comm.pair.receiver.reset();
  }
}

// Their paths are shorter: the peer has the proofs before the ends of the streams.
TEST_CASE(streams_in_half_of_all_places_may_move_at_once_and_the_peer_loses_none) {
  constexpr std::size_t kMoving = kMaxStreams / 2 - 1;  // all but the first one, whose place is kept for it
  MovingPair comm(0, kMoving + 1, 1, kMoving);
  std::vector<OwnedFd> next;
  for (std::size_t stream = 0; stream < kMoving; ++stream) {
    auto [near, far] = tcp_pair();
    comm.pair.receiver_arrivals->hand_in(std::move(far), Joining::kReplaces);
    next.push_back(std::move(near));
  }
  comm.pair.receiver->recover();
  comm.next = Prepared::kReady;
  comm.look_until([&] { return comm.requests == static_cast<int>(kMoving); }, "the moves");
  CHECK(comm.questions >= static_cast<int>(kMoving));
  for (OwnedFd& near : next) {
    comm.pair.sender_arrivals->hand_in(std::move(near), Joining::kReplaces, comm.requested_path);
  }
  for (const std::size_t bytes : kSizes) comm.exchange(bytes);
  CHECK_EQ(comm.lost(), std::uint64_t{0});
}

// The peer would put them in the places of other streams.
TEST_CASE(streams_in_more_places_end_before_their_next_connections_begin) {
  for (const std::size_t streams : {kMaxStreams / 2 + 1, kMaxStreams}) {
    MovingPair comm(0, streams);
    comm.look_until([&] { return comm.requests == 1; }, "the move");
    CHECK_EQ(comm.questions, 0);
    comm.join();
    comm.exchange(1000);
    CHECK_EQ(comm.lost(), std::uint64_t{0});
  }
}

}  // namespace bagua_net

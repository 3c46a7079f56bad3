// Connections are cut while messages are under way, again and again: every message arrives whole, once, in its receive.
// Long run: BAGUA_TEST_FAULTS=<number of cuts> connection_loss_test random_cuts_0_0 (and the others of that name).
#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "support/byte_patterns.h"
#include "support/context_pair.h"
#include "support/cut_connections.h"
#include "support/traffic.h"

namespace bagua_net {
namespace {

std::size_t random_size(std::mt19937& random) {
  switch (random() % 6) {
    case 0: return 0;
    case 1: return random() % 2000;
    case 2: return random() % 70000;
    case 3: return random() % (1u << 20);
    case 4: return random() % (2u << 20);
    default: return random() % (8u << 20);
  }
}

std::vector<std::size_t> random_sizes(std::mt19937& random, std::size_t count) {
  std::vector<std::size_t> sizes(count);
  for (std::size_t& size : sizes) size = random_size(random);
  return sizes;
}

// Receives lag behind, by a few messages.
Traffic traffic_of(const ContextPair& pair, unsigned seed) {
  return {*pair.sender, *pair.receiver, {0, 4, 1, seed, 12}};
}

void random_cuts(int sending_workers, int receiving_workers, int streams) {
  const auto seed = static_cast<unsigned>(100 * sending_workers + 10 * receiving_workers + streams);
  std::mt19937 random(seed);
  ContextPair pair(recovering(sending_workers, streams), recovering(receiving_workers, streams));
  Traffic traffic = traffic_of(pair, seed);
  const std::uint64_t faults = fault_count(40);
  std::uint64_t cuts = 0;
  std::int64_t next_us = 0;
  while (cuts < faults) {
    traffic.run(random_sizes(random, 10), [&] {
      const std::int64_t now_us = monotonic_us();
      if (now_us < next_us || cuts >= faults) return;
      cuts += static_cast<std::uint64_t>(cut_some(random, 2 * static_cast<std::size_t>(streams)));
      next_us = now_us + static_cast<std::int64_t>(random() % (random() % 3 == 0 ? 1000 : 30000));
    });
  }
  traffic.run(random_sizes(random, 10));
  std::printf("        %llu cuts, %zu messages\n", static_cast<unsigned long long>(cuts), traffic.messages());
}

}  // namespace

TEST_CASE(without_faults) {
  for (const int workers : {0, 2}) {
    ContextPair pair(recovering(workers), recovering(workers));
    std::mt19937 random(1);
    traffic_of(pair, 1).run(random_sizes(random, 60));
  }
}

TEST_CASE(random_cuts_without_workers) { random_cuts(0, 0, 4); }

TEST_CASE(random_cuts_with_workers) { random_cuts(2, 2, 4); }

TEST_CASE(random_cuts_with_workers_of_the_sender) { random_cuts(2, 0, 3); }

TEST_CASE(random_cuts_with_workers_of_the_receiver) { random_cuts(0, 2, 3); }

TEST_CASE(random_cuts_of_a_single_stream) { random_cuts(0, 0, 1); }

TEST_CASE(random_cuts_of_a_single_stream_with_workers) { random_cuts(2, 2, 1); }

// The sender waits for an answer on another comm, say: its message was done as soon as it was written.
TEST_CASE(a_small_message_comes_again_though_its_sender_does_not_call) {
  for (const int workers : {0, 2}) {
    for (const Cut how : {Cut::kReset, Cut::kEnd}) {
      ContextPair pair(recovering(workers), recovering(workers));
      const std::vector<std::uint8_t> message = make_message(0, 1000);
      std::vector<std::uint8_t> room(1000);
      Request* send = pair.send(message);
      CHECK_OK(outcome(send));
      cut_all(how);
      CHECK_OK(outcome(pair.receive(room)));
      CHECK(room == message);
    }
  }
}

// The receiver has the message, and the sender does not know.
TEST_CASE(a_send_finishes_though_its_receiver_does_not_call) {
  for (const int workers : {0, 2}) {
    ContextPair pair(recovering(workers), recovering(workers));
    const std::vector<std::uint8_t> message = make_message(0, 300000);
    std::vector<std::uint8_t> room(message.size());
    Request* receive = pair.receive(room);
    Request* send = pair.send(message);
    bool sent = false;
    wait_until(
        [&] {
          if (is_done(receive)) return true;
          if (!sent) sent = is_done(send);
          return false;
        },
        "the receive");
    cut_all(Cut::kReset);
    if (!sent) CHECK_OK(outcome(send));
    CHECK(room == message);
  }
}

TEST_CASE(a_stream_that_is_cut_silently_is_replaced) {
  for (const int workers : {0, 2}) {
    PluginConfig config = recovering(workers, workers == 0 ? 1 : 4);
    config.keepalive_s = 3;
    ContextPair pair(config, config);
    std::vector<std::uint8_t> room(4u << 20);
    const std::vector<std::uint8_t> message = make_message(0, room.size());
    for (const int fd : open_connections()) silence(fd);
    Request* send = pair.send(message);
    Request* receive = pair.receive(room);
    CHECK_OK(outcome({send, receive}));
    CHECK(room == message);
  }
}

TEST_CASE(closing_delivers_what_was_lost_before) {
  for (const int workers : {0, 2}) {
    ContextPair pair(recovering(workers), recovering(workers));
    const std::vector<std::uint8_t> message = make_message(0, 1000);
    std::vector<std::uint8_t> room(1000);
    CHECK_OK(outcome(pair.send(message)));
    cut_all(Cut::kReset);
    pair.close_sender();
    CHECK_OK(outcome(pair.receive(room)));
    CHECK(room == message);
  }
}

TEST_CASE(a_peer_that_has_closed_its_comm_is_not_waited_for) {
  for (const int workers : {0, 2}) {
    ContextPair pair(recovering(workers), recovering(workers));
    std::vector<std::uint8_t> room(1000);
    Request* receive = pair.receive(room);
    pair.close_sender();
    check_names(outcome(receive), "the peer closed the connection while this rank waits for message 0");
    ContextPair other(recovering(workers), recovering(workers));
    const std::vector<std::uint8_t> message = make_message(0, 8u << 20);
    Request* send = other.send(message);
    other.close_receiver();
    check_names(outcome(send), "the peer closed the connection before");
  }
}

TEST_CASE(without_recovery_a_lost_connection_is_an_error) {
  PluginConfig off = recovering(0);
  off.recovery = Recovery::kOff;
  for (const bool sender : {false, true}) {
    ContextPair pair(sender ? off : recovering(0), sender ? recovering(0) : off);
    std::vector<std::uint8_t> room(1000);
    Request* receive = pair.receive(room);
    cut_all(Cut::kReset);
    CHECK(outcome(receive).code() == StatusCode::kRemoteError);
  }
}

}  // namespace bagua_net

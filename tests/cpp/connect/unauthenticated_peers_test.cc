// What unauthenticated peers at the listening port cost: bounded turns, and log lines that do not grow with their
// number.
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "base/log_sink.h"
#include "base/monotonic_clock.h"
#include "os/epoll_poller.h"
#include "support/check.h"
#include "support/comm_parts.h"
#include "support/loopback.h"
#include "support/process_limits.h"
#include "support/raw_handshake.h"
#include "transport/connect/inbound_handshakes.h"
#include "wire/connect_handle.h"
#include "wire/handshake_message.h"

namespace bagua_net {
namespace {

constexpr int kPeers = 100;

// The listening side, driven by the test.
struct Listening {
  HandshakeSettings settings;
  EpollPoller poller;
  HandshakeLoop loop{&poller};
  InboundHandshakes inbound{settings, &loop};
  RandomId id{};
  HandshakeKey key{};
  SocketAddress address;
  std::vector<OwnedFd> peers;

  Listening() {
    CHECK_OK(poller.open());
    std::array<std::uint8_t, 128> handle{};
    CHECK_OK(inbound.listen({loopback()}, handle.data(), &id));
    ConnectHandle decoded;
    CHECK_OK(decode_connect_handle(handle.data(), &decoded));
    key = *handshake_key(decoded.token);
    address = loopback().address;
    address.set_port(decoded.port);
  }
  void come(const void* bytes, std::size_t count) {
    peers.push_back(connect_to(address));
    send_bytes(peers.back(), bytes, count);
  }
  // A peer that knows the token, and stays.
  Reply shake_hands(const Hello& hello) {
    peers.push_back(connect_to(address));
    Said said = say_hello(peers.back(), hello);
    turn_until_readable(peers.back());
    Reply reply;
    if (!read_challenge(peers.back(), &said, &reply)) return reply;
    prove(peers.back(), key, said);
    turn_until_readable(peers.back());
    return read_reply(peers.back(), key, said);
  }
  void turn_until_readable(const OwnedFd& peer) {
    const Deadline deadline;
    pollfd state{peer.get(), POLLIN, 0};
    while (::poll(&state, 1, 0) == 0) {
      deadline.check("an answer");
      turn();
    }
  }
  // One turn of the connection thread.
  void turn() {
    std::vector<EpollPoller::Event> events;
    poller.wait(1000, &events);
    for (const EpollPoller::Event& event : events) inbound.handle_event(event.id);
  }
  int sent_away() const {
    int count = 0;
    for (const OwnedFd& peer : peers) {
      pollfd state{peer.get(), POLLRDHUP, 0};
      count += ::poll(&state, 1, 0);
    }
    return count;
  }
};

// A peer that is about to bring four streams, of which the first has come.
void begin_to_join(Listening& listening) {
  Hello hello;
  hello.listen_id = listening.id;
  hello.streams_wanted = 4;
  hello.max_chunk_bytes = 65536;
  hello.host_name = "node7";
  CHECK_EQ(listening.shake_hands(hello).streams, 4u);
}

Status accept(Listening& listening) {
  bool ready = false;
  EstablishedConnection connection;
  listening.loop.asked_ms = listening.loop.look();
  const Status status = listening.inbound.accept(listening.id, &ready, &connection);
  CHECK(!ready);
  return status;
}

bool names(const Status& status, const std::string& part) { return status.message().find(part) != std::string::npos; }

}  // namespace

TEST_CASE(a_peer_that_leaves_while_its_streams_join_is_named_at_once) {
  Listening listening;
  begin_to_join(listening);
  CHECK_OK(accept(listening));
  listening.peers.clear();
  const Status status = accept(listening);
  CHECK(status.code() == StatusCode::kRemoteError);
  CHECK(names(status, "node7"));
  CHECK(!accept(listening).is_ok());
}

// While this process was stopped. Of a comm whose places are all taken, they would take those of healthy streams.
TEST_CASE(joining_connections_that_were_given_up_before_their_proof_was_read_do_not_join) {
  Listening listening;
  Hello hello = hello_to(listening.id);
  CHECK(listening.shake_hands(hello).verdict == HandshakeVerdict::kAccepted);
  bool ready = false;
  EstablishedConnection connection;
  CHECK_OK(listening.inbound.accept(listening.id, &ready, &connection));
  CHECK(ready);
  for (const std::uint16_t index : {kJoiningStream, kReplacingStream, kReplacingFirstStream}) {
    for (const bool resets : {false, true}) {
      hello.stream_index = index;
      OwnedFd peer = connect_to(listening.address);
      Said said = say_hello(peer, hello);
      listening.turn_until_readable(peer);
      Reply reply;
      CHECK(read_challenge(peer, &said, &reply));
      prove(peer, listening.key, said);
      resets ? reset_connection(&peer) : peer.reset();
      while (listening.inbound.next_deadline_ms() != std::numeric_limits<std::int64_t>::max()) listening.turn();
      CHECK(!connection.arrivals->any());
    }
  }
}

// A deadline that is over at once, for only its end is of interest: the test above accepts before it. A slow machine
// reports it later, with the same words.
TEST_CASE(a_peer_whose_streams_do_not_all_join_is_named_at_the_deadline) {
  Listening listening;
  listening.settings.connect_timeout_ms = 1;
  begin_to_join(listening);
  Status status;
  wait_until(
      [&] {
        ::usleep(1000);
        status = accept(listening);
        return !status.is_ok();
      },
      "the deadline");
  CHECK(names(status, "only 1 of 4 data streams of"));
  CHECK(names(status, "node7"));
}

// A rank may be late for an hour, while another waits for it and a port scanner comes along.
TEST_CASE(an_accept_waits_for_its_peer_and_says_so) {
  Listening listening;
  listening.settings.connect_timeout_ms = 1;
  StallReport stalls(1000, 5);
  listening.settings.stalls = &stalls;
  CHECK_OK(accept(listening));
  listening.come("GET /", 5);
  Hello hello;
  hello.listen_id = listening.id;
  std::array<std::uint8_t, kHelloBytes> bytes;
  encode_hello(hello, bytes.data());
  listening.come(bytes.data(), bytes.size());  // as one that reads the network, and does not know the token
  while (listening.sent_away() < 1) listening.turn();
  std::vector<RareLog::Line> lines;
  wait_until(
      [&] {
        ::usleep(1000);
        CHECK_OK(accept(listening));
        listening.inbound.expire(monotonic_ms());
        for (RareLog::Line& line : listening.loop.log.take()) {
          if (line.text.find("has waited") != std::string::npos) lines.push_back(std::move(line));
        }
        return !lines.empty();
      },
      "the line");
  for (const char* part : {"rank 5", "(lo)"}) CHECK(lines[0].text.find(part) != std::string::npos);
  CHECK(lines[0].text.find(listening.address.to_string()) != std::string::npos);
  // With its first stream the peer has a deadline.
  begin_to_join(listening);
  wait_until([&] { return !accept(listening).is_ok(); }, "the deadline");
}

TEST_CASE(unauthenticated_peers_leave_files_to_the_application) {
  std::optional<DescriptorLimit> few(320);
  Listening listening;
  few.reset();
  for (int i = 0; i < kPeers; ++i) listening.come("BNH", 3);
  while (listening.sent_away() < kPeers - 320 / 8) listening.turn();
  listening.turn();  // and no more
  CHECK_EQ(listening.sent_away(), kPeers - 320 / 8);
}

// A byte now and then does not extend the time that it has.
TEST_CASE(a_slow_peer_is_held_until_its_deadline_and_no_longer) {
  Listening listening;
  listening.come("BNH", 3);
  listening.turn();
  const std::int64_t end_ms = listening.inbound.next_deadline_ms();
  send_bytes(listening.peers[0], "E", 1);
  listening.turn();
  listening.inbound.expire(end_ms - 1);
  CHECK_EQ(listening.sent_away(), 0);
  listening.inbound.expire(end_ms);
  CHECK(has_ended(listening.peers[0].get()));
}

TEST_CASE(a_peer_of_another_version_is_told_ours_at_once) {
  Listening listening;
  std::array<std::uint8_t, kHelloBytes> bytes;
  encode_hello({}, bytes.data());
  bytes[8] = 77;
  listening.come(bytes.data(), bytes.size());
  listening.turn_until_readable(listening.peers[0]);
  const Reply reply = read_reply(listening.peers[0], listening.key, {});
  CHECK(reply.verdict == HandshakeVerdict::kWrongVersion);
  CHECK_EQ(reply.protocol_version, kProtocolVersion);
}

TEST_CASE(a_turn_ends_however_many_peers_come) {
  Listening listening;
  for (int i = 0; i < kPeers; ++i) listening.come("GET /", 5);
  listening.turn();
  const int first = listening.sent_away();
  CHECK(first > 0 && first < kPeers / 2);
  while (listening.sent_away() < kPeers) listening.turn();
}

TEST_CASE(unauthenticated_peers_of_one_kind_are_one_line) {
  Listening listening;
  Hello hello;
  hello.host_name = "elsewhere";
  std::array<std::uint8_t, kHelloBytes> bytes;
  encode_hello(hello, bytes.data());
  for (int i = 0; i < kPeers; ++i) {
    listening.come("GET /", 5);
    listening.come(bytes.data(), bytes.size());
  }
  while (listening.sent_away() < 2 * kPeers) listening.turn();
  const std::vector<RareLog::Line> lines = listening.loop.log.take();
  CHECK_EQ(lines.size(), std::size_t{2});
  CHECK(lines[0].level == LogLevel::kInfo);
  CHECK(lines[0].text.find("does not speak its protocol") != std::string::npos);
  CHECK(lines[1].level == LogLevel::kWarn);
  CHECK(lines[1].text.find("elsewhere") != std::string::npos);
}

TEST_CASE(a_later_line_tells_how_many_were_left_out) {
  RareLog log;
  const auto say = [&log](LogLevel level, const char* kind, std::int64_t now_ms) {
    if (log.is_due(level, kind, now_ms)) log.add(level, kind, std::string(kind) + " at " + std::to_string(now_ms));
  };
  for (std::int64_t ms = 1000000; ms < 1010000; ms += 100) say(LogLevel::kWarn, "a", ms);
  say(LogLevel::kInfo, "a", 1000001);
  say(LogLevel::kWarn, "b", 1000002);
  std::vector<RareLog::Line> lines = log.take();
  CHECK_EQ(lines.size(), std::size_t{3});
  CHECK_EQ(lines[0].text, "a at 1000000");
  CHECK(log.take().empty());
  say(LogLevel::kWarn, "a", 1010000);
  say(LogLevel::kWarn, "b", 1020000);
  lines = log.take();
  CHECK_EQ(lines.size(), std::size_t{2});
  CHECK_EQ(lines[0].text, "a at 1010000 (and 99 more of this kind since the last such line)");
  CHECK_EQ(lines[1].text, "b at 1020000");
}

}  // namespace bagua_net

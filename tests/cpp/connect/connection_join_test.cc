// ConnectionService on the loopback interface: streams that join an established connection.
#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/log_sink.h"
#include "support/check.h"
#include "support/connection_ends.h"
#include "support/cut_connections.h"
#include "transport/comm/recv_comm.h"
#include "transport/comm/send_comm.h"
#include "wire/handshake_message.h"

namespace bagua_net {
namespace {

// A listening and a connecting process in one, and a connection of theirs. On one host the service offers no further
// streams by itself, so the test keeps the arrivals of the connecting side.
struct Processes {
  ListeningService listening;
  ConnectingService connecting;
  EstablishedConnection accepted;
  EstablishedConnection& connected = connecting.connection;
  std::shared_ptr<StreamArrivals> connected_arrivals = std::make_shared<StreamArrivals>();

  explicit Processes(std::optional<int> listeners_streams = {})
      : listening(settings_with(listeners_streams)),
        connecting(listening.handle_bytes.data(), settings_with({})),
        accepted(listening.accept_from(&connecting)) {
    listening.service.stop_listening(listening.id);
  }

  JoinTicket ticket() const { return connected.ticket; }
  // To somebody else who listens.
  JoinTicket ticket_to(const RawListener& other) const {
    JoinTicket ticket = connected.ticket;
    ticket.paths[0].address = other.address;
    return ticket;
  }
  void join(const JoinTicket& ticket, int count) { connecting.service.join(ticket, count, connected_arrivals); }
};

// The listener never answers: the connector has said hello, and waits.
OwnedFd greeted(const RawListener& silent) {
  OwnedFd accepted = silent.next();
  Hello hello;
  read_hello(accepted, &hello);
  return accepted;
}

std::vector<KeyedSocket> take(StreamArrivals& arrivals, std::size_t count) {
  std::vector<KeyedSocket> taken;
  wait_until(
      [&] {
        for (StreamArrivals::Arrival& arrival : arrivals.take()) taken.push_back(std::move(arrival.socket));
        return taken.size() >= count;
      },
      "streams that join");
  CHECK_EQ(taken.size(), count);
  return taken;
}

void write_byte(const OwnedFd& socket, std::uint8_t value) {
  CHECK_EQ(::send(socket.get(), &value, 1, MSG_NOSIGNAL), 1);
}

std::vector<std::uint8_t> read_all(const OwnedFd& socket) {
  std::vector<std::uint8_t> bytes;
  std::uint8_t byte = 0;
  while (::recv(socket.get(), &byte, 1, MSG_DONTWAIT) == 1) bytes.push_back(byte);
  return bytes;
}

// Each socket of one side is joined to exactly one of the other.
void check_paired(const std::vector<KeyedSocket>& writing, const std::vector<KeyedSocket>& reading) {
  CHECK_EQ(writing.size(), reading.size());
  for (std::size_t i = 0; i < writing.size(); ++i) write_byte(writing[i], static_cast<std::uint8_t>(i));
  std::vector<std::uint8_t> read;
  for (const OwnedFd& socket : reading) {
    pollfd readable{socket.get(), POLLIN, 0};
    CHECK_EQ(::poll(&readable, 1, static_cast<int>(kDeadlineMs)), 1);
    const std::vector<std::uint8_t> bytes = read_all(socket);
    CHECK_EQ(bytes.size(), 1u);
    read.push_back(bytes[0]);
  }
  std::sort(read.begin(), read.end());
  for (std::size_t i = 0; i < read.size(); ++i) CHECK_EQ(std::size_t{read[i]}, i);
}

Hello joining(const JoinTicket& ticket) {
  Hello hello = ticket.hello;
  hello.stream_index = kJoiningStream;
  return hello;
}

// What the listener answers to a hello.
HandshakeVerdict verdict_on(const JoinTicket& ticket, const Hello& hello) {
  return shake_hands(connect_to(ticket.paths[0].address), *ticket.key, hello).verdict;
}

void check_refused(Processes& processes, const JoinTicket& ticket, const Hello& hello,
                   HandshakeVerdict verdict = HandshakeVerdict::kUnknownStream) {
  CHECK(verdict_on(ticket, hello) == verdict);
  if (processes.accepted.arrivals != nullptr) CHECK(!processes.accepted.arrivals->any());
  check_paired(processes.connected.sockets, processes.accepted.sockets);
}

}  // namespace

TEST_CASE(both_ends_know_that_they_are_on_one_host) {
  Processes processes;
  CHECK(processes.connected.same_host);
  CHECK(processes.accepted.same_host);
  // So all workers receive, and not the few that serve connections between hosts.
  WorkerPool pool(6, 50, any_cpu(), 2);
  std::unique_ptr<RecvComm> comm;
  CHECK_OK(RecvComm::create(std::move(processes.accepted), {}, &pool, &comm));
  const auto lane = [&](PeerLocation location) { return pool.open_lane(Direction::kReceive, location, 1).first; };
  CHECK_EQ(lane(PeerLocation::kWithinHost), std::size_t{1 + 6 / 2});
  CHECK_EQ(lane(PeerLocation::kBetweenHosts), std::size_t{2 / 2});
  comm.reset();
  pool.stop();
}

TEST_CASE(a_connection_has_the_turn_in_which_it_was_begun_not_the_one_in_which_it_ended) {
  ListeningService listening;
  HandleBytes handles[] = {listening.handle_bytes, {}};
  RandomId ids[] = {listening.id, {}};
  CHECK_OK(listening.service.listen({loopback()}, handles[1].data(), &ids[1]));
  ConnectionService connecting(settings_with(1));
  CHECK_OK(connecting.start());
  bool ready = false;
  EstablishedConnection connection;
  CHECK_OK(connecting.connect({loopback()}, handles[0].data(), &ready, &connection));
  for (const std::size_t turn : {1, 0}) {
    wait_until(
        [&] {
          CHECK_OK(connecting.connect({loopback()}, handles[turn].data(), &ready, &connection));
          return ready;
        },
        "the connection");
    CHECK_EQ(connection.turn, turn);
    wait_until([&] { return listening.accept(&connection, ids[turn]); }, "the same at the other end");
    CHECK_EQ(connection.turn, turn);
  }
}

TEST_CASE(streams_join_again_and_again_up_to_the_most) {
  Processes processes;
  const std::size_t first = processes.connected.sockets.size();
  std::vector<KeyedSocket> near;
  std::vector<KeyedSocket> far;
  while (first + near.size() < kMaxStreams) {
    const std::size_t count = std::min<std::size_t>(20, kMaxStreams - first - near.size());
    processes.join(processes.ticket(), static_cast<int>(count));
    for (OwnedFd& socket : take(*processes.connected_arrivals, count)) near.push_back(std::move(socket));
    for (OwnedFd& socket : take(*processes.accepted.arrivals, count)) far.push_back(std::move(socket));
    processes.accepted.arrivals->set_streams(static_cast<int>(first + far.size()));
  }
  check_paired(near, far);
  check_refused(processes, processes.ticket(), joining(processes.ticket()));
}

namespace {

HandshakeKeyRef another(HandshakeKey key) {
  key[3] ^= 1;
  return std::make_shared<const HandshakeKey>(key);
}

}  // namespace

TEST_CASE(a_join_that_fits_no_comm_is_refused) {
  Processes processes;
  Processes others;
  const JoinTicket ticket = processes.ticket();
  JoinTicket wrong = ticket;
  wrong.key = another(*wrong.key);
  check_refused(processes, wrong, joining(wrong), HandshakeVerdict::kWrongProof);
  Hello hello = joining(ticket);
  hello.comm_id[7] ^= 1;
  check_refused(processes, ticket, hello);
  hello = joining(ticket);
  hello.listen_id = others.ticket().hello.listen_id;
  check_refused(processes, ticket, hello);
  processes.accepted.arrivals.reset();  // the comm is closed
  check_refused(processes, ticket, joining(ticket));
}

TEST_CASE(a_refused_join_brings_nothing_and_ends) {
  Processes processes;
  JoinTicket wrong = processes.ticket();
  wrong.key = another(*wrong.key);
  processes.join(wrong, 3);
  // The one that follows is answered after it, and its streams are the only ones that come.
  processes.join(processes.ticket(), 2);
  check_paired(take(*processes.connected_arrivals, 2), take(*processes.accepted.arrivals, 2));
  CHECK(!processes.accepted.arrivals->any());
}

TEST_CASE(more_streams_than_the_listener_allows_are_refused) {
  Processes processes(2);
  CHECK_EQ(processes.connected.sockets.size() <= 2, true);
  const std::size_t left = 2 - processes.connected.sockets.size();
  processes.join(processes.ticket(), static_cast<int>(left));
  check_paired(take(*processes.connected_arrivals, left), take(*processes.accepted.arrivals, left));
  processes.accepted.arrivals->set_streams(2);
  check_refused(processes, processes.ticket(), joining(processes.ticket()));
}

TEST_CASE(a_join_under_way_does_not_keep_the_service) {
  Processes processes;
  const RawListener silent;
  processes.join(processes.ticket_to(silent), 3);
  CHECK(processes.connecting.service.is_idle());
  const OwnedFd accepted = greeted(silent);
  // The comm goes; the next time the service looks, so does its join.
  processes.connected_arrivals = std::make_shared<StreamArrivals>();
  processes.join(processes.ticket(), 1);
  take(*processes.connected_arrivals, 1);
  CHECK(has_ended(accepted.get()));
}

TEST_CASE(the_end_of_a_service_closes_the_joins_under_way) {
  const RawListener silent;
  OwnedFd accepted;
  {
    Processes processes;
    processes.join(processes.ticket_to(silent), 1);
    accepted = greeted(silent);
    for (int i = 0; i < 20; ++i) processes.join(processes.ticket(), 2);  // in whatever state the end finds them
  }
  CHECK(has_ended(accepted.get()));
}

TEST_CASE(a_join_whose_listener_is_gone_is_given_up_with_the_comm) {
  Processes processes;
  // A port where nobody listens: every attempt is refused, and tried again.
  processes.join(processes.ticket_to(RawListener()), 3);
  processes.join(processes.ticket(), 1);
  check_paired(take(*processes.connected_arrivals, 1), take(*processes.accepted.arrivals, 1));
  CHECK(processes.connecting.service.is_idle());
}

// A sender that is done closes its comm while a stream is about to join: the reply meets a closed socket, and the
// kernel resets the connection. What the sender wrote on the others must still arrive.
TEST_CASE(a_join_that_is_given_up_does_not_harm_the_receiver) {
  Processes processes;
  const JoinTicket ticket = processes.ticket();
  {
    const OwnedFd given_up = connect_to(ticket.paths[0].address);
    Said said = say_hello(given_up, joining(ticket));
    Reply reply;
    CHECK(read_challenge(given_up, &said, &reply));
    prove(given_up, *ticket.key, said);
    std::array<std::uint8_t, 1> first;
    CHECK_EQ(::recv(given_up.get(), first.data(), 1, MSG_PEEK), 1);  // the reply is here, and stays unread
  }
  std::vector<KeyedSocket> joined = take(*processes.accepted.arrivals, 1);
  processes.accepted.arrivals->hand_in(std::move(joined[0]));  // where it is now for certain
  WorkerPool no_workers(0, 0, any_cpu());
  std::unique_ptr<SendComm> sender;
  std::unique_ptr<RecvComm> receiver;
  CHECK_OK(SendComm::create(std::move(processes.connected), {}, &no_workers, &sender));
  CHECK_OK(RecvComm::create(std::move(processes.accepted), {}, &no_workers, &receiver));
  const std::array<std::uint8_t, 3> sent{7, 8, 9};
  for (const std::uint8_t& byte : sent) {
    Request* send = nullptr;
    CHECK_OK(sender->isend(&byte, 1, nullptr, &send));
  }
  sender.reset();
  for (const std::uint8_t& byte : sent) {
    std::uint8_t received = 0;
    Request* receive = nullptr;
    CHECK_OK(receiver->irecv(&received, 1, nullptr, &receive));
    CHECK_OK(outcome(receive));
    CHECK_EQ(int{received}, int{byte});
  }
}

// NCCL's logger may block, or call back; then no handshake may wait for it.
TEST_CASE(nothing_is_logged_while_handshakes_wait) {
  static std::atomic<ConnectionService*> logging{nullptr};
  static std::atomic<int> lines{0};
  static std::atomic<int> lines_without_lock{0};
  Processes processes;
  logging = &processes.connecting.service;
  set_log_function([](LogLevel, const char*, int, const char*) {
    std::atomic<bool> is_free{false};
    std::thread caller([&] {
      static_cast<void>(logging.load()->is_idle());
      is_free = true;
    });
    // Only a lock that is held here reaches the deadline, and not a busy machine on which the caller has no turn.
    const std::int64_t end_ms = monotonic_ms() + kDeadlineMs;
    while (!is_free && monotonic_ms() < end_ms) sched_yield();
    if (is_free) lines_without_lock.fetch_add(1);
    lines.fetch_add(1);
    caller.detach();
  });
  JoinTicket wrong = processes.ticket();
  wrong.hello.comm_id[0] ^= 1;
  processes.join(wrong, 1);
  wait_until([] { return lines > 0; }, "the line");
  set_log_function(nullptr);
  CHECK_EQ(lines_without_lock.load(), lines.load());
}

}  // namespace bagua_net

// Whoever is on the way flips bits of an exchange, ends it, or replays a recorded one to either end: a named error or
// recovery, never wrong data, never a hang. What else may be done to bytes and records: sealed_stream_test.cc.
#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "support/connection_ends.h"
#include "support/relayed_pair.h"
#include "support/test_clock.h"
#include "transport/stream/sealed_byte_stream.h"
#include "wire/frames.h"
#include "wire/sealed_handshake.h"

namespace bagua_net {
namespace {

using Bytes = WireRelay::Bytes;
using Recording = std::array<Bytes, 2>;  // of a connection: forth, back

enum class Deed {
  kFlip,
  kCut,  // with a reset
  kEnd,  // in order, in the middle
};

struct Plan {
  Deed deed = Deed::kFlip;
  bool forth = true;
  std::size_t offset = 0;
};

// Does what is planned, one deed per connection.
class Attacker {
 public:
  Attacker(unsigned seed, std::vector<Plan> plans) : random_(seed), plans_(std::move(plans)) {}

  WireRelay::Fate operator()(const WireRelay::Passing& passing) {
    const std::size_t end = passing.offset + passing.bytes->size();
    if (done_ == plans_.size() || passing.connection < next_connection_) return WireRelay::Fate::kPass;
    const Plan& plan = plans_[done_];
    if (plan.forth != passing.forth || plan.offset >= end) return WireRelay::Fate::kPass;
    ++done_;
    next_connection_ = passing.connection + 1;
    if (plan.deed == Deed::kCut) return WireRelay::Fate::kCut;
    const std::size_t at = std::max(plan.offset, passing.offset) - passing.offset;
    if (plan.deed == Deed::kEnd) {
      passing.bytes->resize(at);
      return WireRelay::Fate::kEnd;
    }
    (*passing.bytes)[at] ^= static_cast<std::uint8_t>(1 << random_() % 8);
    return WireRelay::Fate::kPass;
  }

  std::size_t done() const { return done_; }

 private:
  std::mt19937 random_;
  const std::vector<Plan> plans_;
  std::size_t done_ = 0;
  std::size_t next_connection_ = 0;
};

constexpr std::size_t kMessageSizes[] = {100, 100, 100, 5000, 0, 33000, 1, 70000, 32, 200000};

// All messages at the same time; the first error. Every byte that is given to a request that is done is right.
Status exchange(RelayedPair& pair) {
  std::vector<Bytes> messages;
  std::vector<Bytes> rooms;
  std::vector<Request*> requests;
  for (const std::size_t bytes : kMessageSizes) messages.push_back(make_message(messages.size(), bytes));
  for (const Bytes& message : messages) rooms.emplace_back(message.size());
  std::vector<Request*> receives(messages.size());
  std::vector<Request*> sends(messages.size());
  for (std::size_t i = 0; i < messages.size(); ++i) {
    // As NCCL does, a comm that has failed is not asked again.
    Status status = pair.receiver->irecv(rooms[i].data(), rooms[i].size(), nullptr, &receives[i]);
    if (status.is_ok()) status = pair.sender->isend(messages[i].data(), messages[i].size(), nullptr, &sends[i]);
    if (!status.is_ok()) {
      pair.close();
      return status;
    }
  }
  Status status;
  wait_until(
      [&] {
        bool all_done = true;
        for (std::size_t i = 0; i < messages.size(); ++i) {
          for (Request** request : {&receives[i], &sends[i]}) {
            if (*request == nullptr || !status.is_ok()) continue;
            bool done = false;
            std::size_t bytes = 0;
            status = (*request)->test(&done, &bytes);
            if (!done || !status.is_ok()) {
              all_done = false;
              continue;
            }
            if (request == &receives[i]) {
              CHECK_EQ(bytes, messages[i].size());
              CHECK(rooms[i] == messages[i]);
            }
            *request = nullptr;
          }
        }
        return all_done || !status.is_ok();
      },
      "the messages, or an error");
  if (!status.is_ok()) pair.close();  // before the memory goes
  return status;
}

// What an end answers to a recording of the other one, until it ends the connection.
Bytes heard_on(const OwnedFd& socket, const Bytes& recording) {
  [[maybe_unused]] const ssize_t ignored = ::send(socket.get(), recording.data(), recording.size(), MSG_NOSIGNAL);
  Bytes heard(4096);
  std::size_t count = 0;
  while (count < heard.size()) {
    const ssize_t got = ::recv(socket.get(), heard.data() + count, heard.size() - count, 0);
    if (got <= 0) break;
    count += static_cast<std::size_t>(got);
  }
  heard.resize(count);
  return heard;
}

SocketAddress address_in(const Handle& handle) {
  ConnectHandle decoded;
  CHECK_OK(decode_connect_handle(handle.data(), &decoded));
  SocketAddress address = loopback().address;
  address.set_port(decoded.port);
  return address;
}

Plan draw_plan(std::mt19937& random) {
  Plan plan;
  plan.deed = static_cast<Deed>(random() % 3);
  plan.forth = random() % 3 != 0;
  // The handshake, the first records, or somewhere.
  const std::size_t most = std::array<std::size_t, 3>{250, 2000, plan.forth ? 250000u : 500u}[random() % 3];
  plan.offset = random() % most;
  return plan;
}

}  // namespace

TEST_CASE(an_exchange_that_is_meddled_with_is_right_or_an_error) {
  const Secret secret;
  std::size_t deeds = 0;
  std::size_t errors = 0;
  const auto seeds = static_cast<unsigned>(check::rounds(60));
  for (unsigned seed = 1; seed <= seeds; ++seed) {
    std::mt19937 random(seed);
    PluginConfig config =
        encrypted(secret, seed % 2 == 0 ? Encryption::kOn : Encryption::kChaCha20, seed % 4 < 2 ? 0 : 2);
    config.recovery = seed % 3 == 0 ? Recovery::kOff : Recovery::kOn;
    std::vector<Plan> plans(1 + random() % 3);
    for (Plan& plan : plans) plan = draw_plan(random);
    const auto attacker = std::make_shared<Attacker>(seed, plans);
    {
      RelayedPair pair(config, [attacker](const WireRelay::Passing& passing) { return (*attacker)(passing); });
      Status status = pair.try_to_connect();
      const bool is_connected = status.is_ok();
      if (is_connected) status = exchange(pair);
      // Without streams that join it is tried again, and a connection that carries data is replaced.
      if (config.recovery == Recovery::kOn && (is_connected || config.streams == 1)) CHECK_OK(status);
      if (!status.is_ok()) {
        ++errors;
        CHECK(status.code() == StatusCode::kDamagedData || status.code() == StatusCode::kRemoteError);
        CHECK(!status.message().empty());
      }
      pair.relay->stop();
    }
    deeds += attacker->done();
  }
  CHECK(deeds > 0);
  CHECK(seeds < 40 || errors > 0);  // few seeds, as under a sanitizer, need not have one
}

// The comm is in use, and of three connections; one of them has replaced one that was lost.
TEST_CASE(a_recorded_exchange_said_again_gets_nothing_from_either_end) {
  const Secret secret;
  const auto attacker = std::make_shared<Attacker>(1u, std::vector<Plan>{{Deed::kCut, true, 50000}});
  const PluginConfig config = encrypted(secret, Encryption::kOn, 2);
  RelayedPair pair(config, [attacker](const WireRelay::Passing& passing) { return (*attacker)(passing); });
  pair.connect();
  CHECK_OK(exchange(pair));
  const std::vector<Recording> recordings = pair.relay->seen();
  CHECK(recordings.size() >= 4u);

  // To the listener, whose listen is over, as the connector has said it, and with the id of another listen.
  Handle fresh{};
  ListenComm* const another = listen_on(*pair.receiving, &fresh);
  ConnectHandle decoded;
  CHECK_OK(decode_connect_handle(fresh.data(), &decoded));
  for (const Recording& recording : recordings) {
    Bytes renamed = recording[0];
    Hello hello;
    decode_hello(renamed.data(), &hello);
    const auto place = std::search(renamed.begin(), renamed.begin() + kHelloClearBytes, hello.listen_id.begin(),
                                   hello.listen_id.end());
    CHECK(place != renamed.begin() + kHelloClearBytes);
    std::copy(decoded.listen_id.begin(), decoded.listen_id.end(), place);
    for (const Bytes& said : {recording[0], renamed}) {
      // A challenge, then a refusal in the clear.
      CHECK(heard_on(connect_to(address_in(fresh)), said).size() <= kSealedChallengeBytes + kReplyBytes);
    }
  }
  RecvComm* accepted = nullptr;
  CHECK_OK(pair.receiving->accept(another, &accepted));
  CHECK(accepted == nullptr);
  pair.receiving->close(another);

  // To the connector, in place of the listener whose handle it has.
  SocketAddress address = loopback().address;
  OwnedFd listener;
  CHECK_OK(tcp_listen(&address, &listener));
  CHECK_OK(decode_connect_handle(pair.original.data(), &decoded));
  decoded.port = address.port();
  Handle handle{};
  encode_connect_handle(decoded, handle.data());
  std::vector<OwnedFd> sockets;
  Status status;
  SendComm* comm = nullptr;
  const auto connect = [&] {
    status = pair.sending->connect(0, handle.data(), &comm);
    CHECK(comm == nullptr);
    OwnedFd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.is_open()) return;
    const Bytes& said = recordings[sockets.size() % recordings.size()][1];
    [[maybe_unused]] const ssize_t ignored = ::send(socket.get(), said.data(), said.size(), MSG_NOSIGNAL);
    sockets.push_back(std::move(socket));
  };
  // It connects again until its deadline.
  wait_until(
      [&] {
        connect();
        CHECK_OK(status);
        return sockets.size() > recordings.size();
      },
      "another attempt after each recording");
  test_clock::pass_ms(config.connect_timeout_ms);
  wait_until(
      [&] {
        connect();
        return !status.is_ok();
      },
      "the error");
  CHECK(status.code() == StatusCode::kRemoteError);

  // None of it has reached the comm that was recorded.
  CHECK_OK(exchange(pair));
  pair.relay->stop();
  CHECK_EQ(attacker->done(), 1u);
}

}  // namespace bagua_net

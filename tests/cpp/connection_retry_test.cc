// ConnectionService on the loopback interface: connects that are tried again, at both ends for want of descriptors.
#include <sys/resource.h>
#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "os/tcp_socket.h"
#include "support/check.h"
#include "support/raw_handshake.h"
#include "support/service_parts.h"
#include "transport/connection_service.h"
#include "wire/connect_handle.h"
#include "wire/handshake_message.h"

namespace bagua_net {
namespace {

// While it lives, the process may open so many files.
class FileLimit {
 public:
  explicit FileLimit(rlim_t files) {
    CHECK_EQ(::getrlimit(RLIMIT_NOFILE, &before_), 0);
    rlimit limit = before_;
    limit.rlim_cur = files;
    CHECK_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  }
  ~FileLimit() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  FileLimit(const FileLimit&) = delete;
  FileLimit& operator=(const FileLimit&) = delete;

 private:
  rlimit before_{};
};

// A listener closes the oldest connection that has not said hello where it can keep no more, or the process ends.
struct ClosingListener {
  SocketAddress address = loopback().address;
  OwnedFd socket;
  Token token{1, 2, 3};
  std::array<std::uint8_t, 128> handle{};

  ClosingListener() {
    CHECK_OK(tcp_listen(&address, &socket));
    ConnectHandle encoded;
    encoded.token = token;
    encoded.port = address.port();
    encoded.max_streams = 4;
    encoded.address = {127, 0, 0, 1};
    encode_connect_handle(encoded, handle.data());
  }
  OwnedFd next() const {
    OwnedFd accepted;
    SocketAddress peer;
    wait_until(
        [&] {
          CHECK_OK(tcp_accept(socket.get(), &accepted, &peer));
          return accepted.is_open();
        },
        "a connection");
    return accepted;
  }
  // It stays open as long as what is returned.
  OwnedFd reply_to_next() const {
    OwnedFd accepted = next();
    reply_to(accepted, 1);
    return accepted;
  }
  void reply_to(const OwnedFd& accepted, std::uint16_t streams) const {
    make_blocking(accepted);
    answer_handshake(accepted, token, {kProtocolVersion, HandshakeVerdict::kAccepted, streams, 1, 1, 0});
  }
};

// Asked again and again, as NCCL does.
struct Connect {
  ConnectionService& service;
  std::uint8_t* handle;
  bool ready = false;
  EstablishedConnection connection = {};

  Status ask() { return service.connect(loopback(), handle, &ready, &connection); }
  void finish() {
    wait_until(
        [&] {
          CHECK_OK(ask());
          return ready;
        },
        "the connection");
  }
};

}  // namespace

// The unauthenticated peers of a process that may open few files give theirs back after a while.
TEST_CASE(a_connect_without_free_descriptors_is_tried_again) {
  ConnectionService listening(settings_with({}));
  ConnectionService connecting(settings_with({}));
  CHECK_OK(listening.start());
  CHECK_OK(connecting.start());
  RandomId id;
  std::array<std::uint8_t, 128> handle{};
  CHECK_OK(listening.listen(loopback(), handle.data(), &id));
  Connect connect{connecting, handle.data()};
  {
    const FileLimit none(3);
    CHECK_OK(connect.ask());
  }
  connect.finish();
}

TEST_CASE(a_connection_that_the_listener_could_not_keep_is_tried_again) {
  ClosingListener listener;
  ConnectionService connecting(settings_with(1));
  CHECK_OK(connecting.start());
  Connect connect{connecting, listener.handle.data()};
  CHECK_OK(connect.ask());
  for (int i = 0; i < 3; ++i) listener.next().reset();
  const OwnedFd accepted = listener.reply_to_next();
  connect.finish();
}

TEST_CASE(a_listener_that_closes_and_goes_is_an_error_long_before_the_deadline) {
  ClosingListener listener;
  ConnectionService connecting(settings_with(1));
  CHECK_OK(connecting.start());
  Connect connect{connecting, listener.handle.data()};
  CHECK_OK(connect.ask());
  listener.next().reset();
  listener.socket.reset();
  Status status;
  wait_until(
      [&] {
        status = connect.ask();
        return !status.is_ok();
      },
      "the error");
  CHECK(status.code() == StatusCode::kRemoteError);
  CHECK(status.message().find("closed the connection during the handshake") != std::string::npos);
}

// It answered the first stream, and its process ends before the others.
TEST_CASE(a_listener_that_dies_between_streams_is_an_error_long_before_the_deadline) {
  ClosingListener listener;
  ConnectionService connecting(settings_with(4));
  CHECK_OK(connecting.start());
  Connect connect{connecting, listener.handle.data()};
  CHECK_OK(connect.ask());
  OwnedFd accepted = listener.next();
  listener.socket.reset();
  listener.reply_to(accepted, 4);
  Status status;
  wait_until(
      [&] {
        status = connect.ask();
        return !status.is_ok();
      },
      "the error");
  CHECK(status.code() == StatusCode::kRemoteError);
  CHECK(status.message().find("is gone") != std::string::npos);
}

// More connections at once than a listener that may open few files keeps while their hello is on its way.
TEST_CASE(many_peers_reach_a_listener_that_may_open_few_files) {
  constexpr int kPeers = 8;
  constexpr int kEach = 16;
  // It looks once how many it may open, when it is made.
  const auto listening = [] {
    const FileLimit few(64);
    return std::make_unique<ConnectionService>(settings_with(1));
  }();
  CHECK_OK(listening->start());
  std::vector<std::array<std::uint8_t, 128>> handles(kPeers * kEach);
  RandomId id;
  for (auto& handle : handles) CHECK_OK(listening->listen(loopback(), handle.data(), &id));
  std::vector<std::string> failures(kPeers);
  std::vector<std::thread> peers;
  for (int peer = 0; peer < kPeers; ++peer) {
    peers.emplace_back([&, peer] {
      try {
        ConnectionService connecting(settings_with(1));
        CHECK_OK(connecting.start());
        std::vector<EstablishedConnection> connections(kEach);
        for (int i = 0; i < kEach; ++i) {
          bool ready = false;
          auto& handle = handles[static_cast<std::size_t>(peer * kEach + i)];
          CHECK_OK(connecting.connect(loopback(), handle.data(), &ready, &connections[static_cast<std::size_t>(i)]));
        }
        for (int i = 0; i < kEach; ++i) {
          bool ready = false;
          auto& handle = handles[static_cast<std::size_t>(peer * kEach + i)];
          wait_until(
              [&] {
                CHECK_OK(
                    connecting.connect(loopback(), handle.data(), &ready, &connections[static_cast<std::size_t>(i)]));
                return ready;
              },
              "a connection");
        }
      } catch (const std::exception& error) {
        failures[static_cast<std::size_t>(peer)] = error.what();
      }
    });
  }
  for (std::thread& peer : peers) peer.join();
  for (const std::string& failure : failures) CHECK_EQ(failure, "");
}

}  // namespace bagua_net

CHECK_MAIN

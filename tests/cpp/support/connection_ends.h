// The two ends of ConnectionService: a listening service with one listen, and what its peer, or whoever reads the
// network, knows of it; and a connect that is asked again and again, as NCCL does. Ends by hand: raw_handshake.h.
#pragma once

#include <unistd.h>

#include <array>
#include <cstdint>
#include <optional>

#include "support/check.h"
#include "support/comm_parts.h"
#include "support/loopback.h"
#include "support/raw_handshake.h"
#include "transport/connect/connection_service.h"

namespace bagua_net {

inline HandshakeSettings settings_with(std::optional<int> streams) {
  HandshakeSettings settings;
  settings.streams = streams;
  settings.host_name = "here";
  settings.process_id = static_cast<std::uint64_t>(::getpid());
  return settings;
}

// By an interface of this host to 10.0.0.<last_byte>.
inline NicPath path_to(const char* interface, std::uint8_t last_byte) {
  NicPath path;
  path.interface.name = interface;
  path.address = SocketAddress(AF_INET, {10, 0, 0, last_byte}, 1, 0);
  return path;
}
inline NicPath path_to(const SocketAddress& address) { return {loopback(), address, 0}; }

// The bytes of a handle, of which those behind ours are the state of its connect.
using HandleBytes = std::array<std::uint8_t, 128>;

struct ConnectingService {
  ConnectionService service;
  std::uint8_t* handle;
  bool ready = false;
  EstablishedConnection connection = {};

  explicit ConnectingService(std::uint8_t* to, const HandshakeSettings& settings = settings_with(1))
      : service(settings), handle(to) {
    CHECK_OK(service.start());
  }
  Status ask() { return service.connect({loopback()}, handle, &ready, &connection); }
  void finish() {
    wait_until(
        [&] {
          CHECK_OK(ask());
          return ready;
        },
        "the connection");
  }
  Status error() {
    Status status;
    wait_until(
        [&] {
          status = ask();
          return !status.is_ok();
        },
        "the error");
    CHECK(!ready);
    return status;
  }
};

struct ListeningService {
  ConnectionService service;
  RandomId id{};
  ConnectHandle handle;
  HandleBytes handle_bytes{};
  SocketAddress address = loopback().address;

  explicit ListeningService(const HandshakeSettings& settings = settings_with(1)) : service(settings) {
    CHECK_OK(service.start());
    CHECK_OK(service.listen({loopback()}, handle_bytes.data(), &id));
    CHECK_OK(decode_connect_handle(handle_bytes.data(), &handle));
    address.set_port(handle.port);
  }
  Hello hello() const { return hello_to(handle.listen_id); }
  // A connection that has said hello and been challenged.
  OwnedFd challenged(const Hello& hello, Said* said) const {
    OwnedFd socket = connect_to(address);
    *said = say_hello(socket, hello);
    Reply reply;
    CHECK(read_challenge(socket, said, &reply));
    return socket;
  }
  bool accept(EstablishedConnection* connection) { return accept(connection, id); }
  bool accept(EstablishedConnection* connection, const RandomId& of) {
    bool ready = false;
    CHECK_OK(service.accept(of, &ready, connection));
    return ready;
  }
  EstablishedConnection accepted() {
    EstablishedConnection connection;
    wait_until([&] { return accept(&connection); }, "the connection");
    return connection;
  }
  // Until both ends have it.
  EstablishedConnection accept_from(ConnectingService* connecting) { return accept_from(connecting, id); }
  EstablishedConnection accept_from(ConnectingService* connecting, const RandomId& of) {
    EstablishedConnection connection;
    bool is_accepted = false;
    wait_until(
        [&] {
          if (!connecting->ready) CHECK_OK(connecting->ask());
          is_accepted = is_accepted || accept(&connection, of);
          return connecting->ready && is_accepted;
        },
        "the connection");
    return connection;
  }
  // A real peer still gets through, to another listen.
  void check_open() {
    HandleBytes fresh{};
    RandomId fresh_id{};
    CHECK_OK(service.listen({loopback()}, fresh.data(), &fresh_id));
    ConnectingService connecting(fresh.data());
    accept_from(&connecting, fresh_id);
  }
};

}  // namespace bagua_net

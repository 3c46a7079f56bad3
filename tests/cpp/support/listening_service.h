// A listening service with one listen, and what its peer, or whoever reads the network, knows of it.
#pragma once

#include <array>
#include <cstdint>

#include "support/check.h"
#include "support/comm_parts.h"
#include "support/raw_handshake.h"
#include "support/service_parts.h"
#include "transport/connect/connection_service.h"

namespace bagua_net {

struct ListeningService {
  ConnectionService service;
  RandomId id{};
  ConnectHandle handle;
  std::array<std::uint8_t, 128> handle_bytes{};
  SocketAddress address = loopback().address;

  explicit ListeningService(const HandshakeSettings& settings = settings_with(1)) : service(settings) {
    CHECK_OK(service.start());
    CHECK_OK(service.listen(loopback(), handle_bytes.data(), &id));
    CHECK_OK(decode_connect_handle(handle_bytes.data(), &handle));
    address.set_port(handle.port);
  }
  Hello hello() const {
    Hello hello;
    hello.listen_id = handle.listen_id;
    hello.max_chunk_bytes = 65536;
    return hello;
  }
  // A connection that has said hello and been challenged.
  OwnedFd challenged(const Hello& hello, Said* said) const {
    OwnedFd socket = connect_to(address);
    *said = say_hello(socket, hello);
    Reply reply;
    CHECK(read_challenge(socket, said, &reply));
    return socket;
  }
  // A real peer still gets through, to another listen.
  void check_open() {
    ConnectionService connecting(settings_with(1));
    CHECK_OK(connecting.start());
    std::array<std::uint8_t, 128> fresh{};
    RandomId fresh_id{};
    CHECK_OK(service.listen(loopback(), fresh.data(), &fresh_id));
    EstablishedConnection connected;
    EstablishedConnection accepted;
    connect_and_accept(connecting, fresh.data(), &connected, service, fresh_id, &accepted);
  }
};

}  // namespace bagua_net

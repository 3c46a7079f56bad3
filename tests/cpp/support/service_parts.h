// What tests of ConnectionService share: the loopback interface, and settings.
#pragma once

#include <netinet/in.h>
#include <unistd.h>

#include <cstdint>
#include <optional>

#include "support/check.h"
#include "support/comm_parts.h"
#include "transport/connect/connection_service.h"

namespace bagua_net {

inline NetworkInterface loopback() {
  NetworkInterface interface;
  interface.name = "lo";
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  interface.address = SocketAddress(reinterpret_cast<const sockaddr*>(&address), sizeof address);
  return interface;
}

inline HandshakeSettings settings_with(std::optional<int> streams) {
  HandshakeSettings settings;
  settings.streams = streams;
  settings.host_name = "here";
  settings.process_id = static_cast<std::uint64_t>(::getpid());
  return settings;
}

// handle: that listen gave with the id.
inline void connect_and_accept(ConnectionService& connecting, std::uint8_t* handle, EstablishedConnection* connected,
                               ConnectionService& listening, const RandomId& id, EstablishedConnection* accepted) {
  bool is_connected = false;
  bool is_accepted = false;
  wait_until(
      [&] {
        if (!is_connected) CHECK_OK(connecting.connect(loopback(), handle, &is_connected, connected));
        if (!is_accepted) CHECK_OK(listening.accept(id, &is_accepted, accepted));
        return is_connected && is_accepted;
      },
      "the connection");
}

}  // namespace bagua_net

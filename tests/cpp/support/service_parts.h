// What tests of ConnectionService share: the loopback interface, and settings.
#pragma once

#include <netinet/in.h>
#include <unistd.h>

#include <cstdint>
#include <optional>

#include "support/comm_parts.h"
#include "transport/connection_service.h"

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

}  // namespace bagua_net

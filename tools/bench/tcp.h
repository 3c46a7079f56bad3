// What the two kinds of plain TCP, the bare ring and raw mode, share.
#pragma once

#include <netdb.h>

#include <cerrno>
#include <memory>
#include <string>

#include "bench/driver_protocol.h"
#include "os/socket_address.h"

namespace bagua_net::bench {

inline bool is_temporary(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

// "192.0.2.1", "192.0.2.1:4711", "[2001:db8::1]:4711" or "2001:db8::1". Without a port: 0. `name` is what failures call
// it.
inline SocketAddress parse_endpoint(const std::string& name, const std::string& text) {
  const std::size_t colon = text.rfind(':');
  const bool has_port = colon != std::string::npos && (text[0] == '[' || text.find(':') == colon);
  std::string host = has_port ? text.substr(0, colon) : text;
  if (!host.empty() && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (host.empty() || getaddrinfo(host.c_str(), nullptr, &hints, &found) != 0) {
    throw Failure(name + " is \"" + text + "\", but is written like 192.0.2.1:4711 or [2001:db8::1]:4711");
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, &freeaddrinfo);
  SocketAddress address(found->ai_addr, found->ai_addrlen);
  const std::string of_port = "the port of " + name;
  if (has_port) address.set_port(static_cast<std::uint16_t>(parse_integer(of_port, text.substr(colon + 1), 1, 65535)));
  return address;
}

}  // namespace bagua_net::bench

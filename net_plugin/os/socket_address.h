// SocketAddress: an IPv4 or IPv6 address with a port, large enough for either.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <string>

namespace bagua_net {

class SocketAddress {
 public:
  SocketAddress() = default;  // family AF_UNSPEC
  SocketAddress(const sockaddr* address, socklen_t length);

  int family() const { return storage_.ss_family; }
  bool is_ipv4() const { return family() == AF_INET; }
  bool is_ipv6() const { return family() == AF_INET6; }
  std::uint16_t port() const;
  void set_port(std::uint16_t port);
  const sockaddr* data() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  sockaddr* data() { return reinterpret_cast<sockaddr*>(&storage_); }
  socklen_t length() const;
  bool is_loopback() const;
  // Same host address, whatever the ports.
  bool same_host(const SocketAddress& other) const;
  std::string host() const;       // "192.0.2.1", "fe80::1%eth0"
  std::string to_string() const;  // "192.0.2.1:4711", "[fe80::1%eth0]:4711"

 private:
  sockaddr_storage storage_{};
};

}  // namespace bagua_net

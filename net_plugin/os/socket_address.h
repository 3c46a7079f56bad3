// SocketAddress: an IPv4 or IPv6 address with a port, large enough for either.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <string>

namespace bagua_net {

class SocketAddress {
 public:
  SocketAddress() = default;  // family AF_UNSPEC
  SocketAddress(const sockaddr* address, socklen_t length);
  // IPv4: the first four bytes.
  using Bytes = std::array<std::uint8_t, 16>;
  SocketAddress(int family, const Bytes& bytes, std::uint16_t port, std::uint32_t scope);

  int family() const { return storage_.ss_family; }
  bool is_ipv4() const { return family() == AF_INET; }
  bool is_ipv6() const { return family() == AF_INET6; }
  Bytes bytes() const;  // of an address of another family: zeros
  std::uint32_t scope() const { return is_ipv6() ? ipv6().sin6_scope_id : 0; }
  std::uint16_t port() const;
  void set_port(std::uint16_t port);
  const sockaddr* data() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  sockaddr* data() { return reinterpret_cast<sockaddr*>(&storage_); }
  socklen_t length() const;
  bool is_loopback() const;
  bool is_link_local() const { return is_ipv6() && IN6_IS_ADDR_LINKLOCAL(&ipv6().sin6_addr); }
  // Same host address, whatever the ports.
  bool same_host(const SocketAddress& other) const;
  std::string host() const;       // "192.0.2.1", "fe80::1%eth0"
  std::string to_string() const;  // "192.0.2.1:4711", "[fe80::1%eth0]:4711"

 private:
  const sockaddr_in& ipv4() const { return reinterpret_cast<const sockaddr_in&>(storage_); }
  const sockaddr_in6& ipv6() const { return reinterpret_cast<const sockaddr_in6&>(storage_); }

  sockaddr_storage storage_{};
};

}  // namespace bagua_net

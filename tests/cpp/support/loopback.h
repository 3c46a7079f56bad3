// The loopback interface, as transport and connection service name it, and connections over it with both ends in this
// process.
#pragma once

#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <cstdint>
#include <utility>

#include "base/owned_fd.h"
#include "os/network_interface.h"
#include "os/tcp_socket.h"
#include "support/check.h"
#include "transport/device.h"

namespace bagua_net {

// An interface with this address, which need not be one of this host.
inline NetworkInterface interface_at(const char* name, in_addr_t host) {
  NetworkInterface interface;
  interface.name = name;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(host);
  interface.address = SocketAddress(reinterpret_cast<const sockaddr*>(&address), sizeof address);
  return interface;
}
inline NetworkInterface loopback(in_addr_t host = INADDR_LOOPBACK) { return interface_at("lo", host); }

inline Device loopback_device() {
  Device device;
  device.interfaces = {loopback()};
  device.name = device.nic_name();
  return device;
}

// Both ends are non-blocking.
inline std::pair<OwnedFd, OwnedFd> tcp_pair() {
  SocketAddress address = loopback().address;
  OwnedFd listening;
  CHECK_OK(tcp_listen(&address, &listening));
  OwnedFd near(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  [[maybe_unused]] const int in_progress = ::connect(near.get(), address.data(), address.length());
  // On loopback the handshake of TCP is over when connect returns, or nearly so.
  pollfd arrived{listening.get(), POLLIN, 0};
  CHECK_EQ(::poll(&arrived, 1, 10000), 1);
  OwnedFd far(::accept4(listening.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  CHECK(far.is_open());
  pollfd connected{near.get(), POLLOUT, 0};
  CHECK_EQ(::poll(&connected, 1, 10000), 1);
  // As the transport does: small messages leave at once.
  const int one = 1;
  for (const OwnedFd* end : {&near, &far}) {
    CHECK_EQ(::setsockopt(end->get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one), 0);
  }
  return {std::move(near), std::move(far)};
}

inline void set_buffer(const OwnedFd& socket, int option, int bytes) {
  CHECK_EQ(::setsockopt(socket.get(), SOL_SOCKET, option, &bytes, sizeof bytes), 0);
}

inline tcp_info tcp_info_of(int socket) {
  tcp_info info{};
  socklen_t length = sizeof info;
  CHECK_EQ(::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &length), 0);
  return info;
}
inline std::uint64_t bytes_received(int socket) { return tcp_info_of(socket).tcpi_bytes_received; }

// The other end has closed or reset the connection: nothing but the end is left to read.
inline bool has_ended(int socket) {
  pollfd readable{socket, POLLIN, 0};
  if (::poll(&readable, 1, 10000) != 1) return false;
  char byte = 0;
  return ::recv(socket, &byte, 1, MSG_DONTWAIT) <= 0;
}

// The same, without waiting for it.
inline bool has_ended_now(int socket) {
  pollfd state{socket, POLLRDHUP, 0};
  return ::poll(&state, 1, 0) == 1;
}

}  // namespace bagua_net

// A connection over the loopback interface, both ends in this process.
#pragma once

#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <cstdint>
#include <utility>

#include "base/owned_fd.h"
#include "support/check.h"

namespace bagua_net {

// Both ends are non-blocking.
inline std::pair<OwnedFd, OwnedFd> tcp_pair() {
  const OwnedFd listening(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  CHECK_EQ(::bind(listening.get(), reinterpret_cast<sockaddr*>(&address), length), 0);
  CHECK_EQ(::listen(listening.get(), 1), 0);
  CHECK_EQ(::getsockname(listening.get(), reinterpret_cast<sockaddr*>(&address), &length), 0);
  OwnedFd near(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  // On loopback the handshake of TCP is over when connect returns, or nearly so; accept waits for it.
  [[maybe_unused]] const int in_progress =
      ::connect(near.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address);
  OwnedFd far(::accept4(listening.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  CHECK(far.is_open());
  pollfd connected{near.get(), POLLOUT, 0};
  CHECK_EQ(::poll(&connected, 1, 10000), 1);
  return {std::move(near), std::move(far)};
}

inline std::uint64_t bytes_received(int socket) {
  tcp_info info{};
  socklen_t length = sizeof info;
  CHECK_EQ(::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &length), 0);
  return info.tcpi_bytes_received;
}

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

// Cuts TCP connections of this process, whoever owns them, as networks and their devices do.
#pragma once

#include <dirent.h>
#include <linux/filter.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <random>
#include <vector>

#include "os/tcp_socket.h"
#include "support/check.h"
#include "support/comm_parts.h"

namespace bagua_net {

// As the kernel numbers them.
enum class TcpState : std::uint8_t { kEstablished = 1, kSynSent = 2, kListen = 10 };

// TCP sockets of this process that are in this state now.
inline std::vector<int> sockets_in_state(TcpState state) {
  std::vector<int> open;
  DIR* const directory = ::opendir("/proc/self/fd");
  CHECK(directory != nullptr);
  while (const dirent* entry = ::readdir(directory)) {
    const auto fd = static_cast<int>(std::strtol(entry->d_name, nullptr, 10));
    tcp_info info{};
    socklen_t length = sizeof info;
    if (fd <= 2 || ::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) continue;
    if (info.tcpi_state == static_cast<std::uint8_t>(state)) open.push_back(fd);
  }
  ::closedir(directory);
  return open;
}

// A connect that was not answered has been given up for another, from another port.
inline void wait_for_another_attempt() {
  std::uint16_t first_port = 0;
  wait_until(
      [&] {
        for (const int fd : sockets_in_state(TcpState::kSynSent)) {
          const std::uint16_t port = local_address(fd).port();
          if (first_port == 0) first_port = port;
          if (port != 0 && port != first_port) return true;
        }
        return false;
      },
      "another attempt");
}

// The ends of connections that are open now, both ends of each.
inline std::vector<int> open_connections() { return sockets_in_state(TcpState::kEstablished); }

enum class Cut {
  kReset,  // both ends learn of it, and what is under way is lost
  kEnd,    // an end in both directions
  kHalf,   // an end in the direction that this end writes
};

inline void cut(int fd, Cut how) {
  switch (how) {
    case Cut::kReset: {
      const sockaddr nowhere{AF_UNSPEC, {}};
      // Not through the C library, of which ThreadSanitizer takes it for a use that the owner should know of.
      [[maybe_unused]] const long ignored = ::syscall(SYS_connect, fd, &nowhere, sizeof nowhere);
      return;
    }
    case Cut::kEnd: ::shutdown(fd, SHUT_RDWR); return;
    case Cut::kHalf: ::shutdown(fd, SHUT_WR); return;
  }
}

inline void cut_all(Cut how) {
  for (const int fd : open_connections()) cut(fd, how);
}

// From now on packets do not arrive that are larger, with their TCP header, and neither end is told. Of a listening
// socket: nor those of connections to it.
inline void lose_packets(int fd, std::uint32_t larger_than) {
  sock_filter program[] = {{BPF_LD | BPF_W | BPF_LEN, 0, 0, 0},
                           {BPF_JMP | BPF_JGT | BPF_K, 0, 1, larger_than},
                           {BPF_RET | BPF_K, 0, 0, 0},
                           {BPF_RET | BPF_K, 0, 0, 0xffffffff}};
  const sock_fprog filter{4, program};
  CHECK_EQ(::setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof filter), 0);
}

// From now on the end hears nothing.
inline void silence(int fd) {
  sock_filter program[] = {{BPF_RET | BPF_K, 0, 0, 0}};
  const sock_fprog filter{1, program};
  [[maybe_unused]] const int ignored = ::setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof filter);
}

inline void hear_again(int fd) {
  const int none = 0;
  [[maybe_unused]] const int ignored = ::setsockopt(fd, SOL_SOCKET, SO_DETACH_FILTER, &none, sizeof none);
}

// Cuts up to `most` random ends; how many.
inline int cut_some(std::mt19937& random, std::size_t most) {
  const std::vector<int> open = open_connections();
  if (open.empty()) return 0;
  const std::size_t count = 1 + random() % most;
  for (std::size_t i = 0; i < count; ++i) cut(open[random() % open.size()], static_cast<Cut>(random() % 3));
  return static_cast<int>(count);
}

}  // namespace bagua_net

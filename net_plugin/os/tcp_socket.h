// TCP sockets: opening, listening, accepting and the options that every connection of ours has. All non-blocking and
// closed on exec.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/congestion_control.h"
#include "base/owned_fd.h"
#include "base/status.h"
#include "os/network_interface.h"
#include "os/socket_address.h"

namespace bagua_net {

struct TcpOptions {
  std::int64_t buffer_bytes = 0;  // 0: the kernel's autotuning
  int keepalive_s = 30;           // silence after which a dead host is noticed; 0: off
  CongestionControl congestion_control = CongestionControl::kAuto;
  bool zero_copy = false;  // between hosts (os/zero_copy.h)
};

// Port 0 in `address`: the kernel picks one, and *address is filled with it. An IPv6 address that is still tentative
// may be listened on: its peers reach it a second later.
Status tcp_listen(SocketAddress* address, OwnedFd* socket);
// The same port twice: what comes in by that interface comes to *bound, and its connections leave by it. *bound stays
// closed where this process may not bind to it.
Status tcp_listen(const NetworkInterface& interface, SocketAddress* address, OwnedFd* socket, OwnedFd* bound);

// One connection from the queue; *socket stays closed when there is none. Failures of a single connection
// (ECONNABORTED and the like) count as none.
Status tcp_accept(int listening_socket, OwnedFd* socket, SocketAddress* peer);

// Starts connecting; finished when the socket becomes writable, then ask tcp_connect_result. over: the interface that
// it is to leave by, as far as this process may say so; nullptr: the kernel's choice.
Status tcp_connect(const SocketAddress& address, const TcpOptions& options, const NetworkInterface* over,
                   OwnedFd* socket);
int tcp_connect_result(int socket);  // 0 or errno
// Of a connection, the shortest so far; 0: the kernel does not say. A busy host answers some packets late.
std::int64_t tcp_round_trip_us(int socket);
// Written, and not acknowledged by the other end's kernel.
std::size_t tcp_undelivered_bytes(int socket);
// Of a connection, the largest packets that the kernel sends; 0: it does not say.
std::size_t tcp_packet_bytes(int socket);

// No delay, keepalive, buffers, unsent bytes, retransmission and congestion control. `same_host`: both ends are on this
// host.
Status apply_tcp_options(int socket, const TcpOptions& options, bool same_host);

// For the end that receives and writes only acknowledgements: the connection is over if they, or probes, are unanswered
// for so long. With acknowledgements under way the kernel does not probe, and would repeat them for a quarter of an
// hour.
Status limit_unanswered_writes(int socket, int limit_ms);

// From now on the kernel asks the peer's each second whether it is there, while nothing else is under way.
void probe_idle_peer(int socket);

// No address: it is not connected.
SocketAddress local_address(int socket);
SocketAddress remote_address(int socket);

}  // namespace bagua_net

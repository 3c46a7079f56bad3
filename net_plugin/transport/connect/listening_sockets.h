// ListeningSockets: the listening sockets of this process, one per network interface, each opened when it is first
// needed. A socket pauses where it cannot accept, as without descriptors. Not thread-safe: the connection service's
// mutex guards every call.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/owned_fd.h"
#include "base/status.h"
#include "os/network_interface.h"
#include "os/socket_address.h"
#include "transport/connect/handshake_settings.h"
#include "wire/connect_handle.h"

namespace bagua_net {

struct ListeningSocket {
  std::string interface;
  OwnedFd socket;
  OwnedFd bound;  // to that interface, if another one is in the same subnet
  SocketAddress address;
  std::uint64_t id = 0;
  std::int64_t paused_until_ms = 0;  // after it could not accept; 0: not paused
};

// Names where they listen: at least one, and all of one family. Returns those for which the handle has no room.
std::vector<HandleAddress> put_addresses(const std::vector<const ListeningSocket*>& sockets, ConnectHandle* handle);

class ListeningSockets {
 public:
  explicit ListeningSockets(HandshakeLoop* loop) : loop_(loop) {}

  // *listening stays there until close_all().
  Status open(const NetworkInterface& interface, const ListeningSocket** listening);
  // The same for several. One that cannot be listened on is logged and left out; an error if that is so for all.
  Status open_all(const std::vector<NetworkInterface>& interfaces, std::vector<const ListeningSocket*>* listening);
  void close_all();

  // nullptr: the poller's id is not one of these.
  ListeningSocket* find(std::uint64_t id);
  // Takes a pending connection; false: there is none, or it cannot be accepted now. from: the address of its peer.
  bool accept(ListeningSocket& listening, OwnedFd* socket, SocketAddress* from);

  void expire(std::int64_t now_ms);
  std::int64_t next_deadline_ms() const;  // INT64_MAX: none

 private:
  static constexpr std::int64_t kAcceptRetryMs = 100;

  Status watch(const ListeningSocket& listening);
  void unwatch(const ListeningSocket& listening);

  HandshakeLoop* const loop_;
  std::map<std::string, ListeningSocket> sockets_;  // by interface name; map nodes do not move
};

}  // namespace bagua_net

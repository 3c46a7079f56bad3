// ListeningSockets: where this process can be connected to: one socket per network interface, opened when it is first
// asked for. Without descriptors for what waits there, a socket pauses. Not thread-safe: the connection service's mutex
// guards every call.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "base/owned_fd.h"
#include "base/rare_log.h"
#include "base/status.h"
#include "os/epoll_poller.h"
#include "os/network_interface.h"
#include "os/socket_address.h"

namespace bagua_net {

struct ListeningSocket {
  std::string interface;
  OwnedFd socket;
  OwnedFd bound;  // for what comes in by that interface, where another is in the same subnet
  SocketAddress address;
  std::uint64_t id = 0;
  std::int64_t paused_until_ms = 0;  // look again then; 0: not paused
};

class ListeningSockets {
 public:
  ListeningSockets(EpollPoller* poller, std::uint64_t* next_id, RareLog* log)
      : poller_(poller), next_id_(next_id), log_(log) {}

  // *listening stays there until close_all().
  Status open(const NetworkInterface& interface, const ListeningSocket** listening);
  void close_all();

  // nullptr: the poller's id is not one of these.
  ListeningSocket* find(std::uint64_t id);
  // A connection that waits there; false: none does, or none can be taken now. from: its other end.
  bool accept(ListeningSocket& listening, OwnedFd* socket, SocketAddress* from);

  void expire(std::int64_t now_ms);
  std::int64_t next_deadline_ms() const;  // INT64_MAX: none

 private:
  static constexpr std::int64_t kAcceptRetryMs = 100;

  Status watch(const ListeningSocket& listening);

  EpollPoller* const poller_;
  std::uint64_t* const next_id_;
  RareLog* const log_;
  std::map<std::string, ListeningSocket> sockets_;  // by interface name; map nodes do not move
};

}  // namespace bagua_net

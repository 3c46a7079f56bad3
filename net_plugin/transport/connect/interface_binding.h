// InterfaceBinding: which connections are bound to the network interface of their device. Not thread-safe: the
// connection service's mutex guards every call.
//
// [Note: connections bound to their interface]
// If two interfaces are in one subnet, the kernel sends everything over the first of them. A socket that is bound to
// the other interface sends over that one, but receives only what arrives there. The packets of the peer arrive at the
// interface that ARP named, which may be any (net.ipv4.conf.*.arp_ignore = 0, the default) and may change. So bound and
// unbound attempts take turns, with a short time limit. Replacements of lost connections are not bound, and without
// recovery no connection is, unless the device has joined several interfaces ([Note: pairs of interfaces]): then each
// connection is bound, in every attempt. Once a peer could be reached only unbound, no connection of that interface is
// bound.
#pragma once

#include <set>
#include <string>

#include "base/rare_log.h"
#include "transport/connect/established_connection.h"
#include "transport/connect/handshake_settings.h"

namespace bagua_net {

class InterfaceBinding {
 public:
  InterfaceBinding(const HandshakeSettings& settings, RareLog* log) : settings_(settings), log_(log) {}

  // For every second attempt of a connection.
  bool is_to_be_bound(const JoinTicket& ticket, const NicPath& path) const;
  // A bound attempt failed, and an unbound one is connected: logged once for each interface.
  void on_unbound(const NicPath& path);

 private:
  const HandshakeSettings& settings_;
  RareLog* const log_;
  std::set<std::string> left_;  // interfaces that the kernel replaced by another one
};

}  // namespace bagua_net

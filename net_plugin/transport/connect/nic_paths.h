// NicPaths: over which pairs of network interfaces the connections of a comm go, where a device has joined several.
//
// [Note: pairs of interfaces]
// A path is an interface of this host and an address of the listener. There are enough paths that each interface of
// either host has one: where there are two here and one there, both lead to the same address. Pairs in one subnet come
// first, then others that have a route. Connections are bound to their interface. A pair that cannot connect is found
// by trying: it is left out, by later comms as well, and its connections go over another pair until it works
// (transport/comm/place_paths.h).
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/rare_log.h"
#include "base/status.h"
#include "os/network_interface.h"
#include "os/socket_address.h"
#include "wire/connect_handle.h"

namespace bagua_net {

struct NicPath {
  NetworkInterface interface;  // over which the listener is reached
  SocketAddress address;       // of the listener
  std::uint16_t port = 0;      // of this process at the interface's address, where the peer may probe; 0: none
};

// What the kernel says of an interface of this host and an address of the other.
struct NicPairing {
  bool same_subnet = false;
  bool is_routed = false;  // there is a route over this interface
};
using NicPair = std::pair<std::size_t, std::size_t>;
// Pairs of interfaces (rows) and addresses (columns), in the order in which connections are opened over them. in_use:
// that are used already; they come first.
std::vector<NicPair> pair_nics(const std::vector<std::vector<NicPairing>>& pairings, std::vector<NicPair> in_use = {});

// interfaces: of the device, with their ports. One path if both ends have one interface or addresses of different
// families, or are on one host. in_use: the path that a connection has already; it comes first. nullptr: none.
std::vector<NicPath> find_paths(const std::vector<NetworkInterface>& interfaces,
                                const std::vector<std::uint16_t>& ports, const ConnectHandle& handle,
                                const NicPath* in_use = nullptr);

// How many there will be with the addresses that the handle has no room for.
std::size_t expected_paths(const std::vector<NicPath>& paths, const std::vector<NetworkInterface>& interfaces,
                           const ConnectHandle& handle);

// If interfaces of either host are without a pair or share one. Without a text: each has its own.
RareLog::Line describe_mismatch(const std::vector<NetworkInterface>& interfaces, const ConnectHandle& handle,
                                const std::vector<NicPath>& paths);

// Of that many streams of a new comm, the path that each should have, even if it cannot connect now. first: of the
// first one. The others are spread evenly, with the first or, if it carries small messages only, without it.
std::vector<std::size_t> share_paths(std::size_t streams, std::size_t paths, std::size_t first, bool first_is_small);

// What was found out about paths by connecting over them. Not thread-safe: the connection service's mutex guards every
// call.
class PathExperience {
 public:
  // turn: differs between the processes of a host.
  explicit PathExperience(RareLog* log, std::size_t turn = 0) : log_(log), turn_(turn) {}

  // Of these, the paths to use, by index. Never empty.
  std::vector<std::size_t> usable(const std::vector<NicPath>& paths, std::int64_t now_ms) const;
  bool is_left_out(const NicPath& path, std::int64_t now_ms) const;
  // round_trip_us: of the handshake; 0: unknown.
  void on_connected(const NicPath& path, std::int64_t round_trip_us);
  // Of the paths to use, the one for the first stream of a new comm, which carries small messages: the fastest, by what
  // the kernel says, of those with about the shortest round trip. Several such take turns: with each comm to this peer,
  // and beginning with another one for each peer and process.
  std::size_t begin_comm(const std::vector<NicPath>& paths, std::int64_t now_ms);
  // `chosen`, or another path to use if its round trip is much shorter.
  std::size_t nearest(const std::vector<NicPath>& paths, std::size_t chosen, std::int64_t now_ms) const;
  // No answer, or not from the listener.
  void on_failed(const NicPath& path, const Status& why, std::int64_t now_ms);

 private:
  struct Record {
    bool has_worked = false;
    int failures = 0;  // in a row
    std::int64_t left_out_until_ms = 0;
    std::int64_t round_trip_us = 0;  // the shortest; 0: unknown
  };
  using Key = std::pair<std::string, std::string>;
  static Key key_of(const NicPath& path) { return {path.interface.name, path.address.host()}; }
  std::int64_t round_trip_us(const NicPath& path) const;
  // The round trip over this path is more than twice as long, and longer by more than noise_us.
  bool is_longer(const NicPath& path, const NicPath& than, std::int64_t noise_us) const;

  RareLog* const log_;
  const std::size_t turn_;
  std::map<Key, Record> records_;
  std::map<std::string, std::size_t> turns_;  // of the next comm, by the peer's address
};

}  // namespace bagua_net

#include "transport/connect/nic_paths.h"

#include <algorithm>
#include <set>

#include "os/local_address.h"
#include "transport/connect/handle_address.h"

namespace bagua_net {
namespace {

// One packet may be lost, and the kernel repeats it after a second: the second attempt waits for that.
constexpr int kFailuresToLeaveOut = 2;
// For hosts whose network changes while the job runs. Each time costs one comm 2.8 s.
constexpr std::int64_t kTryAgainMs = 60000;
// Round trips of a single handshake vary by this much where the hosts are busy.
constexpr std::int64_t kNoiseUs = 500;
// And by this much otherwise. A path that only seems longer misses a turn.
constexpr std::int64_t kLittleNoiseUs = 100;

bool is_of_other_family(const std::vector<NetworkInterface>& interfaces, const ConnectHandle& handle) {
  return interfaces.front().address.is_ipv6() != (handle.address_family == 6);
}

}  // namespace

std::vector<NicPair> pair_nics(const std::vector<std::vector<NicPairing>>& pairings, std::vector<NicPair> in_use) {
  struct Pair {
    bool is_remote;
    bool is_crossed;
    std::size_t here, there;
  };
  std::vector<Pair> pairs;
  for (std::size_t here = 0; here < pairings.size(); ++here) {
    for (std::size_t there = 0; there < pairings[here].size(); ++there) {
      const NicPairing& pairing = pairings[here][there];
      if (pairing.same_subnet || pairing.is_routed) pairs.push_back({!pairing.same_subnet, here != there, here, there});
    }
  }
  std::stable_sort(pairs.begin(), pairs.end(), [](const Pair& one, const Pair& other) {
    return std::pair(one.is_remote, one.is_crossed) < std::pair(other.is_remote, other.is_crossed);
  });
  std::set<std::size_t> used_here;
  std::set<std::size_t> used_there;
  std::vector<NicPair> chosen = std::move(in_use);
  for (const auto& [here, there] : chosen) {
    used_here.insert(here);
    used_there.insert(there);
  }
  // First pairs of two that have none, then for those that are left.
  for (const std::size_t without_one : {2, 1}) {
    for (const Pair& pair : pairs) {
      if (2 - used_here.count(pair.here) - used_there.count(pair.there) < without_one) continue;
      used_here.insert(pair.here);
      used_there.insert(pair.there);
      chosen.emplace_back(pair.here, pair.there);
    }
  }
  if (chosen.empty()) chosen.emplace_back(0, 0);
  return chosen;
}

std::vector<NicPath> find_paths(const std::vector<NetworkInterface>& interfaces,
                                const std::vector<std::uint16_t>& ports, const ConnectHandle& handle,
                                const NicPath* in_use) {
  const auto path = [&](std::size_t here, std::size_t there) {
    ConnectHandle named = handle;
    if (there > 0) {
      named.address = handle.further[there - 1].bytes;
      named.port = handle.further[there - 1].port;
      named.scope_id = 0;
    }
    return NicPath{interfaces[here], address_in(named, interfaces[here]),
                   here < ports.size() ? ports[here] : std::uint16_t{0}};
  };
  const NicPath first = in_use == nullptr ? path(0, 0) : *in_use;
  const bool is_one = interfaces.size() == 1 && handle.further.empty();
  if (is_one || is_of_other_family(interfaces, handle) || is_of_this_host(first.address)) return {first};
  std::vector<InterfaceAddress> rows;
  if (!list_interface_addresses(&rows).is_ok()) return {first};
  std::vector<std::vector<NicPairing>> pairings(interfaces.size());
  std::vector<NicPair> pair_in_use;
  for (std::size_t here = 0; here < interfaces.size(); ++here) {
    for (std::size_t there = 0; there <= handle.further.size(); ++there) {
      const SocketAddress to = path(here, there).address;
      if (in_use != nullptr && in_use->interface.name == interfaces[here].name && in_use->address.same_host(to)) {
        pair_in_use = {{here, there}};
      }
      NicPairing& pairing = pairings[here].emplace_back();
      pairing.same_subnet = std::any_of(rows.begin(), rows.end(), [&](const InterfaceAddress& row) {
        return row.name == interfaces[here].name && row.address.same_host(interfaces[here].address) &&
               same_subnet(row, to);
      });
      pairing.is_routed = has_route_over(to, interfaces[here]);
    }
  }
  std::vector<NicPath> paths;
  for (const auto& [here, there] : pair_nics(pairings, pair_in_use)) paths.push_back(path(here, there));
  return paths;
}

std::size_t expected_paths(const std::vector<NicPath>& paths, const std::vector<NetworkInterface>& interfaces,
                           const ConnectHandle& handle) {
  if (paths.size() == 1) return 1;
  return std::min(paths.size() + handle.unnamed, std::max(interfaces.size(), handle.addresses()));
}

RareLog::Line describe_mismatch(const std::vector<NetworkInterface>& interfaces, const ConnectHandle& handle,
                                const std::vector<NicPath>& paths) {
  const std::size_t here = interfaces.size();
  const std::size_t there = handle.addresses();
  if ((here == 1 && there == 1) || is_of_this_host(paths[0].address)) return {};
  const std::string peer = paths[0].address.host();
  const std::string kind = "interfaces " + peer;
  std::string names;
  for (const NetworkInterface& interface : interfaces) names += (names.empty() ? "" : "+") + interface.name;
  if (is_of_other_family(interfaces, handle)) {
    return {LogLevel::kWarn,
            "Bagua-Net: joined interfaces cannot be used together between " + names + " (" +
                interfaces[0].address.host() + ") and " + peer +
                ", an address of the other family. The kernel chooses the way. Set "
                "NCCL_SOCKET_FAMILY alike on every rank (AF_INET or AF_INET6)",
            kind};
  }
  std::set<std::string> used_here;
  std::set<std::string> used_there;
  std::string pairs;
  for (const NicPath& path : paths) {
    used_here.insert(path.interface.name);
    used_there.insert(path.address.host());
    pairs += (pairs.empty() ? "" : ", ") + path.interface.name + " to " + path.address.host();
  }
  if (here == there && used_here.size() == here && used_there.size() == there) return {};
  return {LogLevel::kInfo,
          "Bagua-Net: " + names + " here and " + std::to_string(there) + (there == 1 ? " interface" : " interfaces") +
              " of the peer at " + peer + " are used as " + pairs +
              ". If more should be, check BAGUA_NET_JOIN_NICS and NCCL_SOCKET_IFNAME on both hosts, and "
              "the routes",
          kind};
}

std::vector<std::size_t> share_paths(std::size_t streams, std::size_t paths, std::size_t first, bool first_is_small) {
  std::vector<std::size_t> own = {first};
  for (std::size_t next = first_is_small ? 0 : first + 1; own.size() < streams; ++next) own.push_back(next % paths);
  return own;
}

bool PathExperience::is_left_out(const NicPath& path, std::int64_t now_ms) const {
  const auto found = records_.find(key_of(path));
  return found != records_.end() && now_ms < found->second.left_out_until_ms;
}

std::vector<std::size_t> PathExperience::usable(const std::vector<NicPath>& paths, std::int64_t now_ms) const {
  std::vector<std::size_t> indices;
  for (std::size_t index = 0; index < paths.size(); ++index) {
    if (!is_left_out(paths[index], now_ms)) indices.push_back(index);
  }
  if (!indices.empty()) return indices;
  for (std::size_t index = 0; index < paths.size(); ++index) indices.push_back(index);
  return indices;
}

void PathExperience::on_connected(const NicPath& path, std::int64_t round_trip_us) {
  Record& record = records_[key_of(path)];
  const std::int64_t known_us = record.round_trip_us;
  if (known_us > 0) round_trip_us = round_trip_us > 0 ? std::min(known_us, round_trip_us) : known_us;
  record = {true, 0, 0, round_trip_us};
}

std::int64_t PathExperience::round_trip_us(const NicPath& path) const {
  const auto found = records_.find(key_of(path));
  return found == records_.end() ? 0 : found->second.round_trip_us;
}

bool PathExperience::is_longer(const NicPath& path, const NicPath& than, std::int64_t noise_us) const {
  const std::int64_t its_us = round_trip_us(path);
  const std::int64_t other_us = round_trip_us(than);
  return other_us > 0 && its_us > 2 * other_us && its_us > other_us + noise_us;
}

std::size_t PathExperience::nearest(const std::vector<NicPath>& paths, std::size_t chosen, std::int64_t now_ms) const {
  std::size_t best = chosen;
  for (const std::size_t index : usable(paths, now_ms)) {
    if (is_longer(paths[best], paths[index], kNoiseUs)) best = index;
  }
  return best;
}

std::size_t PathExperience::begin_comm(const std::vector<NicPath>& paths, std::int64_t now_ms) {
  const std::vector<std::size_t> indices = usable(paths, now_ms);
  const std::size_t nearest = this->nearest(paths, indices.front(), now_ms);
  std::vector<std::size_t> fastest = {nearest};
  for (const std::size_t index : indices) {
    const int its_mbps = paths[index].interface.speed_mbps;
    const int best_mbps = paths[fastest.front()].interface.speed_mbps;
    if (index == nearest || best_mbps == 0 || its_mbps < best_mbps) continue;
    if (is_longer(paths[index], paths[nearest], kLittleNoiseUs)) continue;
    if (its_mbps > best_mbps) fastest.clear();
    fastest.push_back(index);
  }
  std::sort(fastest.begin(), fastest.end());
  const auto known = turns_.try_emplace(paths.front().address.host(), turn_ + turns_.size()).first;
  return fastest[known->second++ % fastest.size()];
}

void PathExperience::on_failed(const NicPath& path, const Status& why, std::int64_t now_ms) {
  Record& record = records_[key_of(path)];
  if (++record.failures < kFailuresToLeaveOut || record.has_worked || now_ms < record.left_out_until_ms) return;
  record.left_out_until_ms = now_ms + kTryAgainMs;
  record.failures = 0;
  log_->add_if_due(LogLevel::kWarn, "path " + path.interface.name + path.address.host(), [&] {
    return "Bagua-Net: " + path.address.host() + " cannot be reached over " + path.interface.name + " (" +
           path.interface.address.host() + "): " + why.message() +
           ". This pair of interfaces is left out, and others carry its share";
  });
}

}  // namespace bagua_net

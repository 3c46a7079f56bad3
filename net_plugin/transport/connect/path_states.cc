#include "transport/connect/path_states.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>

#include "base/owned_fd.h"
#include "os/network_interface.h"
#include "os/tcp_socket.h"
#include "transport/connect/handshake_ends.h"
#include "transport/recovery/recovery_timing.h"
#include "wire/handshake_message.h"

namespace bagua_net {
namespace {

// One packet may be lost, and the kernel repeats it after a second: the second attempt waits for that.
constexpr int kFailuresToLeaveOut = 2;
// For hosts whose network changes while the job runs. Each time costs one comm 2.8 s.
constexpr std::int64_t kRefusedPathMs = 60000;
// Round trips of a single handshake vary by this much where the hosts are busy, as at the start of a job.
constexpr std::int64_t kNoiseUs = 500;
// And the shortest of several by this much.
constexpr std::int64_t kLittleNoiseUs = 100;
constexpr int kSeveral = 4;

// Comms ask once a second, and all are to get the same answer.
constexpr std::int64_t kKnownMs = 1000;
// Between attempts. The nearest healthy situation is a firewall that never lets this pair connect, or refuses it at
// once: that costs a packet a second, for as long as the job runs.
constexpr std::int64_t kTryPathAgainMs = 1000;
// One may be lost, or answered late.
constexpr int kLostPackets = 2;
// A probe or connections that were not answered keep new ones away until the next probe, and not for longer: the
// nearest healthy situation is a path that lost a packet, and that nobody asks about any more.
constexpr std::int64_t kUnansweredMs = 2 * (kTryPathAgainMs + kConnectAnswerMs);

// The nearest healthy situation: a cable with a loose contact, which should carry what it can. So a stream that stays
// for this long after its return counts as one that works.
constexpr std::int64_t kProvenMs = 4000;
constexpr std::int64_t kFirstPauseMs = 2000;
constexpr std::int64_t kLongestPauseMs = 60000;

}  // namespace

PathStates::Record& PathStates::record(const NicPath& path) {
  const auto [found, is_new] = records_.try_emplace({path.interface.name, path.address.host()});
  if (is_new) found->second.is_routed = has_route_over(path.address, path.interface);
  found->second.path = path;  // its port may be another listener's
  return found->second;
}

const PathStates::Record* PathStates::find(const NicPath& path) const {
  const auto found = records_.find({path.interface.name, path.address.host()});
  return found == records_.end() ? nullptr : &found->second;
}

void PathStates::set_link(const NetworkInterface& interface, bool is_usable) {
  const MutexLock lock(mutex_);
  if (is_usable) {
    lost_links_.erase(interface.name);
  } else {
    lost_links_[interface.name] = interface;
  }
}

void PathStates::look_at_routes() {
  const MutexLock lock(mutex_);
  for (auto& [key, record] : records_) {
    const bool was_routed = record.is_routed;
    record.is_routed = has_route_over(record.path.address, record.path.interface);
    record.has_lost_route = !record.is_routed && (was_routed || record.has_lost_route);
  }
}

void PathStates::on_address_lost(const NicPath& path) {
  const MutexLock lock(mutex_);
  record(path).has_lost_address = true;
}

std::string PathStates::describe_gone(const Record& record) const {
  const NicPath& path = record.path;
  if (lost_links_.count(path.interface.name) != 0) return "the network interface " + path.interface.name + " is gone";
  if (record.has_lost_route) {
    return "there is no route to " + path.address.host() + " over " + path.interface.name + " any more";
  }
  return record.has_lost_address ? "the peer has lost its address " + path.address.host() : "";
}

std::string PathStates::why_gone(const NicPath& path) {
  const MutexLock lock(mutex_);
  return describe_gone(record(path));
}

std::string PathStates::why_gone(const SocketAddress& own) {
  const MutexLock lock(mutex_);
  for (const auto& [name, interface] : lost_links_) {
    if (interface.address.same_host(own)) return "the network interface " + name + " is gone";
  }
  return "";
}

bool PathStates::leaves_out(const NicPath& path, std::int64_t now_ms) const {
  const Record* const record = find(path);
  if (record == nullptr) return lost_links_.count(path.interface.name) != 0;
  const bool is_silent = record->silent_ms != 0 && record->silent_ms >= record->worked_ms;
  const bool is_unanswered =
      record->unanswered_ms > record->worked_ms && now_ms < record->unanswered_ms + kUnansweredMs;
  return is_silent || is_unanswered || now_ms < record->refused_until_ms || !describe_gone(*record).empty();
}

std::vector<std::size_t> PathStates::usable_of(const std::vector<NicPath>& paths, std::int64_t now_ms) const {
  std::vector<std::size_t> indices;
  for (std::size_t index = 0; index < paths.size(); ++index) {
    if (!leaves_out(paths[index], now_ms)) indices.push_back(index);
  }
  if (!indices.empty()) return indices;
  for (std::size_t index = 0; index < paths.size(); ++index) indices.push_back(index);
  return indices;
}

std::vector<std::size_t> PathStates::usable(const std::vector<NicPath>& paths, std::int64_t now_ms) {
  const MutexLock lock(mutex_);
  return usable_of(paths, now_ms);
}

bool PathStates::is_left_out(const NicPath& path, std::int64_t now_ms) {
  const MutexLock lock(mutex_);
  return leaves_out(path, now_ms);
}

bool PathStates::has_worked(const NicPath& path) {
  const MutexLock lock(mutex_);
  const Record* const known = find(path);
  return known != nullptr && known->has_worked;
}

void PathStates::note_working(Record& record, std::int64_t now_ms) {
  record.has_worked = true;
  record.has_lost_address = false;
  record.worked_ms = now_ms;
  record.failures = 0;
  record.refused_until_ms = 0;
}

void PathStates::on_connected(const NicPath& path, std::int64_t round_trip_us, std::int64_t now_ms) {
  const MutexLock lock(mutex_);
  Record& connected = record(path);
  note_working(connected, now_ms);
  if (round_trip_us > 0) ++connected.handshakes;
  const std::int64_t known_us = connected.round_trip_us;
  if (known_us > 0) round_trip_us = round_trip_us > 0 ? std::min(known_us, round_trip_us) : known_us;
  connected.round_trip_us = round_trip_us;
}

RareLog::Line PathStates::on_failed(const NicPath& path, const Status& why, std::int64_t now_ms) {
  const MutexLock lock(mutex_);
  Record& failed = record(path);
  if (++failed.failures < kFailuresToLeaveOut || now_ms < failed.refused_until_ms) return {};
  if (failed.has_worked) {
    failed.unanswered_ms = now_ms;
    return {};
  }
  failed.refused_until_ms = now_ms + kRefusedPathMs;
  failed.failures = 0;
  return {LogLevel::kWarn,
          "Bagua-Net: " + path.address.host() + " cannot be reached over " + path.interface.name + " (" +
              path.interface.address.host() + "): " + why.message() +
              ". This pair of interfaces is left out, and others carry its share",
          "path " + path.interface.name + path.address.host()};
}

bool PathStates::is_longer(const NicPath& path, const NicPath& than, std::int64_t noise_us) const {
  const auto round_trip_us = [this](const NicPath& one) REQUIRES(mutex_) {
    const Record* const known = find(one);
    return known == nullptr ? std::int64_t{0} : known->round_trip_us;
  };
  const std::int64_t its_us = round_trip_us(path);
  const std::int64_t other_us = round_trip_us(than);
  return other_us > 0 && its_us > 2 * other_us && its_us > other_us + noise_us;
}

std::size_t PathStates::nearest_of(const std::vector<NicPath>& paths, std::size_t chosen, std::int64_t now_ms) const {
  std::size_t best = chosen;
  for (const std::size_t index : usable_of(paths, now_ms)) {
    if (is_longer(paths[best], paths[index], kNoiseUs)) best = index;
  }
  return best;
}

std::size_t PathStates::nearest(const std::vector<NicPath>& paths, std::size_t chosen, std::int64_t now_ms) {
  const MutexLock lock(mutex_);
  return nearest_of(paths, chosen, now_ms);
}

std::size_t PathStates::begin_comm(const std::vector<NicPath>& paths, std::int64_t now_ms) {
  const MutexLock lock(mutex_);
  const std::vector<std::size_t> indices = usable_of(paths, now_ms);
  const std::size_t nearest = nearest_of(paths, indices.front(), now_ms);
  std::vector<std::size_t> fastest = {nearest};
  for (const std::size_t index : indices) {
    const int its_mbps = paths[index].interface.speed_mbps;
    const int best_mbps = paths[fastest.front()].interface.speed_mbps;
    if (index == nearest || best_mbps == 0 || its_mbps < best_mbps) continue;
    const Record* const known = find(paths[index]);
    const bool is_sure = known != nullptr && known->handshakes >= kSeveral;
    if (is_longer(paths[index], paths[nearest], is_sure ? kLittleNoiseUs : kNoiseUs)) continue;
    if (its_mbps > best_mbps) fastest.clear();
    fastest.push_back(index);
  }
  std::sort(fastest.begin(), fastest.end());
  const auto known = turns_.try_emplace(paths.front().address.host(), turn_ + turns_.size()).first;
  return fastest[known->second++ % fastest.size()];
}

void PathStates::on_silent(const NicPath& path, std::int64_t now_ms) {
  const MutexLock lock(mutex_);
  record(path).silent_ms = now_ms;
}

std::int64_t PathStates::silent_ms(const NicPath& path) {
  const MutexLock lock(mutex_);
  return record(path).silent_ms;
}

void PathStates::look_for_answer(Record& record, std::int64_t now_ms) {
  const PathProbe::State state = record.probe->look();
  if (state == PathProbe::State::kConnecting) {
    if (now_ms - record.asked_ms < kConnectAnswerMs) return;
    record.unanswered_ms = now_ms;
    record.probe.reset();
    return;
  }
  if (state == PathProbe::State::kFailed) {
    record.probe.reset();
    return;
  }
  if (record.sent_ms == 0) {
    record.sent_ms = now_ms;
    record.packet_bytes = record.probe->packet_bytes();
  }
  if (state == PathProbe::State::kAnswered) {
    note_working(record, now_ms);
    record.found_ms = now_ms;
    record.answered_ms = record.sent_ms;
    record.lost_packets = 0;
    record.is_told = false;
    record.probe.reset();
  } else if (now_ms - record.sent_ms >= kConnectAnswerMs) {
    ++record.lost_packets;
    record.unanswered_ms = now_ms;
    record.probe.reset();
  }
}

bool PathStates::works(const NicPath& path, std::int64_t now_ms) {
  const MutexLock lock(mutex_);
  Record& tried = record(path);
  if (lost_links_.count(path.interface.name) != 0 || tried.has_lost_route) return false;
  if (tried.found_ms != 0 && now_ms - tried.found_ms < kKnownMs && tried.found_ms > tried.silent_ms &&
      !tried.has_lost_address) {
    return true;
  }
  if (tried.probe != nullptr) {
    look_for_answer(tried, now_ms);
    if (tried.found_ms == now_ms) return true;
  }
  if (tried.probe == nullptr && now_ms - tried.asked_ms >= kTryPathAgainMs) {
    tried.asked_ms = now_ms;
    tried.sent_ms = 0;
    tried.probe = begin_probe_(path);
  }
  return false;
}

bool PathStates::is_due(const NicPath& path) {
  const MutexLock lock(mutex_);
  const Record& tried = record(path);
  return tried.probe != nullptr && tried.sent_ms != 0;
}

std::int64_t PathStates::answered_ms(const NicPath& path) {
  const MutexLock lock(mutex_);
  return record(path).answered_ms;
}

std::size_t PathStates::take_lost_packet_bytes(const NicPath& path) {
  const MutexLock lock(mutex_);
  Record& tried = record(path);
  if (tried.lost_packets < kLostPackets || tried.is_told) return 0;
  tried.is_told = true;
  return tried.packet_bytes;
}

void PathStates::on_left(const NicPath& path, std::int64_t now_ms) {
  const MutexLock lock(mutex_);
  Record& left = record(path);
  if (now_ms < left.return_ms) return;
  const bool is_proven = now_ms - left.returned_ms >= kProvenMs;
  left.pause_ms = is_proven ? 0 : std::clamp(2 * left.pause_ms, kFirstPauseMs, kLongestPauseMs);
  left.return_ms = now_ms + left.pause_ms;
}

void PathStates::on_returned(const NicPath& path, std::int64_t now_ms) {
  const MutexLock lock(mutex_);
  record(path).returned_ms = now_ms;
}

bool PathStates::may_return(const NicPath& path, std::int64_t now_ms) {
  const MutexLock lock(mutex_);
  return now_ms >= record(path).return_ms;
}

std::shared_ptr<PathLoad> PathStates::load(const NicPath& path, double rate) {
  const MutexLock lock(mutex_);
  std::shared_ptr<PathLoad>& load = record(path).load;
  if (load == nullptr) load = std::make_shared<PathLoad>(rate);
  return load;
}

namespace {

class TcpProbe final : public PathProbe {
 public:
  explicit TcpProbe(OwnedFd socket) : socket_(std::move(socket)) {}
  // With a reset: the kernel would repeat the packet for a quarter of an hour.
  ~TcpProbe() override {
    const linger reset{1, 0};
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
  }

  State look() override {
    pollfd state{socket_.get(), POLLOUT, 0};
    const bool has_event = ::poll(&state, 1, 0) > 0;
    if (packet_bytes_ == 0) {
      if (!has_event) return State::kConnecting;
      if (tcp_connect_result(socket_.get()) != 0) return State::kFailed;
      packet_bytes_ = std::max(tcp_packet_bytes(socket_.get()), kHelloBytes);
      send_packet();
      return State::kWaiting;
    }
    // The peer's process may have reset the connection, once its kernel had the packet.
    const bool is_reset = has_event && (state.revents & (POLLERR | POLLHUP)) != 0;
    return is_reset || tcp_undelivered_bytes(socket_.get()) == 0 ? State::kAnswered : State::kWaiting;
  }

  std::size_t packet_bytes() const override { return packet_bytes_; }

 private:
  void send_packet() {
    std::vector<std::uint8_t> packet(packet_bytes_);
    Hello hello;
    hello.stream_index = kAskingStream;
    encode_hello(hello, packet.data());
    [[maybe_unused]] const int ignored = write_handshake(socket_.get(), packet.data(), packet.size());
  }

  OwnedFd socket_;
  std::size_t packet_bytes_ = 0;  // 0: it is not connected yet
};

}  // namespace

std::unique_ptr<PathProbe> begin_tcp_probe(const NicPath& path) {
  OwnedFd socket;
  if (!tcp_connect(path.address, {}, &path.interface, &socket).is_ok()) return nullptr;
  return std::make_unique<TcpProbe>(std::move(socket));
}

}  // namespace bagua_net

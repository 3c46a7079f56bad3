#include "transport/comm/send_paths.h"

#include <algorithm>
#include <optional>

#include "transport/recovery/recovery_timing.h"

namespace bagua_net {
namespace {

// How often it is looked whether the paths of streams that go over others work again.
constexpr int kReturnMs = 1000;

}  // namespace

SendPaths::SendPaths(const SendPolicy& policy, bool recovers)
    : paths_(policy.paths),
      states_(policy.path_states.get()),
      can_leave_(policy.paths.size() > 1 && recovers),
      places_(policy.first_paths, policy.own_paths, policy.paths, policy.path_states.get()),
      silence_(policy.max_silence_s, recovers, policy.paths.size() > 1) {}

std::string SendPaths::way_of(std::size_t place) const {
  return has_choice() ? " over " + paths_[path_of(place)].interface.name : "";
}

void SendPaths::on_joined(std::size_t place, std::size_t path, bool is_more, std::int64_t now_ms) {
  joined_ms_[place] = now_ms;
  places_.on_joined(place, path, is_more, now_ms);
}

bool SendPaths::on_lost(std::size_t place, std::int64_t now_ms) {
  const std::uint64_t bit = std::uint64_t{1} << place;
  const bool is_told = (told_ & bit) != 0;
  told_ &= ~bit;
  places_.on_lost(place, is_told, now_ms);
  return is_told;
}

std::vector<SendPaths::Loss> SendPaths::leave_gone(std::uint64_t live) {
  std::vector<Loss> lost;
  if (!can_leave_) return lost;
  std::vector<std::string> why;
  for (const NicPath& path : paths_) why.push_back(states_->why_gone(path));
  // Without another one, it is waited for as in any outage.
  if (std::none_of(why.begin(), why.end(), [](const std::string& reason) { return reason.empty(); })) return lost;
  for (; live != 0; live &= live - 1) {
    const auto place = static_cast<std::size_t>(__builtin_ctzll(live));
    if (why[path_of(place)].empty()) continue;
    told_ |= live & -live;
    lost.push_back({place, why[path_of(place)]});
  }
  return lost;
}

SendPaths::Verdict SendPaths::look(const PeerSilence::Observations& observations, std::int64_t now_ms) {
  Verdict verdict;
  for (std::size_t place = 0; place < observations.size(); ++place) {
    const std::optional<PeerSilence::Observation>& observation = observations[place];
    if (!observation.has_value() || !is_silent_elsewhere(place, *observation, now_ms)) continue;
    verdict.lost.push_back({place, "other connections over its network interface are not answered"});
  }
  if (!verdict.lost.empty()) return verdict;
  const PeerSilence::Verdict silent =
      silence_.check(observations, now_ms, [&](std::size_t path) { return ask_elsewhere(path, now_ms); });
  for (const PeerSilence::Silent& stream : silent.streams) {
    if (has_choice()) states_->on_silent(paths_[path_of(stream.index)], now_ms);
    verdict.lost.push_back({stream.index, "no answer for " + std::to_string(stream.ms) + " ms on this connection"});
  }
  verdict.host = silent.host;
  return verdict;
}

bool SendPaths::is_silent_elsewhere(std::size_t place, const PeerSilence::Observation& observation,
                                    std::int64_t now_ms) const {
  if (!can_leave_ || observation.is_over) return false;
  const std::int64_t silent_ms = states_->silent_ms(paths_[path_of(place)]);
  return silent_ms != 0 && std::max(now_ms - observation.liveness.ms, joined_ms_[place]) < silent_ms;
}

std::int64_t SendPaths::ask_elsewhere(std::size_t path, std::int64_t now_ms) const {
  std::int64_t ago_ms = PeerSilence::kNeverAnswered;
  for (std::size_t other = 0; other < paths_.size(); ++other) {
    if (other == path) continue;
    states_->works(paths_[other], now_ms);
    const std::int64_t answered_ms = states_->answered_ms(paths_[other]);
    if (answered_ms != 0) ago_ms = std::min(ago_ms, now_ms - answered_ms);
  }
  return ago_ms;
}

PlacePaths::Moves SendPaths::to_return(std::uint64_t live, const PlacePaths::Prepare& prepare, std::int64_t now_ms,
                                       std::vector<RareLog::Line>* lines) {
  if (!can_leave_ || (now_ms < return_ms_ && !prepares_)) return {};
  probes_ = prepares_ = false;
  const PlacePaths::Moves moves = places_.places_to_move(
      live, [&](std::size_t path) { return probe(path, now_ms, lines); },
      [&](std::size_t place, std::size_t path) {
        const Prepared prepared = prepare(place, path);
        prepares_ |= prepared == Prepared::kWaiting;
        return prepared;
      },
      now_ms);
  return_ms_ = now_ms + (probes_ ? kCheckPathsMs : kReturnMs);
  return moves;
}

bool SendPaths::probe(std::size_t path, std::int64_t now_ms, std::vector<RareLog::Line>* lines) {
  const NicPath& its = paths_[path];
  if (states_->works(its, now_ms)) return true;
  probes_ |= states_->is_due(its);
  if (const std::size_t bytes = states_->take_lost_packet_bytes(its); bytes != 0) {
    lines->push_back({LogLevel::kWarn,
                      "Bagua-Net: connections to " + its.address.host() + " over " + its.interface.name +
                          " open, and packets of " + std::to_string(bytes) +
                          " bytes are not answered: compare the MTU of hosts and switches (ip link). The other "
                          "interfaces carry its share until they are",
                      "packets over " + its.interface.name});
  }
  return false;
}

}  // namespace bagua_net

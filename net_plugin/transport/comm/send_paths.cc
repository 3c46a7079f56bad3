#include "transport/comm/send_paths.h"

#include <algorithm>
#include <optional>

#include "transport/recovery/recovery_timing.h"

namespace bagua_net {

PlacePaths::PlacePaths(const std::vector<std::size_t>& first, const std::vector<std::size_t>& own,
                       const std::vector<NicPath>& paths, PathStates* states)
    : paths_(paths), states_(states) {
  std::copy_n(first.begin(), std::min(first.size(), current_.size()), current_.begin());
  std::copy_n(own.begin(), std::min(own.size(), home_.size()), home_.begin());
}

void PlacePaths::on_joined(std::size_t place, std::size_t path, bool is_more, std::int64_t now_ms) {
  if (path >= paths_.size()) return;
  const std::uint64_t bit = std::uint64_t{1} << place;
  current_[place] = path;
  if (is_more) {
    home_[place] = path;
    more_ |= bit;
  }
  if (home_[place] == path) {
    if (has_choice()) states_->on_returned(paths_[path], now_ms);
  } else if ((moving_ & bit) != 0) {
    pause(home_[place], now_ms);
  }
  moving_ &= ~bit;
}

void PlacePaths::pause(std::size_t path, std::int64_t now_ms) {
  states_->on_returned(paths_[path], now_ms);
  states_->on_left(paths_[path], now_ms);
}

void PlacePaths::on_lost(std::size_t place, bool is_told, std::int64_t now_ms) {
  if (is_told) moving_ &= ~(std::uint64_t{1} << place);
  if (!has_choice() || is_told || (moving_ >> place & 1) != 0) return;
  states_->on_left(paths_[current_[place]], now_ms);
}

std::size_t PlacePaths::replacement_path(std::size_t place, std::uint64_t live) const {
  if ((moving_ >> place & 1) != 0) return home_[place];
  // The one with the most streams has most surely something left.
  std::vector<std::size_t> streams(paths_.size());
  for (; live != 0; live &= live - 1) {
    const std::size_t path = current_[static_cast<std::size_t>(__builtin_ctzll(live))];
    if (path != current_[place]) ++streams[path];
  }
  const auto most = std::max_element(streams.begin(), streams.end());
  if (most != streams.end() && *most > 0) return static_cast<std::size_t>(most - streams.begin());
  return paths_.empty() ? 0 : (current_[place] + 1) % paths_.size();
}

std::size_t PlacePaths::place_for(std::size_t path, std::uint64_t asked) const {
  for (std::uint64_t left = asked; left != 0; left &= left - 1) {
    const auto place = static_cast<std::size_t>(__builtin_ctzll(left));
    if (home_[place] == path) return place;
  }
  return static_cast<std::size_t>(__builtin_ctzll(asked));
}

void PlacePaths::spread_more(std::uint64_t live) {
  std::vector<std::size_t> streams(paths_.size());
  for (std::uint64_t left = live; left != 0; left &= left - 1) {
    ++streams[home_[static_cast<std::size_t>(__builtin_ctzll(left))]];
  }
  for (std::uint64_t left = live & more_ & ~moving_; left != 0; left &= left - 1) {
    std::size_t& home = home_[static_cast<std::size_t>(__builtin_ctzll(left))];
    const auto least = std::min_element(streams.begin(), streams.end());
    // The comm begins with up to one more on one path than on another.
    if (streams[home] < *least + 2) continue;
    --streams[home];
    ++*least;
    home = static_cast<std::size_t>(least - streams.begin());
  }
}

Prepared PlacePaths::prepare_own(std::size_t place, const Prepare& prepare, std::int64_t now_ms) {
  const Prepared prepared = prepare(place, home_[place]);
  if (prepared == Prepared::kFailed) pause(home_[place], now_ms);
  return prepared;
}

PlacePaths::Moves PlacePaths::places_to_move(std::uint64_t live, const Probe& probe, const Prepare& prepare,
                                             std::int64_t now_ms) {
  Moves moves;
  if (!has_choice()) return moves;
  spread_more(live);
  std::vector<std::uint64_t> away(paths_.size());
  for (; live != 0; live &= live - 1) {
    const auto place = static_cast<std::size_t>(__builtin_ctzll(live));
    if (current_[place] != home_[place]) away[home_[place]] |= live & -live;
  }
  for (std::size_t path = 0; path < away.size(); ++path) {
    if (away[path] == 0) continue;
    // Also in a pause, and while streams leave for it: other comms are not to begin with a path that fails meanwhile.
    const bool works = probe(path);
    const bool fails = states_->is_left_out(paths_[path], now_ms);
    for (std::uint64_t left = away[path] & moving_; left != 0; left &= left - 1) {
      const auto place = static_cast<std::size_t>(__builtin_ctzll(left));
      if (fails || prepare_own(place, prepare, now_ms) != Prepared::kReady) moves.stay |= left & -left;
    }
    if (!works || !states_->may_return(paths_[path], now_ms)) continue;
    std::uint64_t ready = 0;
    bool waits = false;
    for (std::uint64_t left = away[path] & ~moving_; left != 0; left &= left - 1) {
      const Prepared prepared = prepare_own(static_cast<std::size_t>(__builtin_ctzll(left)), prepare, now_ms);
      if (prepared == Prepared::kReady) ready |= left & -left;
      waits |= prepared == Prepared::kWaiting;
    }
    if (!waits) moves.leave |= ready;  // together, because none moves while another one is missing
  }
  moving_ = (moving_ | moves.leave) & ~moves.stay;
  return moves;
}

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

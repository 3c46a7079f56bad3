#include "transport/comm/place_paths.h"

#include <algorithm>

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

}  // namespace bagua_net

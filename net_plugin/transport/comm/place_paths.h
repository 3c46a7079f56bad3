// PlacePaths: over which path ([Note: pairs of interfaces] in transport/connect/nic_paths.h) the stream at each place
// of a send comm goes, and over which it should. A lost stream is replaced over another path. Its own path is then
// tried in the background, and once it works again (transport/connect/path_states.h), the stream moves back. Not
// thread-safe: the comm's mutex guards every call.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "transport/chunks/limits.h"
#include "transport/connect/path_states.h"
#include "transport/connect/stream_arrivals.h"

namespace bagua_net {

class PlacePaths {
 public:
  // Whether a path works.
  using Probe = std::function<bool(std::size_t path)>;
  // How far the next connection of a place is over a path.
  using Prepare = std::function<Prepared(std::size_t place, std::size_t path)>;

  // first, own: of each place that the comm begins with, its path and the one that it should have. They differ where
  // that one could not connect. paths, states: outlive this; of fewer than two paths nothing here has an effect.
  PlacePaths(const std::vector<std::size_t>& first, const std::vector<std::size_t>& own,
             const std::vector<NicPath>& paths, PathStates* states);

  bool has_choice() const { return paths_.size() > 1; }
  std::size_t path_of(std::size_t place) const { return current_[place]; }
  const std::array<std::size_t, kMaxStreams>& by_place() const { return current_; }
  // Places whose streams are being given back and replaced over their own path, until something joins there.
  std::uint64_t moving() const { return moving_; }

  // A stream has joined at that place. is_more: it replaces none, so that path is the place's own, unless that leaves
  // another path with fewer.
  void on_joined(std::size_t place, std::size_t path, bool is_more, std::int64_t now_ms);
  // is_told: the kernel has announced that the path cannot be used, so losing it again costs next to nothing. A place
  // that was moving then waits for its path again.
  void on_lost(std::size_t place, bool is_told, std::int64_t now_ms);
  // Of a lost stream's replacement, where to try first. live: places with streams, a bit mask.
  std::size_t replacement_path(std::size_t place, std::uint64_t live) const;
  // Of the places in the bit mask `asked`, the one that a replacement over this path should take. asked is not 0.
  std::size_t place_for(std::size_t path, std::uint64_t asked) const;
  struct Moves {
    std::uint64_t leave = 0;  // the next connections are ready: the streams are to be given back and replaced
    std::uint64_t stay = 0;   // they were to leave and have not yet, and the next connections are gone
  };
  // Of the places in `live`, bit masks: which of their streams move to their own paths. Once a second is enough.
  Moves places_to_move(std::uint64_t live, const Probe& probe, const Prepare& prepare, std::int64_t now_ms);

 private:
  const std::vector<NicPath>& paths_;
  PathStates* const states_;
  std::array<std::size_t, kMaxStreams> home_{};
  std::array<std::size_t, kMaxStreams> current_{};
  std::uint64_t moving_ = 0;
  std::uint64_t more_ = 0;  // places that the comm did not begin with

  // How far the next connection of a place over its own path is.
  Prepared prepare_own(std::size_t place, const Prepare& prepare, std::int64_t now_ms);
  // Its host answers, and no stream could be opened over it.
  void pause(std::size_t path, std::int64_t now_ms);
  // Places in `live` that it did not begin with belong to the paths that lack streams.
  void spread_more(std::uint64_t live);
};

}  // namespace bagua_net

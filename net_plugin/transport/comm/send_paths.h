// SendPaths: over which paths the streams of a send comm go, and which of them are to leave theirs. It decides, from
// what it is told, from what the process knows of its paths (transport/connect/path_states.h) and from the clock that
// it is given; SendComm observes the streams and does what it says. Not thread-safe: the comm's mutex guards every
// call.
//
//   places       which stream belongs to which path            PlacePaths
//   silence      which streams are not answered any more       transport/comm/peer_silence.h
//   leave_gone   a path that the kernel of either host has announced as gone is left at once
//   look         a path is left once a comm of this process has found it silent, or this one has
//   to_return    a stream whose own path works again is to move back, once its next connection is ready
//
// PlacePaths: over which path ([Note: pairs of interfaces] in transport/connect/nic_paths.h) the stream at each place
// of a send comm goes, and over which it should. A lost stream is replaced over another path. Its own path is then
// tried in the background, and once it works again (transport/connect/path_states.h), the stream moves back. Not
// thread-safe: the comm's mutex guards every call.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/log_sink.h"
#include "transport/chunks/limits.h"
#include "transport/comm/peer_silence.h"
#include "transport/comm/send_policy.h"
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

class SendPaths {
 public:
  // policy: outlives this.
  SendPaths(const SendPolicy& policy, bool recovers);

  bool has_choice() const { return places_.has_choice(); }
  std::size_t path_of(std::size_t place) const { return places_.path_of(place); }
  const std::array<std::size_t, kMaxStreams>& by_place() const { return places_.by_place(); }
  // The streams at these places, a bit mask, are on their way back: they take nothing new.
  std::uint64_t moving() const { return places_.moving(); }
  // Of a missing stream: the path over which it is to be opened, if it can.
  std::size_t replacement_path(std::size_t place, std::uint64_t live) const {
    return places_.replacement_path(place, live);
  }
  std::size_t place_for(std::size_t path, std::uint64_t asked) const { return places_.place_for(path, asked); }
  // " over eth1"; empty: there is one path.
  std::string way_of(std::size_t place) const;

  // A connection was opened for the stream at this place, which is about to join.
  void on_opened(std::size_t place, std::int64_t now_ms) { silence_.add_stream(place, now_ms); }
  void on_joined(std::size_t place, std::size_t path, bool is_more, std::int64_t now_ms);
  // Returns whether that its path is gone was announced.
  bool on_lost(std::size_t place, std::int64_t now_ms);
  void on_acknowledgement() { silence_.on_acknowledgement(); }

  // A stream that is to be taken away from its connection.
  struct Loss {
    std::size_t place = 0;
    std::string why;
  };
  // live: the places with streams, a bit mask.
  std::vector<Loss> leave_gone(std::uint64_t live);

  // Whether to observe the streams and call look().
  bool is_look_due(std::int64_t now_ms) { return silence_.is_due(now_ms); }
  struct Verdict {
    std::vector<Loss> lost;
    std::string host;  // not empty: the peer's host has vanished, for this reason
  };
  Verdict look(const PeerSilence::Observations& observations, std::int64_t now_ms);

  // Which streams move to their own paths. To be called while no stream is missing; looks once a second, or sooner if
  // an answer is expected. lines: for the log.
  PlacePaths::Moves to_return(std::uint64_t live, const PlacePaths::Prepare& prepare, std::int64_t now_ms,
                              std::vector<RareLog::Line>* lines);

  // Something is to be looked at again kCheckPathsMs later.
  bool looks_again() const { return silence_.is_suspicious() || probes_; }

 private:
  // Streams of other comms over the same path were not answered, and this one has not been since then.
  bool is_silent_elsewhere(std::size_t place, const PeerSilence::Observation& observation, std::int64_t now_ms) const;
  // How long ago a packet was sent that the peer's host has answered over another path (PeerSilence::AskElsewhere).
  std::int64_t ask_elsewhere(std::size_t path, std::int64_t now_ms) const;
  // Whether packets are answered over the path.
  bool probe(std::size_t path, std::int64_t now_ms, std::vector<RareLog::Line>* lines);

  const std::vector<NicPath>& paths_;
  PathStates* const states_;
  const bool can_leave_;  // there are several, and recovery
  PlacePaths places_;
  PeerSilence silence_;
  std::array<std::int64_t, kMaxStreams> joined_ms_{};  // by place; 0: the comm began with it
  std::uint64_t told_ = 0;                             // places whose path was announced as gone
  std::int64_t return_ms_ = 0;                         // when to look again whether streams can return
  bool probes_ = false;                                // the answer is expected within a round trip
  bool prepares_ = false;                              // connections, which tell when they are ready
};

}  // namespace bagua_net

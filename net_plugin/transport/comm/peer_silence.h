// PeerSilence: decides for a sender which of its streams are not answered any more, and when the peer's host has
// vanished. Observations and the clock are passed in.
//
// [Note: hosts that vanish] The kernel sends keepalive probes only while nothing waits to be acknowledged or sent, so
// they detect a vanished host for a receiver only. A sender's kernel retransmits for a quarter of an hour.
// TCP_USER_TIMEOUT would shorten that, but it would also end connections to a rank that is alive and does not read for
// a while, as during a long checkpoint. So the sender checks by itself: the kernel of such a rank answers probes of its
// closed window. A host that has vanished, or is behind a network that drops our packets, answers nothing.
//
// With recovery, a stream that is not answered is replaced first. A vanished host answers no new connection either.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "transport/chunks/limits.h"
#include "transport/stream/byte_stream.h"

namespace bagua_net {

// One packet may be lost, and the answer to the second may be in flight.
constexpr int kUnansweredTransmissions = 3;
// With several paths, or one and kSilentPathsMs: the third comes only after seconds where queues make round trips long.
constexpr int kUnansweredOfPath = 2;

class PeerSilence {
 public:
  // max_silence_s: after which a host that does not answer is an error; 0: never. has_paths: the streams go over
  // several paths, of which one may be silent.
  PeerSilence(int max_silence_s, bool recovers, bool has_paths = false)
      : max_silence_s_(max_silence_s), recovers_(recovers), has_paths_(has_paths) {}

  // Whether to observe the streams and call check(): at most once a second.
  bool is_due(std::int64_t now_ms);

  // A connection was opened for the stream at this place.
  void add_stream(std::size_t index, std::int64_t now_ms) { answered_ms_[index] = now_ms; }
  // The peer has acknowledged data on some stream.
  void on_acknowledgement() { silent_since_ms_ = 0; }

  struct Silent {
    std::size_t index = 0;
    std::int64_t ms = 0;
  };
  struct Verdict {
    std::vector<Silent> streams;  // to be replaced
    std::string host;             // not empty: the host has vanished, for this reason
  };
  // By place; empty: there is no stream, or the kernel does not say.
  using Observations = std::array<std::optional<PeerLiveness>, kMaxStreams>;
  Verdict check(const Observations& observations, std::int64_t now_ms);

 private:
  const int max_silence_s_;
  const bool recovers_;
  const bool has_paths_;
  std::int64_t due_ms_ = 0;
  std::array<std::int64_t, kMaxStreams> answered_ms_{};  // when a check last found that everything sent was answered
  // Since when nothing was acknowledged after a stream was lost for silence; 0: something was.
  std::int64_t silent_since_ms_ = 0;
};

}  // namespace bagua_net

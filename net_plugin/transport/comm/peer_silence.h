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
//
// [Note: silent paths] Where a comm has several paths, one that is silent is to be left soon, and time alone proves
// nothing: the nearest healthy situations are a machine on which nothing gets its turn, a virtual machine that is
// paused, and a peer's host in that state. So a path is silent if all of this holds, of which none depends on a
// process of the peer:
//
// - What it was to answer was sent again, and left this host's queues.
// - So much time has passed between these transmissions by the kernel's timers, not only on the clock.
// - Two looks, kCheckPathsMs apart, found it so: what had arrived by the first was answered by the second.
// - It was looked at for so long (ActiveClock): this process was not stopped meanwhile.
// - The peer's host answered over another path meanwhile. If nothing is under way there, it is asked.
//
// Without the last, it may be the host, which gets kSilentStreamMs.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "base/monotonic_clock.h"
#include "transport/chunks/limits.h"
#include "transport/stream/byte_stream.h"

namespace bagua_net {

// One packet may be lost, and the answer to the second may be in flight.
constexpr int kUnansweredTransmissions = 3;
// With several paths, or one and kSilentLongPathMs: the third comes only after seconds where queues make round trips
// long.
constexpr int kUnansweredOfPath = 2;

class PeerSilence {
 public:
  // max_silence_s: after which a host that does not answer is an error; 0: never, and single streams are replaced all
  // the same. has_paths: the streams go over several paths, of which one may be silent.
  PeerSilence(int max_silence_s, bool recovers, bool has_paths = false);

  // Whether to observe the streams and call check(): at most once a second, with several paths five times.
  bool is_due(std::int64_t now_ms);
  // The last check found something that it is to look at again, kCheckPathsMs later.
  bool is_suspicious() const { return is_suspicious_; }

  // A connection was opened for the stream at this place.
  void add_stream(std::size_t index, std::int64_t now_ms) {
    answered_ms_[index] = clock_.at(now_ms);
    suspected_ &= ~(std::uint64_t{1} << index);
  }
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
  struct Observation {
    PeerLiveness liveness;
    std::size_t path = 0;
    bool is_over = false;  // it was lost or ended, and is about to go
  };
  // By place; empty: there is no stream, or the kernel does not say.
  using Observations = std::array<std::optional<Observation>, kMaxStreams>;
  // Asks the peer's host over other paths than this one. Returns how long ago the last question was sent that was
  // answered; not later than a second after it was asked first.
  using AskElsewhere = std::function<std::int64_t(std::size_t path)>;
  static constexpr std::int64_t kNeverAnswered = std::numeric_limits<std::int64_t>::max();
  Verdict check(
      const Observations& observations, std::int64_t now_ms,
      const AskElsewhere& ask = [](std::size_t) { return kNeverAnswered; });

 private:
  // How long a stream may be silent that has been for so long.
  std::int64_t path_limit_ms(const Observation& observation, std::int64_t silent_ms, const Observations& observations,
                             const AskElsewhere& ask) const;

  const int max_silence_s_;
  const bool recovers_;
  const bool has_paths_;
  std::int64_t due_ms_ = 0;
  // Observations from before a pause do not apply to what is sent now, and what the kernel has sent while this process
  // was stopped may just be under way.
  ActiveClock clock_;
  // By clock_, when a check last found that everything sent was answered.
  std::array<std::int64_t, kMaxStreams> answered_ms_{};
  // Since when nothing was acknowledged after a stream was lost for silence; 0: something was.
  std::int64_t silent_since_ms_ = 0;
  std::uint64_t suspected_ = 0;  // places that the last check found silent for their limit, of several paths
  bool is_suspicious_ = false;
};

}  // namespace bagua_net

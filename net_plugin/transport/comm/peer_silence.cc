#include "transport/comm/peer_silence.h"

#include <algorithm>
#include <utility>

#include "transport/recovery/recovery_timing.h"

namespace bagua_net {
namespace {

constexpr int kCheckMs = 1000;
// A look may come late by as much.
constexpr int kMaxCheckMs = 2 * kCheckMs;

}  // namespace

PeerSilence::PeerSilence(int max_silence_s, bool recovers, bool has_paths)
    : max_silence_s_(max_silence_s),
      recovers_(recovers),
      has_paths_(has_paths),
      clock_(has_paths ? kCheckPathsMs : kMaxCheckMs) {}

bool PeerSilence::is_due(std::int64_t now_ms) {
  if (now_ms < due_ms_) return false;
  clock_.look(now_ms);
  due_ms_ = now_ms + (has_paths_ ? kCheckPathsMs : kCheckMs);
  return true;
}

std::int64_t PeerSilence::path_limit_ms(const Observation& observation, std::int64_t silent_ms,
                                        const Observations& observations, const AskElsewhere& ask) const {
  const PeerLiveness& liveness = observation.liveness;
  if (!liveness.went_out) return kSilentStreamMs;
  const std::int64_t limit_ms = liveness.transmissions >= kUnansweredOfPath ? kSilentPathMs : kSilentLongPathMs;
  if (silent_ms < limit_ms) return limit_ms;
  // An answer elsewhere that came at once says nothing of what happened to the host then.
  const std::int64_t elsewhere_ms = silent_ms - kSilentPathMs / 2;
  for (const std::optional<Observation>& other : observations) {
    if (other.has_value() && other->path != observation.path && other->liveness.ms <= elsewhere_ms) return limit_ms;
  }
  return ask(observation.path) <= elsewhere_ms ? limit_ms : kSilentStreamMs;
}

PeerSilence::Verdict PeerSilence::check(const Observations& observations, std::int64_t now_ms,
                                        const AskElsewhere& ask) {
  now_ms = clock_.at(now_ms);
  const std::int64_t max_silence_ms = max_silence_s_ == 0 ? kNeverAnswered : std::int64_t{max_silence_s_} * 1000;
  std::vector<std::pair<Silent, Observation>> silent;
  std::int64_t last_answer_ms = max_silence_ms;
  for (std::size_t index = 0; index < observations.size(); ++index) {
    const std::optional<Observation>& observed = observations[index];
    if (!observed.has_value()) continue;
    const PeerLiveness& liveness = observed->liveness;
    last_answer_ms = std::min(last_answer_ms, liveness.ms);
    if (liveness.transmissions == 0) {
      answered_ms_[index] = now_ms;
    } else if (liveness.transmissions >= (has_paths_ ? 1 : kUnansweredTransmissions)) {
      // The last answer may be old because the stream had nothing to send.
      const std::int64_t silent_ms = std::min({liveness.ms, now_ms - answered_ms_[index], liveness.unanswered_ms});
      if (silent_ms > 0) silent.push_back({{index, silent_ms}, *observed});
    }
  }
  is_suspicious_ = has_paths_ && !silent.empty();
  const std::uint64_t suspected = std::exchange(suspected_, 0);
  const std::int64_t longest_ms = max_silence_ms / kSilentShare;

  Verdict verdict;
  for (const auto& [stream, observation] : silent) {
    // A host that answers on another stream has not vanished.
    const std::int64_t quiet_ms = recovers_ ? std::min(stream.ms, last_answer_ms) : stream.ms;
    const std::int64_t host_ms = silent_since_ms_ != 0 ? now_ms - silent_since_ms_ : quiet_ms;
    if (host_ms >= max_silence_ms) {
      verdict.host =
          "that host has not answered for " + std::to_string(host_ms / 1000) + " s, though data was sent again " +
          std::to_string(observation.liveness.transmissions) +
          " times: it or the network is down, or the network drops packets of " +
          std::to_string(observation.liveness.packet_bytes) +
          " bytes (compare the MTU of hosts and switches). BAGUA_NET_KEEPALIVE_S=" + std::to_string(max_silence_s_) +
          " sets how long to wait";
      return verdict;
    }
    if (!recovers_) continue;
    std::int64_t limit_ms = longest_ms;
    if (has_paths_) {
      limit_ms = std::min(limit_ms, path_limit_ms(observation, stream.ms, observations, ask));
    } else if (last_answer_ms <= kRecentAnswerMs) {
      limit_ms = std::min<std::int64_t>(limit_ms, kSilentStreamMs);
    }
    if (stream.ms < limit_ms) continue;
    const std::uint64_t bit = std::uint64_t{1} << stream.index;
    suspected_ |= bit;
    if (has_paths_ && (suspected & bit) == 0) continue;
    silent_since_ms_ = now_ms - host_ms;
    verdict.streams.push_back(stream);
  }
  return verdict;
}

}  // namespace bagua_net

#include "transport/comm/peer_silence.h"

#include <algorithm>
#include <utility>

#include "transport/recovery/recovery_timing.h"

namespace bagua_net {
namespace {

constexpr int kCheckMs = 1000;
constexpr int kCheckPathsMs = 200;
constexpr int kForgetMs = 5000;

}  // namespace

bool PeerSilence::is_due(std::int64_t now_ms) {
  if (max_silence_s_ == 0 || now_ms < due_ms_) return false;
  // Observations from before a pause without traffic do not apply to what is sent now.
  if (now_ms - due_ms_ > kForgetMs) answered_ms_.fill(now_ms);
  due_ms_ = now_ms + (has_paths_ ? kCheckPathsMs : kCheckMs);
  return true;
}

PeerSilence::Verdict PeerSilence::check(const Observations& observations, std::int64_t now_ms) {
  const std::int64_t max_silence_ms = std::int64_t{max_silence_s_} * 1000;
  std::vector<std::pair<Silent, PeerLiveness>> silent;
  std::int64_t last_answer_ms = max_silence_ms;
  std::size_t streams = 0;
  for (std::size_t index = 0; index < observations.size(); ++index) {
    const std::optional<PeerLiveness>& observed = observations[index];
    if (!observed.has_value()) continue;
    const PeerLiveness& liveness = *observed;
    ++streams;
    last_answer_ms = std::min(last_answer_ms, liveness.ms);
    if (liveness.transmissions == 0) {
      answered_ms_[index] = now_ms;
    } else if (liveness.transmissions >= (has_paths_ ? 1 : kUnansweredTransmissions)) {
      // The last answer may be old because the stream had nothing to send.
      const std::int64_t silent_ms = std::min(liveness.ms, now_ms - answered_ms_[index]);
      if (silent_ms > 0) silent.push_back({{index, silent_ms}, liveness});
    }
  }
  std::int64_t stream_ms = max_silence_ms / kSilentShare;
  if (last_answer_ms <= kRecentAnswerMs) stream_ms = std::min<std::int64_t>(kSilentStreamMs, stream_ms);
  // The streams of other paths may have delivered all they had, and have nothing to be answered. All may go over one
  // path, until the others work again. If it is an outage of the host, replacing these streams does no harm.
  if (has_paths_) {
    stream_ms = std::min<std::int64_t>(silent.size() < streams ? kSilentPathMs : kSilentPathsMs, stream_ms);
  }

  Verdict verdict;
  for (const auto& [stream, liveness] : silent) {
    // A host that answers on another stream has not vanished.
    const std::int64_t quiet_ms = recovers_ ? std::min(stream.ms, last_answer_ms) : stream.ms;
    const std::int64_t host_ms = silent_since_ms_ != 0 ? now_ms - silent_since_ms_ : quiet_ms;
    if (host_ms >= max_silence_ms) {
      verdict.host =
          "that host has not answered for " + std::to_string(host_ms / 1000) + " s, though data was sent again " +
          std::to_string(liveness.transmissions) +
          " times: it or the network is down, or the network drops packets of " +
          std::to_string(liveness.packet_bytes) +
          " bytes (compare the MTU of hosts and switches). BAGUA_NET_KEEPALIVE_S=" + std::to_string(max_silence_s_) +
          " sets how long to wait";
      return verdict;
    }
    const bool is_repeated = !has_paths_ || liveness.transmissions >= kUnansweredOfPath;
    if (!recovers_ || stream.ms < stream_ms || (!is_repeated && stream.ms < kSilentPathsMs)) continue;
    silent_since_ms_ = now_ms - host_ms;
    verdict.streams.push_back(stream);
  }
  return verdict;
}

}  // namespace bagua_net

// RecoveryTiming: how long the two ends of a connection wait. Each end relies on the times of the other.
//
// - A connection is opened. The connector opens another one if its hello or its proof is not answered within
//   kConnectAnswerMs or kLongConnectAnswerMs, in turn, and kConnectAgainMs after it was lost or refused. Meanwhile the
//   listener keeps the connections that have joined, for kRejoinMs.
// - A connection is silent. The sender replaces it after kSilentStreamMs if another connection of the comm is answered,
//   otherwise after a third of BAGUA_NET_KEEPALIVE_S. The receiver loses it after two thirds of that time, which leaves
//   the last third to the sender.
// - Nothing is acknowledged. The sender fails the comm after BAGUA_NET_KEEPALIVE_S.
// - No connection is left. The receiver asks the sender's process (transport/connect/peer_probe.h), and waits as long
//   as that has the comm. If there is no answer, it waits as long as the sender tries, and kGraceMs longer.
// - Connections are refused for kRefusedMs. The process has ended.
#pragma once

#include <cstdint>

namespace bagua_net {

// The kernel repeats a SYN at growing intervals, and over the same path. A new socket per attempt, together with the
// kernel's first repetition, sends a SYN every second. Every second attempt waits longer, for paths that take a second.
constexpr int kConnectAnswerMs = 900;
constexpr int kLongConnectAnswerMs = 1900;
constexpr int kConnectAgainMs = 100;
constexpr int kRejoinMs = 1000;

constexpr int kSilentStreamMs = 3000;
// Where the interfaces of a device are joined, what one carried waits for this, and until data was sent again twice:
// that takes 0.6 s, or longer than three round trips. More is asked for in [Note: silent paths] of
// transport/comm/peer_silence.h; otherwise it is kSilentStreamMs.
constexpr int kSilentPathMs = 700;
// The same if data was sent again only once, which a long path may answer late.
constexpr int kSilentLongPathMs = 1500;
// Between two looks at a comm of several paths of which one is in doubt.
constexpr int kCheckPathsMs = 200;
constexpr int kRecentAnswerMs = 1000;
// A shorter refusal may come from a comm that has not noticed its loss yet, or from a firewall that is being set up. A
// longer time would delay the error for a killed process beyond two seconds.
constexpr int kRefusedMs = 1500;
// The kernel sends a lost SYN again after a second.
constexpr int kGraceMs = 1500;
constexpr int kSilentShare = 3;

// How long the acknowledgements and probes of a receiving socket may be unanswered.
constexpr int receiver_silence_ms(int keepalive_s) { return keepalive_s * 1000 * (kSilentShare - 1) / kSilentShare; }

}  // namespace bagua_net

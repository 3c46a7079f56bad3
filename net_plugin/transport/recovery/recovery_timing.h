// RecoveryTiming: how long either end of a connection waits for what. In one place, since each relies on the other's.
//
//   a connection is opened          anew if it is not answered within kConnectAnswerMs or kLongConnectAnswerMs by
//   turns,
//                                   and kConnectAgainMs after it was lost or refused; meanwhile the listener keeps what
//                                   has joined for kRejoinMs
//   a connection is silent          the sender replaces it after kSilentStreamMs if another one of the comm is
//   answered,
//                                   or else after a third of BAGUA_NET_KEEPALIVE_S; the receiver gives it up after two
//                                   thirds, and leaves the last third to its sender
//   nothing is acknowledged         the sender fails the comm after BAGUA_NET_KEEPALIVE_S
//   no connection is left           the receiver asks the sender's process (transport/recovery/peer_probe.h). It waits
//   as
//                                   long as that has the comm; without an answer as long as the sender tries, and
//                                   kGraceMs
//   a connection is refused         for kRefusedMs: the process has ended, and not a device on the path changed its
//   mind
#pragma once

#include <cstdint>

namespace bagua_net {

// The kernel repeats what is not answered after longer and longer times, and over the same path. New sockets, and the
// kernel's first repetition, ask once a second instead. Every other one waits longer, for paths that take a second.
constexpr int kConnectAnswerMs = 900;
constexpr int kLongConnectAnswerMs = 1900;
constexpr int kConnectAgainMs = 100;
constexpr int kRejoinMs = 1000;

constexpr int kSilentStreamMs = 3000;
constexpr int kRecentAnswerMs = 1000;
// NCCL's users want to know of a process that was killed within two seconds.
// Until then, a comm that has not noticed its loss yet, or a firewall that is about to let connections pass, may
// refuse.
constexpr int kRefusedMs = 1500;
// A SYN that is lost comes again after a second.
constexpr int kGraceMs = 1500;
constexpr int kSilentShare = 3;

// What a receiving socket's acknowledgements and probes may be unanswered.
constexpr int receiver_silence_ms(int keepalive_s) { return keepalive_s * 1000 * (kSilentShare - 1) / kSilentShare; }

}  // namespace bagua_net

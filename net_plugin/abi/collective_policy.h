// What a collective over Bagua-Net is best run with: a pure function of what it is, of its size and of the
// communicator's shape, so that every rank comes to the same answer. Any thread.
#pragma once

#include <cstddef>

#include "abi/tuner_types.h"

namespace bagua_net::abi {

// One rank per node, few nodes: measured (docs/design/channels.md), and told in full. With more, or several ranks on a
// node, only the number of channels is lowered: NCCL's trees are better than rings there, and it knows the node.
//
// Ranks of two versions that choose otherwise for one collective would hang: kProtocolVersion (wire/connect_handle.h)
// changes with what is chosen here.
constexpr std::size_t kMaxMeasuredRanks = 4;

// Up to so many bytes per rank, NCCL's low latency protocol on one channel is best: one look at one pair of sockets in
// each step.
constexpr std::size_t kLowLatencyBytesPerRank = std::size_t{16} << 10;
// Below so many, the differences are within noise, and NCCL decides.
constexpr std::size_t kMinBytesPerRank = std::size_t{4} << 10;
// Above, a second channel pays for itself if each of its steps carries so many bytes.
constexpr std::size_t kStepBytes = std::size_t{64} << 10;
// And a further one if each carries so many: between hosts a step waits for two wake-ups, however small it is. With
// three or four ranks, which were measured over loopback only, kStepBytes are enough for each of four channels.
constexpr std::size_t kWholeStepBytes = std::size_t{256} << 10;

// A chain from the root has no steps that wait for each other and gains from every channel, but for messages so small
// that NCCL's progress thread moves each of them itself: a channel carries at least so many bytes, until there are
// enough for all.
constexpr std::size_t kBroadcastChannelBytes = std::size_t{64} << 10;
constexpr std::size_t kAllChannelsBroadcastBytes = std::size_t{512} << 10;

// With several ranks on a node, or many nodes, up to so many bytes two channels, and four. NCCL would divide these
// messages among all, which with two nodes of two GPUs takes two to three times as long.
constexpr std::size_t kTwoChannelBytes = std::size_t{1} << 20;
constexpr std::size_t kFourChannelBytes = std::size_t{16} << 20;
// With two nodes, whose links carry a message once or twice.
constexpr std::size_t kFourChannelBytesOfTwoNodes = std::size_t{4} << 20;
// Two ranks on two nodes: from this number of channels on, NCCL decides.
constexpr std::size_t kAllChannels = 8;

enum class RingProtocol {
  kAny,         // NCCL chooses the algorithm and the protocol
  kLowLatency,  // ring, LL
  kSimple,      // ring, Simple
};

struct CollectiveChoice {
  RingProtocol protocol = RingProtocol::kAny;
  int channels = 0;  // at most; 0: NCCL chooses
};

// The protocol is chosen, too.
bool is_measured_shape(std::size_t nodes, std::size_t ranks);

// bytes: NCCL's count, of the larger of a collective's input and output, summed over those that it runs as one.
CollectiveChoice choose_collective(nccl::TunedFunction function, std::size_t bytes, std::size_t nodes,
                                   std::size_t ranks);

}  // namespace bagua_net::abi

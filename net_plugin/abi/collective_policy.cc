#include "abi/collective_policy.h"

#include <algorithm>

namespace bagua_net::abi {
namespace {

// A count that a tuner writes replaces NCCL's, also where NCCL would open fewer. NCCL gives a channel up when its share
// is below 32 KiB (Simple) or 4 KiB per rank (LL on a ring), so above both no count of ours is more than NCCL's own,
// and it never runs more than it has opened.
constexpr std::size_t kSimpleChannelBytes = std::size_t{32} << 10;
constexpr std::size_t kLowLatencyChannelBytesPerRank = std::size_t{4} << 10;

constexpr std::size_t kMaxChannels = 4;

bool goes_round_the_ring(nccl::TunedFunction function) {
  return function == nccl::TunedFunction::kAllReduce || function == nccl::TunedFunction::kAllGather ||
         function == nccl::TunedFunction::kReduceScatter;
}

CollectiveChoice choose_measured(std::size_t bytes, std::size_t ranks) {
  const std::size_t bytes_per_rank = bytes / ranks;
  if (bytes_per_rank < kMinBytesPerRank) return {};
  if (bytes_per_rank <= kLowLatencyBytesPerRank) return {RingProtocol::kLowLatency, 1};
  if (ranks == 2) {
    const std::size_t few = std::clamp<std::size_t>(bytes_per_rank / kStepBytes, 1, 2);
    const std::size_t channels = std::max(few, bytes_per_rank / kWholeStepBytes);
    return {RingProtocol::kSimple, channels < kAllChannels ? static_cast<int>(channels) : 0};
  }
  if (bytes > kFourChannelBytes) return {RingProtocol::kSimple, 0};
  const std::size_t channels = std::clamp<std::size_t>(bytes_per_rank / kStepBytes, 1, kMaxChannels);
  return {RingProtocol::kSimple, static_cast<int>(channels)};
}

CollectiveChoice choose_broadcast(std::size_t bytes) {
  if (bytes >= kAllChannelsBroadcastBytes) return {};
  const std::size_t channels = std::clamp<std::size_t>(bytes / kBroadcastChannelBytes, 1, kMaxChannels);
  return {RingProtocol::kAny, static_cast<int>(channels)};
}

int most_channels(std::size_t bytes, std::size_t nodes, std::size_t ranks) {
  if (bytes > (nodes == 2 ? kFourChannelBytesOfTwoNodes : kFourChannelBytes)) return 0;
  const int count = bytes <= kTwoChannelBytes ? 2 : 4;
  const std::size_t share = std::max(kSimpleChannelBytes, kLowLatencyChannelBytesPerRank * ranks);
  return bytes / share >= static_cast<std::size_t>(count) ? count : 0;
}

}  // namespace

bool is_measured_shape(std::size_t nodes, std::size_t ranks) {
  return nodes >= 2 && nodes == ranks && ranks <= kMaxMeasuredRanks;
}

CollectiveChoice choose_collective(nccl::TunedFunction function, std::size_t bytes, std::size_t nodes,
                                   std::size_t ranks) {
  const bool is_measured = is_measured_shape(nodes, ranks);
  if (is_measured && function == nccl::TunedFunction::kBroadcast) return choose_broadcast(bytes);
  if (!goes_round_the_ring(function)) return {};
  if (is_measured) return choose_measured(bytes, ranks);
  if (nodes < 2) return {};
  return {RingProtocol::kAny, most_channels(bytes, nodes, ranks)};
}

}  // namespace bagua_net::abi

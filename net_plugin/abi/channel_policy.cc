#include "abi/channel_policy.h"

#include <algorithm>

namespace bagua_net::abi {
namespace {

// A count that a tuner writes replaces NCCL's, also where NCCL would open fewer. NCCL gives a channel up when its share
// is below 32 KiB (Simple) or 4 KiB per rank (LL on a ring), so above both no count of ours is more than NCCL's own.
constexpr std::size_t kSimpleChannelBytes = std::size_t{32} << 10;
constexpr std::size_t kLowLatencyChannelBytesPerRank = std::size_t{4} << 10;

}  // namespace

int most_channels(std::size_t bytes, std::size_t nodes, std::size_t ranks) {
  if (nodes <= 2 || bytes > kFourChannelBytes) return 0;
  const int count = bytes <= kTwoChannelBytes ? 2 : 4;
  const std::size_t share = std::max(kSimpleChannelBytes, kLowLatencyChannelBytesPerRank * ranks);
  return bytes / share >= static_cast<std::size_t>(count) ? count : 0;
}

}  // namespace bagua_net::abi

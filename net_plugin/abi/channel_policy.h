// How many channels a collective over Bagua-Net is worth: a pure function of its size and of the communicator's shape,
// so that every rank comes to the same answer. Any thread.
#pragma once

#include <cstddef>

namespace bagua_net::abi {

// Rails (docs/design/channels.md) give NCCL eight channels, which large messages need. A channel also costs the
// progress thread a look at two sockets in every step, and a ring over n nodes has 2(n-1) steps: from three nodes on,
// small and medium messages pay more for the channels than they gain. All-reduce over 4 nodes of one H200 each,
// microseconds:
//
//   channels   64 KiB   256 KiB   1 MiB    4 MiB    16 MiB   64 MiB   256 MiB
//   2          112-166  226       418-497  675-699  1836     7177     28842
//   4          251      315       338      685      1661     5309     20596
//   8          240      472       898      997      1747     4966     17888
//
// Over 2 nodes, eight are best or equal at every size from 64 KiB on.
constexpr std::size_t kTwoChannelBytes = std::size_t{512} << 10;
constexpr std::size_t kFourChannelBytes = std::size_t{16} << 20;

// The most channels for a collective of `bytes` (NCCL's count: of the whole result); 0 = leave the choice to NCCL.
int most_channels(std::size_t bytes, std::size_t nodes, std::size_t ranks);

}  // namespace bagua_net::abi

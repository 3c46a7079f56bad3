// Acknowledgement: what a receiver writes in the reverse direction of a data stream, for chunks whose header asked for
// it. Pure bytes, no system call.
//
//   byte  size  field
//      0     1  type: 2
//      1     1  1 = the receiver has closed the comm and reads nothing more, 0 = it has not
//      2     2  a port of the receiver, at whose address nothing arrives any more: connections to it are lost; 0: none
//               (only to a connector that names kFeatureLostAddresses)
//      4     4  CRC-32C of the other bytes if both ends use checksums (kFeatureChecksums), otherwise zero
//      8     8  chunks of this stream that have been received, whether they asked or not
//
// Cumulative, so a receiver may leave out all but the last.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/status.h"

namespace bagua_net {

constexpr std::size_t kAcknowledgementBytes = 16;
// With recovery, that a sender leaves unacknowledged on a stream at most.
constexpr std::size_t kMaxUnacknowledgedChunks = 1024;

struct Acknowledgement {
  std::uint64_t chunks = 0;
  bool is_last = false;
  std::uint16_t lost_port = 0;
};

// Ports that are yet to be told, each once: the lowest 16 bits are the next. A fifth is left to be noticed by silence.
constexpr std::uint64_t with_lost_port(std::uint64_t ports, std::uint16_t port) {
  for (int shift = 0; shift < 64; shift += 16) {
    if (static_cast<std::uint16_t>(ports >> shift) == port) return ports;
  }
  return ports >> 48 != 0 ? ports : ports << 16 | port;
}

void encode_acknowledgement(const Acknowledgement& acknowledgement, std::uint8_t* bytes, bool checksums = false);
Status decode_acknowledgement(const std::uint8_t* bytes, Acknowledgement* acknowledgement, bool checksums = false);

}  // namespace bagua_net

// Acknowledgement: what a receiver writes in the reverse direction of a data stream, for chunks whose header asked for
// it. Pure bytes, no system call.
//
//   byte  size  field
//      0     1  type: 2
//      1     7  zero
//      8     8  payload bytes of all chunks of this stream that asked, as far as they have been received
//
// Cumulative, so a receiver may leave out all but the last.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/status.h"

namespace bagua_net {

constexpr std::size_t kAcknowledgementBytes = 16;

void encode_acknowledgement(std::uint64_t received_bytes, std::uint8_t* bytes);
Status decode_acknowledgement(const std::uint8_t* bytes, std::uint64_t* received_bytes);

}  // namespace bagua_net

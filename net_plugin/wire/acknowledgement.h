// Acknowledgement: what a receiver writes in the reverse direction of a data stream, for chunks whose header asked for
// it. Pure bytes, no system call.
//
//   byte  size  field
//      0     1  type: 2
//      1     1  1 = the receiver has closed the comm and reads nothing more, 0 = it has not
//      2     6  zero
//      8     8  chunks of this stream that have been received, whether they asked or not
//
// Cumulative, so a receiver may leave out all but the last.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/status.h"

namespace bagua_net {

constexpr std::size_t kAcknowledgementBytes = 16;

struct Acknowledgement {
  std::uint64_t chunks = 0;
  bool is_last = false;
};

void encode_acknowledgement(const Acknowledgement& acknowledgement, std::uint8_t* bytes);
Status decode_acknowledgement(const std::uint8_t* bytes, Acknowledgement* acknowledgement);

}  // namespace bagua_net

#include "wire/acknowledgement.h"

#include <string>

#include "wire/byte_order.h"

namespace bagua_net {
namespace {
constexpr std::uint64_t kAcknowledgementFrame = 2;  // and seven zeros
}

void encode_acknowledgement(std::uint64_t received_bytes, std::uint8_t* bytes) {
  store_little_endian<std::uint64_t>(bytes, kAcknowledgementFrame);
  store_little_endian<std::uint64_t>(bytes + 8, received_bytes);
}

Status decode_acknowledgement(const std::uint8_t* bytes, std::uint64_t* received_bytes) {
  if (load_little_endian<std::uint64_t>(bytes) != kAcknowledgementFrame) {
    return Status::remote_error("the receiver sent a frame of type " + std::to_string(bytes[0]) +
                                " where an acknowledgement was due: it broke the protocol or the stream is corrupt");
  }
  *received_bytes = load_little_endian<std::uint64_t>(bytes + 8);
  return Status::ok();
}

}  // namespace bagua_net

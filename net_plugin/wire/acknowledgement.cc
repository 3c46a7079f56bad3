#include "wire/acknowledgement.h"

#include <string>

#include "wire/byte_order.h"
#include "wire/crc32c.h"

namespace bagua_net {
namespace {
constexpr std::uint64_t kAcknowledgementFrame = 2;  // then the flag, the port, and four zeros
constexpr int kLostPortShift = 16;
constexpr std::uint64_t kWithoutLostPort = ~(std::uint64_t{0xffff} << kLostPortShift);
constexpr std::uint64_t kLastAcknowledgement = kAcknowledgementFrame | 1 << 8;
constexpr std::uint64_t kWithoutChecksum = 0xffffffff;

// Of all but its own four bytes.
std::uint32_t checksum_of(const std::uint8_t* bytes) { return crc32c(crc32c(0, bytes, 4), bytes + 8, 8); }
}  // namespace

void encode_acknowledgement(const Acknowledgement& acknowledgement, std::uint8_t* bytes, bool checksums) {
  const std::uint64_t type = acknowledgement.is_last ? kLastAcknowledgement : kAcknowledgementFrame;
  store_little_endian<std::uint64_t>(bytes, type | std::uint64_t{acknowledgement.lost_port} << kLostPortShift);
  store_little_endian<std::uint64_t>(bytes + 8, acknowledgement.chunks);
  if (checksums) store_little_endian<std::uint32_t>(bytes + 4, checksum_of(bytes));
}

Status decode_acknowledgement(const std::uint8_t* bytes, Acknowledgement* acknowledgement, bool checksums) {
  auto type = load_little_endian<std::uint64_t>(bytes);
  if (checksums) {
    if (load_little_endian<std::uint32_t>(bytes + 4) != checksum_of(bytes)) {
      return Status::damaged_data("an acknowledgement arrived damaged");
    }
    type &= kWithoutChecksum;
  }
  const auto lost_port = static_cast<std::uint16_t>(type >> kLostPortShift);
  type &= kWithoutLostPort;
  if (type != kAcknowledgementFrame && type != kLastAcknowledgement) {
    return Status::remote_error("the receiver sent a frame of type " + std::to_string(bytes[0]) +
                                " where an acknowledgement was due: it broke the protocol or the stream is corrupt");
  }
  acknowledgement->chunks = load_little_endian<std::uint64_t>(bytes + 8);
  acknowledgement->is_last = type == kLastAcknowledgement;
  acknowledgement->lost_port = lost_port;
  return Status::ok();
}

}  // namespace bagua_net

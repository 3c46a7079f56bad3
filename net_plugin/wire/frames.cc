#include "wire/frames.h"

#include <cstring>
#include <string>

#include "wire/byte_order.h"
#include "wire/crc32c.h"

namespace bagua_net {
namespace {

constexpr std::uint8_t kChunkFrame = 1;
constexpr std::uint8_t kEndFrame = 3;

constexpr std::uint8_t kAcknowledge = 1;
constexpr std::uint8_t kByReference = 2;
constexpr std::uint8_t kFlags = kAcknowledge | kByReference;

}  // namespace

void encode_frame_header(const FrameHeader& header, std::uint8_t* bytes) {
  std::memset(bytes, 0, kFrameHeaderBytes);
  bytes[0] = header.end ? kEndFrame : kChunkFrame;
  bytes[1] =
      static_cast<std::uint8_t>((header.acknowledge ? kAcknowledge : 0) | (header.by_reference ? kByReference : 0));
  store_little_endian<std::uint16_t>(bytes + 2, header.attempt);
  store_little_endian<std::uint32_t>(bytes + 4, header.payload_bytes);
  store_little_endian<std::uint64_t>(bytes + 8, header.message_number);
  store_little_endian<std::uint64_t>(bytes + 16, header.offset);
  store_little_endian<std::uint64_t>(bytes + 24, header.message_bytes);
}

Status decode_frame_header(const std::uint8_t* bytes, FrameHeader* header) {
  if ((bytes[0] != kChunkFrame && bytes[0] != kEndFrame) || bytes[1] > kFlags) {
    return Status::remote_error("frame of unknown type " + std::to_string(bytes[0]) +
                                ": the peer broke the protocol or the stream is corrupt");
  }
  header->payload_bytes = load_little_endian<std::uint32_t>(bytes + 4);
  header->message_number = load_little_endian<std::uint64_t>(bytes + 8);
  header->offset = load_little_endian<std::uint64_t>(bytes + 16);
  header->message_bytes = load_little_endian<std::uint64_t>(bytes + 24);
  header->acknowledge = (bytes[1] & kAcknowledge) != 0;
  header->by_reference = (bytes[1] & kByReference) != 0;
  header->attempt = load_little_endian<std::uint16_t>(bytes + 2);
  header->end = bytes[0] == kEndFrame;
  // Written without additions of peer-supplied numbers, which could wrap round.
  const bool inside =
      header->offset <= header->message_bytes && header->payload_bytes <= header->message_bytes - header->offset;
  const bool progresses = header->payload_bytes > 0 || header->message_bytes == 0;
  if (!inside || !progresses || (header->end && header->message_bytes > 0)) {
    return Status::remote_error("chunk of " + std::to_string(header->payload_bytes) + " bytes at offset " +
                                std::to_string(header->offset) + " does not lie in its message of " +
                                std::to_string(header->message_bytes) + " bytes: the peer broke the protocol");
  }
  return Status::ok();
}

void append_frame_checksums(std::uint32_t payload_checksum, std::uint8_t* bytes) {
  store_little_endian<std::uint32_t>(bytes + kFrameHeaderBytes, payload_checksum);
  store_little_endian<std::uint32_t>(bytes + kFrameHeaderBytes + 4, crc32c(0, bytes, kFrameHeaderBytes + 4));
}

Status check_frame_checksums(const std::uint8_t* bytes, std::uint32_t* payload_checksum) {
  if (load_little_endian<std::uint32_t>(bytes + kFrameHeaderBytes + 4) != crc32c(0, bytes, kFrameHeaderBytes + 4)) {
    return Status::damaged_data("the header of a chunk arrived damaged");
  }
  *payload_checksum = load_little_endian<std::uint32_t>(bytes + kFrameHeaderBytes);
  return Status::ok();
}

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

// What is written on a data stream, in either direction.
//
// FrameHeader: what precedes every chunk of a message on a data stream. Pure bytes, no system call.
//
//   byte  size  field
//      0     1  type: 1 = chunk, 3 = end of the comm; every other value is refused
//      1     1  flags: 1 = acknowledge this chunk and all before it
//                      2 = its bytes may be the sender's memory until they are read
//      2     2  attempt: how often the chunk was sent before, on streams that were lost; modulo 65536
//      4     4  payload bytes that follow
//      8     8  message number: counts the messages of this comm from 0, in posting order
//     16     8  offset of the payload in the message
//     24     8  size of the whole message
//
// If both ends use checksums (kFeatureChecksums), they follow each header, that of the end included:
//
//   byte  size  field
//     32     4  CRC-32C of the payload
//     36     4  CRC-32C of bytes 0 to 35
//
// A message of zero bytes is one chunk of zero bytes. The end of the comm says that its sender has closed it; only the
// message number means something there: the number of messages that were sent. With flag 1 it is the end of that stream
// alone, of which the sender has no more use.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/status.h"

namespace bagua_net {

constexpr std::size_t kFrameHeaderBytes = 32;
constexpr std::size_t kFrameChecksumBytes = 8;

struct FrameHeader {
  std::uint32_t payload_bytes = 0;
  std::uint64_t message_number = 0;
  std::uint64_t offset = 0;
  std::uint64_t message_bytes = 0;
  bool acknowledge = false;   // the sender keeps the bytes until it hears that they were received
  bool by_reference = false;  // and until then they may be its memory, wherever the kernel has them
  std::uint16_t attempt = 0;
  bool end = false;  // no chunk: the sender has closed the comm, or with `acknowledge` the stream
};

void encode_frame_header(const FrameHeader& header, std::uint8_t* bytes);
// Checks what can be checked without knowing the receive: type, padding, and that the chunk lies in its message.
Status decode_frame_header(const std::uint8_t* bytes, FrameHeader* header);

// Behind the header that stands at `bytes`.
void append_frame_checksums(std::uint32_t payload_checksum, std::uint8_t* bytes);
// An error if the header at `bytes` or what follows it was damaged on its way.
Status check_frame_checksums(const std::uint8_t* bytes, std::uint32_t* payload_checksum);

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

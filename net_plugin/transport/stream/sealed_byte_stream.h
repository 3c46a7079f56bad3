// SealedByteStream: an encrypted and authenticated stream over another one. All bytes travel in records, sealed with
// the key of their direction (crypto/cipher_state.h):
//
//   byte  size  what
//      0     2  length of the payload, 1 to 32768; sealed
//      2    16  tag of the length
//     18     n  payload; sealed
//   18+n    16  tag of the payload
//
// The length is sealed by itself, so that a changed one is noticed at once, and not when so many bytes have come. After
// 2^20 records both ends go on with a new key, long before the limits of the ciphers. What write() has sealed and the
// socket did not take yet is kept: nothing is sealed twice. The caller's next write begins with the same bytes.
#pragma once

#include <cstdint>
#include <memory>

#include "crypto/cipher_state.h"
#include "transport/stream/byte_stream.h"

namespace bagua_net {

constexpr std::size_t kMaxRecordBytes = 32768;
constexpr std::size_t kRecordLengthBytes = 2 + kTagBytes;
constexpr std::size_t kRecordOverhead = kRecordLengthBytes + kTagBytes;
constexpr std::uint64_t kRecordsPerKey = std::uint64_t{1} << 20;

// records_per_key: for tests; the same at both ends.
std::unique_ptr<ByteStream> make_sealed_byte_stream(std::unique_ptr<ByteStream> bytes, Protected<ConnectionKeys> keys,
                                                    std::uint64_t records_per_key = kRecordsPerKey);

}  // namespace bagua_net

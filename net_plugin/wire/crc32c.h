// CRC-32C (Castagnoli, RFC 3720 appendix B.4), with the CRC instructions of x86-64 (SSE4.2) and ARMv8 where the CPU has
// them. Finds damage, not forgery.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bagua_net {

// Of the bytes, going on from the checksum of what stands before them (0: nothing).
std::uint32_t crc32c(std::uint32_t before, const void* data, std::size_t bytes);
// The same without special instructions.
std::uint32_t portable_crc32c(std::uint32_t before, const void* data, std::size_t bytes);

}  // namespace bagua_net

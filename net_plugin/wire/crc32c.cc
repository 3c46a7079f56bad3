#include "wire/crc32c.h"

#include <array>
#include <cstring>

#include "wire/byte_order.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#define BAGUA_NET_CRC_TARGET __attribute__((target("sse4.2")))
#elif defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#include <arm_acle.h>
#include <sys/auxv.h>
#define BAGUA_NET_CRC_TARGET __attribute__((target("+crc")))
#endif

namespace bagua_net {
namespace {

using Table = std::array<std::uint32_t, 256>;

// tables[n][b]: the checksum's remainder of byte b with n zero bytes behind it.
constexpr std::array<Table, 8> make_tables() {
  constexpr std::uint32_t kPolynomial = 0x82f63b78;  // with the lowest power in the highest bit
  std::array<Table, 8> tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t remainder = byte;
    for (int bit = 0; bit < 8; ++bit) remainder = (remainder >> 1) ^ ((remainder & 1) != 0 ? kPolynomial : 0);
    tables[0][byte] = remainder;
  }
  for (std::size_t zeros = 1; zeros < tables.size(); ++zeros) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t shorter = tables[zeros - 1][byte];
      tables[zeros][byte] = (shorter >> 8) ^ tables[0][shorter & 0xff];
    }
  }
  return tables;
}

constexpr std::array<Table, 8> kTables = make_tables();

#if defined(BAGUA_NET_CRC_TARGET)

// The instruction takes one cycle, and its result three: three parts at a time, put together afterwards.
constexpr std::size_t kLaneBytes = 1024;

// What becomes of a remainder when a lane of zeros follows, for each value of each of its bytes.
std::array<Table, 4> make_lane_tables() {
  std::array<Table, 4> tables{};
  for (std::size_t position = 0; position < tables.size(); ++position) {
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
      std::uint32_t remainder = byte << (8 * position);
      for (std::size_t i = 0; i < kLaneBytes; ++i) remainder = (remainder >> 8) ^ kTables[0][remainder & 0xff];
      tables[position][byte] = remainder;
    }
  }
  return tables;
}

std::uint32_t followed_by_lane(const std::array<Table, 4>& tables, std::uint32_t remainder) {
  return tables[0][remainder & 0xff] ^ tables[1][(remainder >> 8) & 0xff] ^ tables[2][(remainder >> 16) & 0xff] ^
         tables[3][remainder >> 24];
}

BAGUA_NET_CRC_TARGET inline std::uint32_t add_word(std::uint32_t remainder, const std::uint8_t* data) {
  std::uint64_t word = 0;
  std::memcpy(&word, data, sizeof word);
#if defined(__x86_64__)
  return static_cast<std::uint32_t>(_mm_crc32_u64(remainder, word));
#else
  return __crc32cd(remainder, word);
#endif
}

BAGUA_NET_CRC_TARGET inline std::uint32_t add_byte(std::uint32_t remainder, std::uint8_t byte) {
#if defined(__x86_64__)
  return _mm_crc32_u8(remainder, byte);
#else
  return __crc32cb(remainder, byte);
#endif
}

BAGUA_NET_CRC_TARGET std::uint32_t instruction_crc32c(std::uint32_t before, const std::uint8_t* data,
                                                      std::size_t bytes) {
  std::uint32_t remainder = ~before;
  if (bytes >= 3 * kLaneBytes) {
    static const std::array<Table, 4> lane_tables = make_lane_tables();
    for (; bytes >= 3 * kLaneBytes; bytes -= 3 * kLaneBytes, data += 3 * kLaneBytes) {
      std::uint32_t second = 0;
      std::uint32_t third = 0;
      for (std::size_t i = 0; i < kLaneBytes; i += 8) {
        remainder = add_word(remainder, data + i);
        second = add_word(second, data + kLaneBytes + i);
        third = add_word(third, data + 2 * kLaneBytes + i);
      }
      remainder = followed_by_lane(lane_tables, remainder) ^ second;
      remainder = followed_by_lane(lane_tables, remainder) ^ third;
    }
  }
  for (; bytes >= 8; bytes -= 8, data += 8) remainder = add_word(remainder, data);
  for (; bytes > 0; --bytes, ++data) remainder = add_byte(remainder, *data);
  return ~remainder;
}

bool has_instruction() {
#if defined(__x86_64__)
  static const bool has = __builtin_cpu_supports("sse4.2") != 0;
#else
  constexpr unsigned long kHwcapCrc32 = 1 << 7;
  static const bool has = (::getauxval(AT_HWCAP) & kHwcapCrc32) != 0;
#endif
  return has;
}

#endif

}  // namespace

// Eight bytes at a time, with a table for each.
std::uint32_t portable_crc32c(std::uint32_t before, const void* data, std::size_t bytes) {
  const auto* next = static_cast<const std::uint8_t*>(data);
  std::uint32_t remainder = ~before;
  for (; bytes >= 8; bytes -= 8, next += 8) {
    const std::uint64_t word = load_little_endian<std::uint64_t>(next) ^ remainder;
    remainder = 0;
    for (std::size_t i = 0; i < 8; ++i) remainder ^= kTables[7 - i][(word >> (8 * i)) & 0xff];
  }
  for (; bytes > 0; --bytes, ++next) remainder = (remainder >> 8) ^ kTables[0][(remainder ^ *next) & 0xff];
  return ~remainder;
}

std::uint32_t crc32c(std::uint32_t before, const void* data, std::size_t bytes) {
#if defined(BAGUA_NET_CRC_TARGET)
  if (has_instruction()) return instruction_crc32c(before, static_cast<const std::uint8_t*>(data), bytes);
#endif
  return portable_crc32c(before, data, bytes);
}

}  // namespace bagua_net

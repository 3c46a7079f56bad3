// CRC-32C: the values that RFC 3720 (appendix B.4) and the catalogue of parametrised CRC algorithms give, and the same
// from every way to compute it.
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "support/check.h"
#include "wire/crc32c.h"

namespace bagua_net {
namespace {

using Bytes = std::vector<std::uint8_t>;

void check_value(const Bytes& bytes, std::uint32_t expected) {
  CHECK_EQ(crc32c(0, bytes.data(), bytes.size()), expected);
  CHECK_EQ(portable_crc32c(0, bytes.data(), bytes.size()), expected);
}

}  // namespace

TEST_CASE(known_values) {
  check_value({}, 0);
  const std::string digits = "123456789";
  check_value(Bytes(digits.begin(), digits.end()), 0xe3069283);
  check_value(Bytes(32, 0x00), 0x8a9136aa);
  check_value(Bytes(32, 0xff), 0x62a8ab43);
  Bytes rising(32);
  std::iota(rising.begin(), rising.end(), std::uint8_t{0});
  check_value(rising, 0x46dd794e);
  const Bytes falling(rising.rbegin(), rising.rend());
  check_value(falling, 0x113fdb5c);
}

TEST_CASE(both_ways_agree_at_every_length_and_address) {
  Bytes bytes(20000);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(i * 131 + i / 251);
  for (unsigned seed = 0; seed < 2000; ++seed) {
    std::mt19937 random(seed);
    const std::size_t begin = random() % 64;
    const std::size_t length = random() % (seed % 2 == 0 ? 100 : bytes.size() - begin);
    const std::uint32_t whole = portable_crc32c(0, bytes.data() + begin, length);
    CHECK_EQ(crc32c(0, bytes.data() + begin, length), whole);
    // In two parts.
    const std::size_t first = length == 0 ? 0 : random() % length;
    const std::uint32_t half = crc32c(0, bytes.data() + begin, first);
    CHECK_EQ(crc32c(half, bytes.data() + begin + first, length - first), whole);
    CHECK_EQ(portable_crc32c(half, bytes.data() + begin + first, length - first), whole);
  }
}

}  // namespace bagua_net

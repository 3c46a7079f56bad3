// Fixed-width integers in little-endian order, whatever the host's: everything on the wire is written with these.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace bagua_net {

template <typename Integer>
void store_little_endian(std::uint8_t* bytes, Integer value) {
  static_assert(std::is_unsigned_v<Integer>);
  for (std::size_t i = 0; i < sizeof value; ++i) bytes[i] = static_cast<std::uint8_t>(value >> (8 * i));
}

template <typename Integer>
Integer load_little_endian(const std::uint8_t* bytes) {
  static_assert(std::is_unsigned_v<Integer>);
  Integer value = 0;
  for (std::size_t i = 0; i < sizeof value; ++i) value = static_cast<Integer>(value | Integer{bytes[i]} << (8 * i));
  return value;
}

}  // namespace bagua_net

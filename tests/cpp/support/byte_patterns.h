// Byte loops of the tests themselves. A sanitizer would look at every step of them, which took most of its time: what
// computes bytes is not instrumented, and the memory of messages is read and written by memcmp and memcpy alone, which
// sanitizers check whole.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

// Only for functions that touch nothing but memory of their caller's own.
#define UNINSTRUMENTED __attribute__((no_sanitize("address", "thread", "undefined")))

namespace byte_patterns {

inline bool all_bytes_are(const void* memory, std::size_t bytes, std::uint8_t value) {
  const auto* const first = static_cast<const std::uint8_t*>(memory);
  return bytes == 0 || (*first == value && std::memcmp(first, first + 1, bytes - 1) == 0);
}

}  // namespace byte_patterns

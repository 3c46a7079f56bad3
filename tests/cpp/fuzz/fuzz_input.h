// The bytes of one run, taken piece by piece; zeros after their end. And what must hold in it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace bagua_net {

inline void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

class FuzzInput {
 public:
  FuzzInput(const std::uint8_t* data, std::size_t bytes) : data_(data), left_(bytes) {}

  bool is_empty() const { return left_ == 0; }
  std::uint8_t byte() {
    if (left_ == 0) return 0;
    --left_;
    return *data_++;
  }
  std::size_t number(std::size_t most) { return (std::size_t{byte()} | std::size_t{byte()} << 8) % (most + 1); }
  // Disturbs a valid message: zeros leave it as it is.
  void disturb(std::uint8_t* bytes, std::size_t count) {
    for (std::size_t i = 0; i < count && left_ > 0; ++i) bytes[i] ^= byte();
  }
  std::size_t take(std::uint8_t* out, std::size_t most) {
    const std::size_t count = std::min(most, left_);
    std::copy_n(data_, count, out);
    data_ += count;
    left_ -= count;
    return count;
  }

 private:
  const std::uint8_t* data_;
  std::size_t left_;
};

}  // namespace bagua_net

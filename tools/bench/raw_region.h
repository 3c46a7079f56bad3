// RawRegion: the memory that one stream of raw mode moves. The stream goes through it block by block and begins again
// at its end: what a run copies is as warm or as cold in the CPU's caches as memory of that size is.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace bagua_net::bench {

class RawRegion {
 public:
  // `bytes` and `largest_block`: at least 1.
  RawRegion(std::uint8_t* data, std::size_t bytes, std::size_t largest_block)
      : data_(data), bytes_(bytes), largest_block_(largest_block) {}

  // From now on only the first `bytes`, or more of them than before.
  void resize(std::size_t bytes) {
    bytes_ = bytes;
    if (offset_ >= bytes_) offset_ = 0;
  }

  // What a send or recv may use next: never empty, and never beyond the region's end.
  std::uint8_t* data() const { return data_ + offset_; }
  std::size_t block() const { return std::min(largest_block_, bytes_ - offset_); }

  // Behind the first `bytes` of that block.
  void advance(std::size_t bytes) {
    offset_ += bytes;
    if (offset_ == bytes_) offset_ = 0;
  }

 private:
  std::uint8_t* data_;
  std::size_t bytes_;
  std::size_t largest_block_;
  std::size_t offset_ = 0;
};

}  // namespace bagua_net::bench

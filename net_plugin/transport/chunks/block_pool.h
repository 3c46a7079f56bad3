// BlockPool: memory for copies of chunks that may have to be sent again. Blocks are used over and over: in the long run
// nothing is allocated. One thread at a time. A block may be given back to another pool than the one it came from.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace bagua_net {

struct Block {
  std::unique_ptr<std::uint8_t[]> bytes;
  std::size_t capacity = 0;
};

class BlockPool {
 public:
  Block take(std::size_t bytes) {
    const std::size_t size_class = class_of(bytes);
    std::vector<Block>& free = free_[size_class];
    if (free.empty()) {
      const std::size_t capacity = kMinBytes << size_class;
      // Not zeroed: pages that are never written cost nothing.
      return {std::unique_ptr<std::uint8_t[]>(new std::uint8_t[capacity]), capacity};
    }
    Block block = std::move(free.back());
    free.pop_back();
    return block;
  }
  void give_back(Block block) {
    if (block.bytes != nullptr) free_[class_of(block.capacity)].push_back(std::move(block));
  }

 private:
  static constexpr std::size_t kMinBytes = 2048;
  static constexpr std::size_t kClasses = 40;

  static std::size_t class_of(std::size_t bytes) {
    std::size_t size_class = 0;
    while (kMinBytes << size_class < bytes) ++size_class;
    return size_class;
  }

  std::array<std::vector<Block>, kClasses> free_;  // by size, doubling from class to class
};

}  // namespace bagua_net

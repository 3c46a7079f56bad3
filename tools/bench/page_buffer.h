// PageBuffer: whole pages of memory with one owner, touched when allocated, so that no timed section pays for a page
// fault.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace bagua_net::bench {

class PageBuffer {
 public:
  PageBuffer() = default;
  PageBuffer(const PageBuffer&) = delete;
  PageBuffer& operator=(const PageBuffer&) = delete;
  ~PageBuffer();

  // Once. Refuses what the host has no memory for, instead of being killed for it: throws a Failure, which names
  // `purpose`.
  void allocate(std::size_t bytes, const std::string& purpose);

  std::uint8_t* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::uint8_t* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace bagua_net::bench

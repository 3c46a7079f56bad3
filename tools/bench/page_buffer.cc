#include "bench/page_buffer.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>

#include "bench/driver_protocol.h"

namespace bagua_net::bench {
namespace {

// The kernel's own estimate of what can be had without swapping; no limit if it does not say.
std::size_t available_bytes() {
  std::ifstream meminfo("/proc/meminfo");
  std::string name;
  std::size_t kibibytes = 0;
  std::string unit;
  while (meminfo >> name >> kibibytes && std::getline(meminfo, unit)) {
    if (name == "MemAvailable:") return kibibytes * 1024;
  }
  return std::numeric_limits<std::size_t>::max();
}

}  // namespace

void PageBuffer::allocate(std::size_t bytes, const std::string& purpose) {
  const std::size_t available = available_bytes();
  if (bytes > available) {
    throw Failure(purpose + " needs " + std::to_string(bytes) + " bytes of memory, and this host has " +
                  std::to_string(available) + " available: use a smaller size");
  }
  void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) {
    throw system_failure("mmap of " + std::to_string(bytes) + " bytes for " + purpose, errno);
  }
  data_ = static_cast<std::uint8_t*>(pages);
  bytes_ = bytes;
  // All ones: as float32 not a number, so an element that nobody writes cannot pass for a result.
  std::memset(data_, 0xff, bytes_);
}

PageBuffer::~PageBuffer() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

}  // namespace bagua_net::bench

// What NCCL holds of a comm or a request: its address, with the epoch of its transport in the 16 bits that addresses of
// Linux processes leave free. So a pointer that outlived its transport is recognised without being followed, by a
// comparison.
#pragma once

#include <cstdint>

namespace bagua_net::abi {

constexpr int kAddressBits = 48;

// Never 0: that is the tag of no transport.
constexpr std::uint64_t epoch_tag(std::uint64_t epoch) { return epoch == 0 ? 0 : epoch % 0xffff + 1; }

inline void* handle_of(const void* object, std::uint64_t epoch) {
  const std::uint64_t tagged = reinterpret_cast<std::uint64_t>(object) | epoch_tag(epoch) << kAddressBits;
  return reinterpret_cast<void*>(tagged);  // NOLINT(performance-no-int-to-ptr): NCCL gives it back, and no more
}

// Whatever its epoch is.
template <typename T>
T* address_in(void* handle) {
  constexpr std::uint64_t kMask = (std::uint64_t{1} << kAddressBits) - 1;
  const std::uint64_t address = reinterpret_cast<std::uint64_t>(handle) & kMask;
  return reinterpret_cast<T*>(address);  // NOLINT(performance-no-int-to-ptr): what handle_of was given
}

inline bool is_of_epoch(void* handle, std::uint64_t epoch) {
  return epoch != 0 && reinterpret_cast<std::uint64_t>(handle) >> kAddressBits == epoch_tag(epoch);
}

}  // namespace bagua_net::abi

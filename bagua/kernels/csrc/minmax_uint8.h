// MinMaxUInt8 of whole tensors in the memory of the CPU: chunks of ranges, shared out to threads.
//
// The layout of a compressed chunk is in docs/design/compression.md. The caller vouches for sizes and for memory that
// does not overlap; any thread may call.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bagua_kernels {

enum class ElementType : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

struct RangeKernel;

// Where parts of a compressed chunk end: bytes up to the next multiple of 32.
constexpr size_t padded(size_t bytes) { return (bytes + 31) / 32 * 32; }

// A number of equal chunks; `block` elements share a range (at least 1; the last range of a chunk may have fewer).
struct Chunks {
  size_t count;
  size_t elements;
  size_t block;
  size_t stride;  // bytes from a compressed chunk to the next

  size_t ranges() const { return (elements + block - 1) / block; }
  size_t header_bytes() const;
};

// The arithmetic that is used, and the most threads that share a call.
struct Execution {
  const RangeKernel* kernel;
  size_t threads;
};

void compress(const void* source, ElementType type, const Chunks& chunks, uint8_t* out, const Execution& execution);
void decompress(const uint8_t* compressed, void* target, ElementType type, bool accumulate, const Chunks& chunks,
                const Execution& execution);
// `versions.count` versions of one chunk become one.
void decompress_reduce_compress(const uint8_t* received, bool average, const Chunks& versions, uint8_t* out,
                                const Execution& execution);

}  // namespace bagua_kernels

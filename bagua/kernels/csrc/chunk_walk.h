// How chunks are walked over, by several threads: ranges, and slices of long ones.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "minmax_uint8.h"
#include "range_kernel.h"
#include "thread_pool.h"

namespace bagua_kernels {

constexpr size_t kRangeBytes = 2 * sizeof(float);
// A range of more elements is done in slices, by several threads; one of fewer is read, and soon read again from cache.
constexpr size_t kSliceElements = 16384;
// What is worth waking a thread up for: some 30 us of work.
constexpr size_t kElementsOfThread = 262144;
// Pieces of work for every thread: it may be late, or lose its core for a while.
constexpr size_t kPiecesOfThread = 4;
// Results of more bytes go around the caches, which they would fill with what nobody reads soon.
constexpr size_t kStreamedBytes = size_t{4} << 20;

inline Store store_for(size_t bytes) { return bytes > kStreamedBytes ? Store::kStreamed : Store::kCached; }

// Calls `work(first, last)` for parts of 0 .. `units`, where a unit is some `elements` elements of work.
template <typename Work>
void in_parts(size_t units, size_t elements, const Execution& execution, const Work& work) {
  const size_t threads = std::clamp<size_t>(units * elements / kElementsOfThread, 1, execution.threads);
  const size_t pieces = threads == 1 ? 1 : std::min(units, threads * kPiecesOfThread);
  run_in_parallel(pieces, threads, [&](size_t piece) {
    work(units * piece / pieces, units * (piece + 1) / pieces);
    execution.kernel->end_of_stream();
  });
}

// The elements of a chunk that `range` has.
struct Span {
  size_t first;
  size_t count;
};
inline Span span_of(const Chunks& chunks, size_t range) {
  const size_t first = range * chunks.block;
  return {first, std::min(chunks.block, chunks.elements - first)};
}
inline Span slice_of(const Span& span, size_t slice) {
  const size_t offset = slice * kSliceElements;
  return {span.first + offset, std::min(kSliceElements, span.count - offset)};
}
inline size_t slices_of(const Span& span) { return (span.count + kSliceElements - 1) / kSliceElements; }

inline void write_extent(uint8_t* chunk, size_t range, const Extent& extent) {
  const float pair[2] = {extent.lowest, extent.highest};
  std::memcpy(chunk + range * kRangeBytes, pair, sizeof(pair));
}

// The zeros of a chunk.
inline void write_padding(uint8_t* chunk, const Chunks& chunks) {
  const size_t used = chunks.ranges() * kRangeBytes;
  std::memset(chunk + used, 0, chunks.header_bytes() - used);
  const size_t end = chunks.header_bytes() + chunks.elements;
  std::memset(chunk + end, 0, padded(end) - end);
}

}  // namespace bagua_kernels

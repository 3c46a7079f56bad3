#include "minmax_uint8.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "range_kernel.h"
#include "worker_pool.h"

namespace bagua_kernels {
namespace {

constexpr size_t kAlignment = 32;
constexpr size_t kRangeBytes = 2 * sizeof(float);
// A range of more elements is done in slices, by several threads; one of fewer is read, and soon read again from cache.
constexpr size_t kSliceElements = 16384;
// What is worth waking a thread up for: some 30 us of work.
constexpr size_t kElementsOfThread = 262144;
// Pieces of work for every thread: it may be late, or lose its core for a while.
constexpr size_t kPiecesOfThread = 4;
// Results of more bytes go around the caches, which they would fill with what nobody reads soon.
constexpr size_t kStreamedBytes = size_t{4} << 20;

size_t padded(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

Extent canonical(const Extent& extent) {
  // -0.0 becomes 0.0: which zero is the smaller differs between machines.
  return extent.finite ? Extent{extent.lowest + 0.0F, extent.highest + 0.0F, true} : Extent{kNan, kNan, false};
}

// 1 / 127.5.
constexpr float kUnitsPerLevel = 0.007843137718737125F;

// What follows is for one range, V being float, or for four at once.
using Four = float __attribute__((vector_size(16)));

template <typename V>
V half_of(V lowest, V highest) {
  return highest * 0.5F - lowest * 0.5F;
}

// To the nearest integer, half to even; from 2^23 on all numbers are integers.
template <typename V>
V rounded(V value) {
  const V shift = value < 0.0F ? V{} - 0x1p23F : V{} + 0x1p23F;
  const V nearest = (value + shift) - shift;
  const V magnitude = value < 0.0F ? -value : value;
  return magnitude < 0x1p23F ? nearest : value;
}

// Levels in a unit; 0 if the range has but one level.
template <typename V>
V scale_of(V lowest, V highest) {
  const V scale = (V{} + 127.5F) / half_of(lowest, highest);
  const V magnitude = scale < 0.0F ? -scale : scale;
  return magnitude <= std::numeric_limits<float>::max() ? scale : V{};
}

// With it, the number of the highest level is kIntegers + 255.
template <typename V>
V bias_of(V highest, V scale) {
  return kIntegers + 255.0F - rounded(highest * scale);
}

// For decompression. One level: (255 - 254) * what it stands for, which is NaN if the ends are.
template <typename V>
void find_levels(V lowest, V highest, V& bias, V& step) {
  const V scale = scale_of(lowest, highest);
  const V not_above_zero = highest < 0.0F ? highest : highest - highest;
  const V closest_to_zero = lowest > 0.0F ? lowest : not_above_zero;
  bias = scale == 0.0F ? V{} + (kIntegers + 254.0F) : bias_of(highest, scale);
  step = scale == 0.0F ? closest_to_zero : half_of(lowest, highest) * kUnitsPerLevel;
}

void write_extent(uint8_t* chunk, size_t range, const Extent& extent) {
  const float pair[2] = {extent.lowest, extent.highest};
  std::memcpy(chunk + range * kRangeBytes, pair, sizeof(pair));
}

Levels read_levels(const uint8_t* chunk, size_t range) {
  float pair[2];
  std::memcpy(pair, chunk + range * kRangeBytes, sizeof(pair));
  Levels levels{0.0F, 0.0F, pair[0], pair[1]};
  find_levels(levels.lowest, levels.highest, levels.bias, levels.step);
  return levels;
}

// Versions of a chunk that are decoded together.
constexpr size_t kBatch = 16;
using LevelsOfVersions = Levels[kBatch];

// The levels of a range in each of at most kBatch versions; what is behind the last means nothing. The ends are not
// filled in. One after the other they would take a tenth of the time of the sum. Returns whether no end is larger than
// `bound`, or NaN.
bool read_levels_of_versions(const uint8_t* chunk, size_t stride, size_t range, size_t versions, float bound,
                             LevelsOfVersions& levels) {
  constexpr size_t kAtOnce = sizeof(Four) / sizeof(float);
  constexpr size_t kAheadBytes = 128;
  bool bounded = true;
  for (size_t first = 0; first < versions; first += kAtOnce) {
    Four lowest{};
    Four highest{};
    for (size_t i = 0; i < std::min(kAtOnce, versions - first); ++i) {
      const uint8_t* ends = chunk + (first + i) * stride + range * kRangeBytes;
      __builtin_prefetch(ends + kAheadBytes);
      float pair[2];
      std::memcpy(pair, ends, sizeof(pair));
      lowest[i] = pair[0];
      highest[i] = pair[1];
      bounded = bounded && pair[0] >= -bound && pair[1] <= bound;
    }
    Four bias;
    Four step;
    find_levels(lowest, highest, bias, step);
    for (size_t i = 0; i < kAtOnce; ++i) {
      levels[first + i].bias = bias[i];
      levels[first + i].step = step[i];
    }
  }
  return bounded;
}

void write_padding(uint8_t* chunk, const Chunks& chunks) {
  const size_t used = chunks.ranges() * kRangeBytes;
  std::memset(chunk + used, 0, chunks.header_bytes() - used);
  const size_t end = chunks.header_bytes() + chunks.elements;
  std::memset(chunk + end, 0, padded(end) - end);
}

template <typename T>
using Quantize = void(const T* source, size_t count, const Scale& scale, uint8_t* out, Store store);

// `extent` is that of `source` times `factor`.
template <typename T>
void quantize(Quantize<T>* kernel, const T* source, size_t count, float factor, const Extent& extent, uint8_t* bytes,
              Store store) {
  if (extent.finite) {
    const float scale = scale_of(extent.lowest, extent.highest);
    kernel(source, count, {scale * factor, bias_of(extent.highest, scale)}, bytes, store);
  } else {
    std::memset(bytes, 0, count);
  }
}

Extent joined(const Extent* extents, size_t count) {
  Extent result = extents[0];
  for (size_t i = 1; i < count; ++i) {
    result.lowest = std::min(result.lowest, extents[i].lowest);
    result.highest = std::max(result.highest, extents[i].highest);
    result.finite = result.finite && extents[i].finite;
  }
  return result;
}

Store store_for(size_t bytes) { return bytes > kStreamedBytes ? Store::kStreamed : Store::kCached; }

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
Span span_of(const Chunks& chunks, size_t range) {
  const size_t first = range * chunks.block;
  return {first, std::min(chunks.block, chunks.elements - first)};
}
Span slice_of(const Span& span, size_t slice) {
  const size_t offset = slice * kSliceElements;
  return {span.first + offset, std::min(kSliceElements, span.count - offset)};
}
size_t slices_of(const Span& span) { return (span.count + kSliceElements - 1) / kSliceElements; }

template <typename T>
void compress_typed(const T* source, const ElementKernel<T>& kernel, const Chunks& chunks, uint8_t* out,
                    const Execution& execution) {
  const size_t ranges = chunks.ranges();
  const size_t header = chunks.header_bytes();
  const Store store = store_for(chunks.count * chunks.elements);
  for (size_t chunk = 0; chunk < chunks.count; ++chunk) write_padding(out + chunk * chunks.stride, chunks);
  if (chunks.block <= kSliceElements) {
    in_parts(chunks.count * ranges, chunks.block, execution, [&](size_t first, size_t last) {
      for (size_t unit = first; unit < last; ++unit) {
        uint8_t* to = out + unit / ranges * chunks.stride;
        const Span span = span_of(chunks, unit % ranges);
        const T* from = source + unit / ranges * chunks.elements + span.first;
        const Extent extent = canonical(kernel.extent(from, span.count));
        write_extent(to, unit % ranges, extent);
        quantize(kernel.quantize, from, span.count, 1.0F, extent, to + header + span.first, store);
      }
    });
    return;
  }
  std::vector<Extent> extents;
  for (size_t unit = 0; unit < chunks.count * ranges; ++unit) {
    uint8_t* to = out + unit / ranges * chunks.stride;
    const T* from = source + unit / ranges * chunks.elements;
    const Span span = span_of(chunks, unit % ranges);
    const size_t slices = slices_of(span);
    extents.resize(slices);
    in_parts(slices, kSliceElements, execution, [&](size_t first, size_t last) {
      for (size_t slice = first; slice < last; ++slice) {
        const Span part = slice_of(span, slice);
        extents[slice] = kernel.extent(from + part.first, part.count);
      }
    });
    const Extent extent = canonical(joined(extents.data(), slices));
    write_extent(to, unit % ranges, extent);
    in_parts(slices, kSliceElements, execution, [&](size_t first, size_t last) {
      for (size_t slice = first; slice < last; ++slice) {
        const Span part = slice_of(span, slice);
        quantize(kernel.quantize, from + part.first, part.count, 1.0F, extent, to + header + part.first, store);
      }
    });
  }
}

template <typename T>
void decompress_typed(const uint8_t* compressed, T* target, const ElementKernel<T>& kernel, bool accumulate,
                      const Chunks& chunks, const Execution& execution) {
  const size_t ranges = chunks.ranges();
  const size_t header = chunks.header_bytes();
  const Store store = store_for(chunks.count * chunks.elements * sizeof(T));
  const auto one = [&](size_t chunk, size_t range, const Span& part) {
    const uint8_t* from = compressed + chunk * chunks.stride;
    const Levels levels = read_levels(from, range);
    T* to = target + chunk * chunks.elements + part.first;
    if (accumulate) {
      kernel.decode_add(from + header + part.first, part.count, levels, to);
    } else {
      kernel.decode(from + header + part.first, part.count, levels, to, store);
    }
  };
  if (chunks.block <= kSliceElements) {
    in_parts(chunks.count * ranges, chunks.block, execution, [&](size_t first, size_t last) {
      for (size_t unit = first; unit < last; ++unit) one(unit / ranges, unit % ranges, span_of(chunks, unit % ranges));
    });
    return;
  }
  for (size_t unit = 0; unit < chunks.count * ranges; ++unit) {
    const Span span = span_of(chunks, unit % ranges);
    in_parts(slices_of(span), kSliceElements, execution, [&](size_t first, size_t last) {
      for (size_t slice = first; slice < last; ++slice) one(unit / ranges, unit % ranges, slice_of(span, slice));
    });
  }
}

// Sums a part of a range over all versions, and finds the extent of the sum.
class Summation {
 public:
  Summation(const uint8_t* received, const Chunks& versions, const Execution& execution)
      : received_(received),
        bound_(std::numeric_limits<float>::max() / 2.0F / static_cast<float>(versions.count)),
        versions_(versions),
        kernel_(*execution.kernel) {}

  Extent operator()(size_t range, const Span& part, float* sum) const {
    LevelsOfVersions levels;
    Extent extent{};
    bool bounded = true;
    for (size_t first = 0; first < versions_.count; first += kBatch) {
      const size_t batch = std::min(kBatch, versions_.count - first);
      const uint8_t* from = received_ + first * versions_.stride;
      // In this order: the levels are always read.
      bounded = read_levels_of_versions(from, versions_.stride, range, batch, bound_, levels) && bounded;
      extent = kernel_.decode_sum(from + versions_.header_bytes() + part.first, versions_.stride, levels, batch,
                                  part.count, first > 0, bounded, sum);
    }
    return extent;
  }

 private:
  const uint8_t* received_;
  // A sum of versions whose ends are no larger is finite: a level lies at most half a level outside of its range.
  float bound_;
  const Chunks& versions_;
  const RangeKernel& kernel_;
};

}  // namespace

size_t Chunks::header_bytes() const { return padded(ranges() * kRangeBytes); }

void compress(const void* source, ElementType type, const Chunks& chunks, uint8_t* out, const Execution& execution) {
  const RangeKernel& kernel = *execution.kernel;
  switch (type) {
    case ElementType::kFloat32:
      compress_typed(static_cast<const float*>(source), kernel.float32, chunks, out, execution);
      return;
    case ElementType::kFloat16:
      compress_typed(static_cast<const Float16*>(source), kernel.float16, chunks, out, execution);
      return;
    case ElementType::kBFloat16:
      compress_typed(static_cast<const BFloat16*>(source), kernel.bfloat16, chunks, out, execution);
      return;
  }
}

void decompress(const uint8_t* compressed, void* target, ElementType type, bool accumulate, const Chunks& chunks,
                const Execution& execution) {
  const RangeKernel& kernel = *execution.kernel;
  switch (type) {
    case ElementType::kFloat32:
      decompress_typed(compressed, static_cast<float*>(target), kernel.float32, accumulate, chunks, execution);
      return;
    case ElementType::kFloat16:
      decompress_typed(compressed, static_cast<Float16*>(target), kernel.float16, accumulate, chunks, execution);
      return;
    case ElementType::kBFloat16:
      decompress_typed(compressed, static_cast<BFloat16*>(target), kernel.bfloat16, accumulate, chunks, execution);
      return;
  }
}

void decompress_reduce_compress(const uint8_t* received, bool average, const Chunks& versions, uint8_t* out,
                                const Execution& execution) {
  Quantize<float>* const quantize_sum = execution.kernel->quantize_sum;
  const size_t ranges = versions.ranges();
  const size_t header = versions.header_bytes();
  const Store store = store_for(versions.elements);
  const float factor = average ? static_cast<float>(1.0 / static_cast<double>(versions.count)) : 1.0F;
  const Summation sum_of(received, versions, execution);
  const auto times_factor = [&](Extent extent) {
    return Extent{extent.lowest * factor, extent.highest * factor, extent.finite};
  };
  write_padding(out, versions);
  if (versions.block <= kSliceElements) {
    in_parts(ranges, versions.block * versions.count, execution, [&](size_t first, size_t last) {
      alignas(64) float sums[2][kSliceElements];
      // A range is quantized after the next has been summed: what that waits for is then there.
      Extent extents[2];
      const auto finish = [&](size_t range) {
        const Span span = span_of(versions, range);
        write_extent(out, range, extents[range % 2]);
        quantize(quantize_sum, sums[range % 2], span.count, factor, extents[range % 2], out + header + span.first,
                 store);
      };
      for (size_t range = first; range < last; ++range) {
        extents[range % 2] = canonical(times_factor(sum_of(range, span_of(versions, range), sums[range % 2])));
        if (range > first) finish(range - 1);
      }
      if (last > first) finish(last - 1);
    });
    return;
  }
  // Summed twice, for the extent and for the bytes: cheaper than to write the sums to memory and read them again.
  for (size_t range = 0; range < ranges; ++range) {
    const Span span = span_of(versions, range);
    const size_t slices = slices_of(span);
    const size_t work = kSliceElements * versions.count;
    std::vector<Extent> extents(slices);
    in_parts(slices, work, execution, [&](size_t first, size_t last) {
      alignas(64) float sum[kSliceElements];
      for (size_t slice = first; slice < last; ++slice) {
        const Span part = slice_of(span, slice);
        extents[slice] = sum_of(range, part, sum);
      }
    });
    const Extent extent = canonical(times_factor(joined(extents.data(), slices)));
    write_extent(out, range, extent);
    in_parts(slices, work, execution, [&](size_t first, size_t last) {
      alignas(64) float sum[kSliceElements];
      for (size_t slice = first; slice < last; ++slice) {
        const Span part = slice_of(span, slice);
        sum_of(range, part, sum);
        quantize(quantize_sum, sum, part.count, factor, extent, out + header + part.first, store);
      }
    });
  }
}

}  // namespace bagua_kernels

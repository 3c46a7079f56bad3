#include "minmax_uint8.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "chunk_walk.h"
#include "range_formula.h"
#include "range_kernel.h"

namespace bagua_kernels {
namespace {

Levels read_levels(const uint8_t* chunk, size_t range) {
  float ends[2];
  std::memcpy(ends, chunk + range * kRangeBytes, sizeof(ends));
  const float lowest = ends[0];
  const float highest = ends[1];
  const float half = half_of(lowest, highest);
  const float scale = scale_of(half);
  // One level: (255 - 254) * what it stands for.
  if (scale == 0.0F) return {kIntegers + 254.0F, closest_to_zero(lowest, highest), lowest, highest};
  return {bias_of(highest, scale), half * kUnitsPerLevel, lowest, highest};
}

template <typename T>
void quantize(const ElementKernel<T>& kernel, const T* source, size_t count, const Extent& extent, uint8_t* bytes,
              Store store) {
  if (extent.finite) {
    const float scale = scale_of(half_of(extent.lowest, extent.highest));
    kernel.quantize(source, count, {scale, bias_of(extent.highest, scale)}, bytes, store);
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

template <typename T>
void compress_typed(const T* source, const ElementKernel<T>& kernel, const Chunks& chunks, uint8_t* out,
                    const Execution& execution) {
  const size_t ranges = chunks.ranges();
  const size_t header = chunks.header_bytes();
  const Store store = store_for(chunks.count * chunks.elements);
  for (size_t chunk = 0; chunk < chunks.count; ++chunk) write_padding(out + chunk * chunks.stride, chunks);
  if (chunks.block <= kSliceElements) {
    in_parts(chunks.count * ranges, chunks.block, execution, [&](size_t first, size_t last) {
      // A range is quantized after the next has been measured: what that waits for is then there.
      Extent extents[2];
      const auto from = [&](size_t unit, const Span& span) {
        return source + unit / ranges * chunks.elements + span.first;
      };
      const auto finish = [&](size_t unit) {
        const Span span = span_of(chunks, unit % ranges);
        uint8_t* to = out + unit / ranges * chunks.stride + header + span.first;
        quantize(kernel, from(unit, span), span.count, extents[unit % 2], to, store);
      };
      for (size_t unit = first; unit < last; ++unit) {
        const Span span = span_of(chunks, unit % ranges);
        extents[unit % 2] = canonical(kernel.extent(from(unit, span), span.count));
        write_extent(out + unit / ranges * chunks.stride, unit % ranges, extents[unit % 2]);
        if (unit > first) finish(unit - 1);
      }
      if (last > first) finish(last - 1);
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
        quantize(kernel, from + part.first, part.count, extent, to + header + part.first, store);
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

}  // namespace bagua_kernels

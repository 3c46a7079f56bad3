// Versions of a chunk are added as integers and made into bytes again; bagua/kernels/minmax_uint8_reference.py has the
// formula, by whose names things are called here.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "chunk_walk.h"
#include "minmax_uint8.h"
#include "range_formula.h"
#include "range_kernel.h"
#include "weighted_range.h"

namespace bagua_kernels {
namespace {

constexpr float kLevelParts = 128.0F;

// What a range's sums become.
struct Result {
  Extent ends;
  float scale;  // 0 if there is one level
  SumExtent sums;
};

// How sums become levels of the result, of which there is more than one. Sums of more than 16 bits are to be shortened.
SumScale sum_scale_of(const Result& result) {
  const auto spread = static_cast<uint32_t>(result.sums.highest - result.sums.lowest);
  const auto number = static_cast<float>(spread);
  uint32_t bits = 0;
  std::memcpy(&bits, &number, sizeof(bits));
  const int shift = 16 - (static_cast<int>(bits >> 23) - 126);
  const uint32_t shifted = shift >= 0 ? spread << shift : spread >> -shift;
  const float top = rounded(result.ends.highest * result.scale);
  const float plus = kLevelParts * (result.ends.lowest * result.scale + (255.0F - top)) + (kLevelParts / 2.0F + 1.0F);
  return {static_cast<int16_t>(result.sums.lowest), shift,
          static_cast<uint16_t>(kLevelParts * 255.0F * 65536.0F / static_cast<float>(shifted)),
          static_cast<uint16_t>(std::clamp(plus, 0.0F, kLevelParts - 1.0F))};
}

// The sums of a part of a range over all versions, whose extent is found with them. More than 8 versions do not fit
// into 16 bits; then the sums of two at a time are added up, and shortened to 16 bits when the extent is known.
class Sums {
 public:
  explicit Sums(const Chunks& versions) : versions_(versions), is_wide_(versions.count > kVersionsAtOnce) {
    if (is_wide_) totals_.resize(kRoom);
  }

  SumExtent add(const SumKernel& kernel, const uint8_t* bytes, size_t count, const int16_t* weights) {
    if (!is_wide_) return kernel.add(bytes, versions_.stride, weights, versions_.count, count, sums_.data());
    const size_t sums = sums_of(kernel, count);
    std::fill_n(totals_.begin(), sums, 0);
    for (size_t first = 0; first < versions_.count; first += kVersionsAdded) {
      const size_t batch = std::min(kVersionsAdded, versions_.count - first);
      kernel.add(bytes + first * versions_.stride, versions_.stride, weights + first, batch, count, sums_.data());
      kernel.add_up(sums_.data(), sums, totals_.data());
    }
    SumExtent extent{totals_[0], totals_[0]};
    for (size_t i = 0; i < sums; ++i) {
      extent.lowest = std::min(extent.lowest, totals_[i]);
      extent.highest = std::max(extent.highest, totals_[i]);
    }
    return extent;
  }

  void quantize(const SumKernel& kernel, size_t count, const SumScale& scale, int32_t lowest, uint8_t* out,
                Store store) {
    SumScale how = scale;
    if (is_wide_) {
      const size_t sums = sums_of(kernel, count);
      for (size_t i = 0; i < sums; ++i) {
        const auto above = static_cast<uint32_t>(totals_[i] - lowest);
        sums_[i] = static_cast<int16_t>(scale.shift >= 0 ? above << scale.shift : above >> -scale.shift);
      }
      how.lowest = 0;
      how.shift = 0;
    }
    kernel.quantize(sums_.data(), count, how, out, store);
  }

 private:
  // Elements of a range, and what the last group of their sums is filled up with.
  static constexpr size_t kRoom = kSliceElements + kMostSumsInGroup;
  // With weights of up to 2^14.
  static constexpr size_t kVersionsAdded = 2;

  static size_t sums_of(const SumKernel& kernel, size_t count) {
    return (count + kernel.sums_in_group - 1) / kernel.sums_in_group * kernel.sums_in_group;
  }

  const Chunks& versions_;
  bool is_wide_;
  alignas(64) std::array<int16_t, kRoom> sums_;  // NOLINT(cppcoreguidelines-pro-type-member-init): written before read
  std::vector<int32_t> totals_;
};

class Reduction {
 public:
  Reduction(const uint8_t* received, bool average, const Chunks& versions, uint8_t* out, const Execution& execution)
      : received_(received),
        factor_(average ? static_cast<float>(1.0 / static_cast<double>(versions.count)) : 1.0F),
        versions_(versions),
        out_(out),
        execution_(execution),
        kernel_(execution.kernel->sum),
        header_(versions.header_bytes()),
        store_(store_for(versions.elements)) {}

  void run() const {
    write_padding(out_, versions_);
    if (versions_.block <= kSliceElements) {
      short_ranges();
      return;
    }
    for (size_t range = 0; range < versions_.ranges(); ++range) long_range(range);
  }

 private:
  Result result_of(const WeightedRange& weighted, const SumExtent& sums) const {
    const float lowest = weighted.value_of(sums.lowest) * factor_;
    const float highest = weighted.value_of(sums.highest) * factor_;
    const Extent ends = canonical({lowest, highest, std::isfinite(lowest) && std::isfinite(highest)});
    return {ends, scale_of(half_of(ends.lowest, ends.highest)), sums};
  }

  void quantize(Sums& sums, const Span& part, const Result& result) const {
    uint8_t* to = out_ + header_ + part.first;
    if (!result.ends.finite) {
      std::memset(to, 0, part.count);
    } else if (result.scale == 0.0F) {
      std::memset(to, 255, part.count);
    } else {
      sums.quantize(kernel_, part.count, sum_scale_of(result), result.sums.lowest, to, store_);
    }
  }

  const uint8_t* bytes_of(const Span& part) const { return received_ + header_ + part.first; }

  // While the sums of a range are made, the weights of the next are found, and then the bytes of the one before: what
  // each of them waits for is then there.
  void short_ranges() const {
    in_parts(versions_.ranges(), versions_.block * versions_.count, execution_, [&](size_t first, size_t last) {
      if (first == last) return;
      Sums sums[2] = {Sums(versions_), Sums(versions_)};
      WeightedRange weighted[2] = {WeightedRange(versions_), WeightedRange(versions_)};
      Result results[2];
      weighted[first % 2].read(received_, first);
      for (size_t range = first; range < last; ++range) {
        const size_t now = range % 2;
        const size_t other = 1 - now;
        if (range + 1 < last) weighted[other].read(received_, range + 1);
        const Span span = span_of(versions_, range);
        const SumExtent extent = sums[now].add(kernel_, bytes_of(span), span.count, weighted[now].weights());
        results[now] = result_of(weighted[now], extent);
        write_extent(out_, range, results[now].ends);
        if (range > first) quantize(sums[other], span_of(versions_, range - 1), results[other]);
      }
      const size_t end = (last - 1) % 2;
      quantize(sums[end], span_of(versions_, last - 1), results[end]);
    });
  }

  // Summed twice, for the extent and for the bytes: cheaper than to write the sums to memory and read them again.
  void long_range(size_t range) const {
    WeightedRange weighted(versions_);
    weighted.read(received_, range);
    const Span span = span_of(versions_, range);
    std::vector<SumExtent> extents(slices_of(span));
    const size_t work = kSliceElements * versions_.count;
    in_parts(extents.size(), work, execution_, [&](size_t first, size_t last) {
      Sums sums(versions_);
      for (size_t slice = first; slice < last; ++slice) {
        const Span part = slice_of(span, slice);
        extents[slice] = sums.add(kernel_, bytes_of(part), part.count, weighted.weights());
      }
    });
    SumExtent extent = extents[0];
    for (const SumExtent& one : extents) {
      extent.lowest = std::min(extent.lowest, one.lowest);
      extent.highest = std::max(extent.highest, one.highest);
    }
    const Result result = result_of(weighted, extent);
    write_extent(out_, range, result.ends);
    in_parts(extents.size(), work, execution_, [&](size_t first, size_t last) {
      Sums sums(versions_);
      for (size_t slice = first; slice < last; ++slice) {
        const Span part = slice_of(span, slice);
        sums.add(kernel_, bytes_of(part), part.count, weighted.weights());
        quantize(sums, part, result);
      }
    });
  }

  const uint8_t* received_;
  float factor_;
  const Chunks& versions_;
  uint8_t* out_;
  const Execution& execution_;
  const SumKernel& kernel_;
  size_t header_;
  Store store_;
};

}  // namespace

void decompress_reduce_compress(const uint8_t* received, bool average, const Chunks& versions, uint8_t* out,
                                const Execution& execution) {
  Reduction(received, average, versions, out, execution).run();
}

}  // namespace bagua_kernels

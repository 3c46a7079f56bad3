// A range of several versions of a chunk that are to be added as integers: what each of them weighs, and what a sum of
// weighted levels stands for. To be built as range_formula.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "chunk_walk.h"
#include "minmax_uint8.h"
#include "range_formula.h"

namespace bagua_kernels {

// The ends of so many versions are worked on at once. One after the other they would take a third of the time of a sum.
constexpr size_t kEnds = 4;
using Ends = float __attribute__((vector_size(kEnds * sizeof(float))));

// K of the formula.
inline float weight_of_widest(size_t versions) {
  if (versions <= 2 || versions > kVersionsAtOnce) return 0x1p14F;
  return versions <= 4 ? 0x1p13F : 0x1p12F;
}

inline int32_t weighted(float number, int16_t weight) {
  return ((static_cast<int32_t>(number) - 128) * weight + 64) >> 7;
}

class WeightedRange {
 public:
  explicit WeightedRange(const Chunks& versions)
      : versions_(versions), widest_weight_(weight_of_widest(versions.count)), weights_(padded_count()) {
    of_ends_.resize(weights_.size() / kEnds);
  }

  void read(const uint8_t* received, size_t range) {
    base_ = 0.0F;
    Ends widest{};
    Ends scale_of_widest = Ends{} + std::numeric_limits<float>::infinity();
    for (size_t first = 0; first < versions_.count; first += kEnds) {
      const size_t count = std::min(kEnds, versions_.count - first);
      Ends lowest{};
      Ends highest{};
      for (size_t i = 0; i < count; ++i) {
        const uint8_t* ends = received + (first + i) * versions_.stride + range * kRangeBytes;
        __builtin_prefetch(ends + kAheadBytes);
        float pair[2];
        std::memcpy(pair, ends, sizeof(pair));
        lowest[i] = pair[0];
        highest[i] = pair[1];
      }
      const Ends half = half_of(lowest, highest);
      const Ends scale = scale_of(half);
      const Ends bias = bias_of(highest, scale);
      const Ends level = bias - kIntegers;
      const Ends not_negative = level > 0.0F ? level : Ends{};
      const Ends last = Ends{} + 255.0F;
      const Ends closest = scale > 0.0F && not_negative < 255.0F ? not_negative : last;
      const Ends above_zero = ((kIntegers + closest) - bias) * (half * kUnitsPerLevel);
      const Ends bases = scale == 0.0F ? closest_to_zero(lowest, highest) : above_zero;
      for (size_t i = 0; i < count; ++i) base_ = first + i == 0 ? bases[i] : base_ + bases[i];
      OfEnds& of_ends = of_ends_[first / kEnds];
      // Ends in the wrong order, which none of our own ranges has, weigh nothing: weights must fit.
      of_ends.half = scale > 0.0F ? half : Ends{};
      of_ends.closest = closest;
      widest = of_ends.half > widest ? of_ends.half : widest;
      const Ends candidate = scale > 0.0F ? scale : scale_of_widest;
      scale_of_widest = candidate < scale_of_widest ? candidate : scale_of_widest;
    }
    float largest_half = widest[0];
    float smallest_scale = scale_of_widest[0];
    for (size_t i = 1; i < kEnds; ++i) {
      largest_half = std::max(largest_half, widest[i]);
      smallest_scale = std::min(smallest_scale, scale_of_widest[i]);
    }
    weigh(largest_half, smallest_scale);
    step_ = largest_half * kUnitsPerLevel;
  }

  const int16_t* weights() const { return weights_.data(); }
  float value_of(int32_t sum) const {
    return base_ + static_cast<float>(sum - zero_) * (128.0F / widest_weight_) * step_;
  }

 private:
  struct OfEnds {
    Ends half;  // 0 if there is one level
    Ends closest;
  };
  static constexpr size_t kAheadBytes = 128;

  size_t padded_count() const { return (versions_.count + kEnds - 1) / kEnds * kEnds; }

  void weigh(float largest_half, float smallest_scale) {
    zero_ = 0;
    if (largest_half == 0.0F) {  // the scale is infinite
      std::fill(weights_.begin(), weights_.end(), int16_t{0});
      return;
    }
    for (size_t first = 0; first < versions_.count; first += kEnds) {
      const OfEnds& of_ends = of_ends_[first / kEnds];
      const Ends weights = rounded((of_ends.half * smallest_scale) * (widest_weight_ / 127.5F));
      for (size_t i = 0; i < kEnds; ++i) {
        weights_[first + i] = static_cast<int16_t>(weights[i]);
        zero_ += weighted(of_ends.closest[i], weights_[first + i]);
      }
    }
  }

  const Chunks& versions_;
  float widest_weight_;
  std::vector<int16_t> weights_;
  std::vector<OfEnds> of_ends_;
  float base_ = 0.0F;
  float step_ = 0.0F;
  int32_t zero_ = 0;
};

}  // namespace bagua_kernels

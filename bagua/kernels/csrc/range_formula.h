// The formula of MinMaxUInt8 for what belongs to a range; bagua/kernels/minmax_uint8_reference.py has it and its words.
// V is float, or a vector of floats for several ranges at once. To be built without contraction into fused operations.
#pragma once

#include <limits>

#include "range_kernel.h"

namespace bagua_kernels {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
// 1 / 127.5.
constexpr float kUnitsPerLevel = 0.007843137718737125F;

// As it is stored. -0.0 becomes 0.0: which zero is the smaller differs between machines.
inline Extent canonical(const Extent& extent) {
  return extent.finite ? Extent{extent.lowest + 0.0F, extent.highest + 0.0F, true} : Extent{kNan, kNan, false};
}

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
V scale_of(V half) {
  const V scale = (V{} + 127.5F) / half;
  const V magnitude = scale < 0.0F ? -scale : scale;
  return magnitude <= std::numeric_limits<float>::max() ? scale : V{};
}

// With it, the number of the highest level is kIntegers + 255.
template <typename V>
V bias_of(V highest, V scale) {
  return kIntegers + 255.0F - rounded(highest * scale);
}

// What a range of one level stands for; NaN if the ends are.
template <typename V>
V closest_to_zero(V lowest, V highest) {
  const V not_above_zero = highest < 0.0F ? highest : highest - highest;
  return lowest > 0.0F ? lowest : not_above_zero;
}

}  // namespace bagua_kernels

// The inner loops of MinMaxUInt8 for any processor: plain loops, which compilers turn into vector instructions (SSE2 on
// x86-64, NEON on arm64).
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "range_kernel.h"

namespace bagua_kernels {
namespace {

inline float from_bits(uint32_t bits) {
  float value = 0.0F;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
inline uint32_t bits_of(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// --- to fp32 and back, rounding to even -----------------------------------------------------------------------------

inline float load(float value) { return value; }
#if defined(__aarch64__)
// The processor converts them; __fp16 is of both compilers.
inline float load(Float16 value) {
  __fp16 half = 0;
  std::memcpy(&half, &value.bits, sizeof(half));
  return static_cast<float>(half);
}
inline void store(Float16* to, float value) {
  const auto half = static_cast<__fp16>(value);
  std::memcpy(&to->bits, &half, sizeof(half));
}
#else
inline float load(Float16 value) {
  const uint32_t half = value.bits;
  // Exponent and fraction in their places; the factor corrects the bias, also for subnormal numbers.
  const uint32_t magnitude = bits_of(from_bits((half & 0x7fffU) << 13) * 0x1p112F);
  const uint32_t not_finite = (half & 0x7c00U) == 0x7c00U ? 0x7f800000U : 0U;
  return from_bits(magnitude | not_finite | (half & 0x8000U) << 16);
}
inline void store(Float16* to, float value) {
  const uint32_t sign = bits_of(value) & 0x80000000U;
  const uint32_t magnitude = bits_of(value) ^ sign;
  // Normal results: change the bias, round to even by an addition, which carries into the exponent.
  const uint32_t normal = (magnitude + 0xc8000fffU + ((magnitude >> 13) & 1U)) >> 13;
  // Below 2^-14: adding 0.5 shifts the fraction to where it belongs, and rounds it.
  const uint32_t subnormal = bits_of(from_bits(magnitude) + 0.5F) - bits_of(0.5F);
  // 65520 and above round to infinity; NaN keeps being one.
  const uint32_t special = magnitude > 0x7f800000U ? 0x7e00U : 0x7c00U;
  const uint32_t finite = magnitude < 0x38800000U ? subnormal : normal;
  to->bits = static_cast<uint16_t>((magnitude >= 0x477ff000U ? special : finite) | sign >> 16);
}
#endif
inline float load(BFloat16 value) { return from_bits(static_cast<uint32_t>(value.bits) << 16); }

inline void store(float* to, float value) { *to = value; }
inline void store(BFloat16* to, float value) {
  const uint32_t bits = bits_of(value);
  to->bits = static_cast<uint16_t>((bits + ((bits >> 16) & 1U) + 0x7fffU) >> 16);
}

// --- the extent ------------------------------------------------------------------------------------------------------

// Lanes of their own, because compilers do not change the order of fp32 operations.
Extent extent(const float* source, size_t count) {
  constexpr size_t kLanes = 16;
  float lowest[kLanes];
  float highest[kLanes];
  float not_finite[kLanes];  // 0, or NaN once an element was not finite
  for (size_t lane = 0; lane < kLanes; ++lane) {
    lowest[lane] = highest[lane] = source[0];
    not_finite[lane] = 0.0F;
  }
  const auto take = [&](size_t lane, float value) {
    lowest[lane] = value < lowest[lane] ? value : lowest[lane];
    highest[lane] = value > highest[lane] ? value : highest[lane];
    not_finite[lane] += value * 0.0F;
  };
  size_t done = 0;
  for (; done + kLanes <= count; done += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) take(lane, source[done + lane]);
  }
  for (; done < count; ++done) take(0, source[done]);
  Extent result{lowest[0], highest[0], not_finite[0] == 0.0F};
  for (size_t lane = 1; lane < kLanes; ++lane) {
    result.lowest = std::min(result.lowest, lowest[lane]);
    result.highest = std::max(result.highest, highest[lane]);
    result.finite = result.finite && not_finite[lane] == 0.0F;
  }
  return result;
}

// Integers in the order of the 16-bit floats whose bits they are made of, because processors have the smaller of two
// integers, and twice as many in a register; infinities and NaN are at the ends of the order.
inline int16_t key_of(uint16_t value) {
  const auto bits = static_cast<int16_t>(value);
  return static_cast<int16_t>(bits ^ ((bits >> 15) & 0x7fff));
}
template <typename T>
float value_of(int16_t key) {
  return load(T{static_cast<uint16_t>(key < 0 ? key ^ 0x7fff : key)});
}
constexpr int16_t infinity_key(Float16 /*type*/) { return 0x7c00; }
constexpr int16_t infinity_key(BFloat16 /*type*/) { return 0x7f80; }

template <typename T>
Extent extent(const T* source, size_t count) {
  int16_t lowest = key_of(source[0].bits);
  int16_t highest = lowest;
  for (size_t i = 0; i < count; ++i) {
    const int16_t key = key_of(source[i].bits);
    lowest = std::min(lowest, key);
    highest = std::max(highest, key);
  }
  constexpr int16_t kInfinity = infinity_key(T{});
  return {value_of<T>(lowest), value_of<T>(highest), highest < kInfinity && lowest > -kInfinity - 1};
}

// --- bytes -----------------------------------------------------------------------------------------------------------

template <typename T>
void quantize(const T* source, size_t count, const Scale& levels, uint8_t* out, Store /*how*/) {
  const float scale = levels.scale;
  const float bias = levels.bias;
  for (size_t i = 0; i < count; ++i) {
    const float number = load(source[i]) * scale + bias;
    const float above = number > kIntegers ? number : kIntegers;
    const float clamped = above < kIntegers + 255.0F ? above : kIntegers + 255.0F;
    out[i] = static_cast<uint8_t>(bits_of(clamped));
  }
}

inline float level(uint8_t byte, const Levels& levels) {
  return (from_bits(uint32_t{kIntegersBits} | byte) - levels.bias) * levels.step;
}
// Where an end is NaN, so is the result.
inline float clamped(uint8_t byte, const Levels& levels) {
  const float value = level(byte, levels);
  const float above = value > levels.lowest ? value : levels.lowest;
  return above < levels.highest ? above : levels.highest;
}

template <typename T>
void decode(const uint8_t* bytes, size_t count, const Levels& range, T* target, Store /*how*/) {
  const Levels levels = range;
  for (size_t i = 0; i < count; ++i) store(target + i, clamped(bytes[i], levels));
}

template <typename T>
void decode_add(const uint8_t* bytes, size_t count, const Levels& range, T* target) {
  const Levels levels = range;
  for (size_t i = 0; i < count; ++i) store(target + i, load(target[i]) + clamped(bytes[i], levels));
}

// --- sums of versions, in the order of the elements ------------------------------------------------------------------

SumExtent add_versions(const uint8_t* bytes, size_t stride, const int16_t* weights, size_t versions, size_t count,
                       int16_t* sums) {
  std::memset(sums, 0, count * sizeof(*sums));
  for (size_t version = 0; version < versions; ++version) {
    const uint8_t* from = bytes + version * stride;
    const int32_t weight = weights[version];
    for (size_t i = 0; i < count; ++i) {
      sums[i] = static_cast<int16_t>(sums[i] + (((from[i] - 128) * weight + 64) >> 7));
    }
  }
  int16_t lowest = sums[0];
  int16_t highest = sums[0];
  for (size_t i = 0; i < count; ++i) {
    lowest = sums[i] < lowest ? sums[i] : lowest;
    highest = sums[i] > highest ? sums[i] : highest;
  }
  return {lowest, highest};
}

void add_up(const int16_t* sums, size_t count, int32_t* totals) {
  for (size_t i = 0; i < count; ++i) totals[i] += sums[i];
}

void quantize_sums(const int16_t* sums, size_t count, const SumScale& scale, uint8_t* out, Store /*how*/) {
  const SumScale levels = scale;
  for (size_t i = 0; i < count; ++i) {
    const auto above = static_cast<uint16_t>(static_cast<uint16_t>(sums[i] - levels.lowest) << levels.shift);
    out[i] = static_cast<uint8_t>((((uint32_t{above} * levels.times) >> 16) + levels.plus) >> 7);
  }
}

void end_of_stream() {}

template <typename T>
constexpr ElementKernel<T> element_kernel() {
  return {extent, quantize<T>, decode<T>, decode_add<T>};
}

}  // namespace

extern const RangeKernel kPortableKernel;
const RangeKernel kPortableKernel = {"portable",
                                     element_kernel<float>(),
                                     element_kernel<Float16>(),
                                     element_kernel<BFloat16>(),
                                     {1, add_versions, add_up, quantize_sums},
                                     end_of_stream};

}  // namespace bagua_kernels

// The inner loops of MinMaxUInt8 for x86-64 with AVX2, AVX-512, or that and its instructions for bfloat16. CMake builds
// this file once for each, with BAGUA_KERNEL_TABLE naming the table that it defines.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "lanes_x86.h"
#include "range_kernel.h"
#include "sums_x86.h"

namespace bagua_kernels {
namespace {

constexpr size_t kLanesOfGroup = kByteGroup / kLanes;

// The first `count` elements, fewer than a register holds, and then the last of them again.
template <typename T>
inline Lanes load_tail(const T* from, size_t count) {
  T padded[kLanes];
  for (size_t lane = 0; lane < kLanes; ++lane) padded[lane] = from[lane < count ? lane : count - 1];
  return load(padded);
}

// Several registers of each, because an operation waits for the one before on the same register.
constexpr size_t kRegisters = 4;

// The order of 16-bit floats is that of integers, of which a register holds twice as many as of fp32 numbers;
// infinities and NaN are at its ends.
constexpr int16_t infinity_key(Float16 /*type*/) { return 0x7c00; }
constexpr int16_t infinity_key(BFloat16 /*type*/) { return 0x7f80; }

template <typename T>
float value_of_key(int16_t key) {
  const T value{static_cast<uint16_t>(key < 0 ? key ^ 0x7fff : key)};
  float result[kLanes];
  store(result, load_tail(&value, 1));
  return result[0];
}

template <typename T>
Extent extent(const T* source, size_t count) {
  static_assert(sizeof(T) == sizeof(int16_t));
  Keys lowest[kRegisters];
  Keys highest[kRegisters];
  const auto tail = [&](size_t first) {
    T padded[kKeys];
    for (size_t i = 0; i < kKeys; ++i) padded[i] = source[first + i < count ? first + i : first];
    return load_keys(padded);
  };
  const Keys start = count >= kKeys ? load_keys(source) : tail(0);
  for (size_t i = 0; i < kRegisters; ++i) lowest[i] = highest[i] = start;
  const auto take = [&](size_t i, Keys keys) {
    lowest[i] = smaller_key(keys, lowest[i]);
    highest[i] = larger_key(keys, highest[i]);
  };
  size_t done = 0;
  for (; done + kRegisters * kKeys <= count; done += kRegisters * kKeys) {
    for (size_t i = 0; i < kRegisters; ++i) take(i, load_keys(source + done + i * kKeys));
  }
  for (; done + kKeys <= count; done += kKeys) take(0, load_keys(source + done));
  if (done < count) take(0, tail(done));
  for (size_t i = 1; i < kRegisters; ++i) {
    lowest[0] = smaller_key(lowest[i], lowest[0]);
    highest[0] = larger_key(highest[i], highest[0]);
  }
  const int16_t low = smallest_key(lowest[0]);
  const int16_t high = largest_key(highest[0]);
  constexpr int16_t kInfinity = infinity_key(T{});
  const bool finite = high < kInfinity && low > -kInfinity - 1;
  return {value_of_key<T>(low), value_of_key<T>(high), finite};
}

template <>
Extent extent<float>(const float* source, size_t count) {
  Lanes lowest[kRegisters];
  Lanes highest[kRegisters];
  Lanes not_finite[kRegisters];
  const Lanes start = count >= kLanes ? load(source) : load_tail(source, count);
  for (size_t i = 0; i < kRegisters; ++i) {
    lowest[i] = start;
    highest[i] = start;
    not_finite[i] = add_if_not_finite(fill(0.0F), start);
  }
  const auto take = [&](size_t i, Lanes values) {
    lowest[i] = smaller(values, lowest[i]);
    highest[i] = larger(values, highest[i]);
    not_finite[i] = add_if_not_finite(not_finite[i], values);
  };
  size_t done = 0;
  for (; done + kRegisters * kLanes <= count; done += kRegisters * kLanes) {
    for (size_t i = 0; i < kRegisters; ++i) take(i, load(source + done + i * kLanes));
  }
  for (; done + kLanes <= count; done += kLanes) take(0, load(source + done));
  if (done < count) take(0, load_tail(source + done, count - done));
  for (size_t i = 1; i < kRegisters; ++i) {
    lowest[0] = smaller(lowest[i], lowest[0]);
    highest[0] = larger(highest[i], highest[0]);
    not_finite[0] = add(not_finite[i], not_finite[0]);
  }
  return {smallest(lowest[0]), largest(highest[0]), all_zero(not_finite[0])};
}

template <typename T>
void quantize(const T* source, size_t count, const Scale& levels, uint8_t* out, Store how) {
  const Lanes scale = fill(levels.scale);
  const Lanes bias = fill(levels.bias);
  size_t done = 0;
  Lanes numbers[kLanesOfGroup];
  const auto group = [&](size_t at) {
    // The range after the next, which is measured already, is read next; it comes while this, which is in a cache, is
    // computed.
    constexpr size_t kLine = 64 / sizeof(T);
    for (size_t i = 0; i < kByteGroup; i += kLine) __builtin_prefetch(source + 2 * count + at + i);
    for (size_t i = 0; i < kLanesOfGroup; ++i) {
      numbers[i] = add(multiply(load(source + at + i * kLanes), scale), bias);
    }
    return to_bytes(numbers);
  };
  if (how == Store::kStreamed && reinterpret_cast<uintptr_t>(out) % kStreamAlignment == 0) {
    for (; done + kByteGroup <= count; done += kByteGroup) stream_bytes(out + done, group(done));
  }
  for (; done + kByteGroup <= count; done += kByteGroup) store_bytes(out + done, group(done));
  if (done < count) {
    const size_t rest = count - done;
    T padded[kByteGroup];
    for (size_t i = 0; i < kByteGroup; ++i) padded[i] = source[done + (i < rest ? i : 0)];
    for (size_t i = 0; i < kLanesOfGroup; ++i) {
      numbers[i] = add(multiply(load(padded + i * kLanes), scale), bias);
    }
    uint8_t bytes[kByteGroup];
    store_bytes(bytes, to_bytes(numbers));
    std::memcpy(out + done, bytes, rest);
  }
}

struct Decoder {
  Lanes bias, step, lowest, highest;

  explicit Decoder(const Levels& levels)
      : bias(fill(levels.bias)), step(fill(levels.step)), lowest(fill(levels.lowest)), highest(fill(levels.highest)) {}

  Lanes level(Lanes number) const { return multiply(subtract(number, bias), step); }
  // The ends come second: where they are NaN, so is the result.
  Lanes clamped(const uint8_t* bytes) const { return smaller(larger(level(load_numbers(bytes)), lowest), highest); }
};

// Calls `write(to, values)` for the last elements, fewer than a register holds, in a place that has room for all lanes.
template <typename T, typename Write>
inline void decode_tail(const Decoder& decoder, const uint8_t* bytes, size_t count, T* target, const Write& write) {
  uint8_t padded[kLanes] = {};
  std::memcpy(padded, bytes, count);
  T result[kLanes] = {};
  std::memcpy(result, target, count * sizeof(T));
  write(result, decoder.clamped(padded));
  std::memcpy(target, result, count * sizeof(T));
}

template <typename T>
void decode_to(const uint8_t* bytes, size_t count, const Levels& levels, T* target, Store how) {
  constexpr size_t kStoreBytes = kLanes * sizeof(T);
  const Decoder decoder(levels);
  const auto write = [](T* to, Lanes values) { store(to, values); };
  size_t done = 0;
  const size_t past = reinterpret_cast<uintptr_t>(target) % kStoreBytes;
  if (how == Store::kStreamed && past % sizeof(T) == 0 && count >= 2 * kLanes) {
    if (past != 0) {  // up to an aligned address; some elements are written twice
      store(target, decoder.clamped(bytes));
      done = (kStoreBytes - past) / sizeof(T);
    }
    for (; done + kLanes <= count; done += kLanes) stream(target + done, decoder.clamped(bytes + done));
  }
  for (; done + kLanes <= count; done += kLanes) store(target + done, decoder.clamped(bytes + done));
  if (done < count) decode_tail(decoder, bytes + done, count - done, target + done, write);
}

template <typename T>
void decode(const uint8_t* bytes, size_t count, const Levels& levels, T* target, Store how) {
  decode_to(bytes, count, levels, target, how);
}

#if defined(__AVX512BF16__)
template <>
void decode<BFloat16>(const uint8_t* bytes, size_t count, const Levels& levels, BFloat16* target, Store how) {
  // All results are multiples of the step, or ends.
  const auto is_normal = [](float value) { return std::fabs(value) >= std::numeric_limits<float>::min(); };
  const auto is_normal_or_zero = [&](float value) { return value == 0.0F || is_normal(value); };
  if (is_normal(levels.step) && is_normal_or_zero(levels.lowest) && is_normal_or_zero(levels.highest)) {
    decode_to(bytes, count, levels, reinterpret_cast<NormalBFloat16*>(target), how);
  } else {
    decode_to(bytes, count, levels, target, how);
  }
}
#endif

template <typename T>
void decode_add(const uint8_t* bytes, size_t count, const Levels& levels, T* target) {
  const Decoder decoder(levels);
  const auto write = [](T* to, Lanes values) { store(to, add(load(to), values)); };
  size_t done = 0;
  for (; done + kLanes <= count; done += kLanes) write(target + done, decoder.clamped(bytes + done));
  if (done < count) decode_tail(decoder, bytes + done, count - done, target + done, write);
}

template <typename T>
constexpr ElementKernel<T> element_kernel() {
  return {extent<T>, quantize<T>, decode<T>, decode_add<T>};
}

}  // namespace

extern const RangeKernel BAGUA_KERNEL_TABLE;
const RangeKernel BAGUA_KERNEL_TABLE = {kLanesName,
                                        element_kernel<float>(),
                                        element_kernel<Float16>(),
                                        element_kernel<BFloat16>(),
                                        {kByteGroup, add_versions, add_up, quantize_sums},
                                        end_of_stream};

}  // namespace bagua_kernels

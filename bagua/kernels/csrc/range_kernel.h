// MinMaxUInt8 of one range of elements, or of a piece of one: the inner loops, built once for each instruction set.
//
// The functions keep no state and may run in any thread. Sums are of integers; all other arithmetic is fp32 and rounds
// to nearest even after every operation, so that every table gives the same bytes;
// bagua/kernels/minmax_uint8_reference.py has the formula.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bagua_kernels {

// As stored in memory; nothing is computed in them.
struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// Of elements that are finite. If one is not, `finite` is false and the others mean nothing.
struct Extent {
  float lowest;
  float highest;
  bool finite;
};

// From here to twice as much, fp32 has the integers and nothing between them, so that the bits of kIntegers + n are
// kIntegersBits + n.
constexpr float kIntegers = 0x1p23F;
constexpr int32_t kIntegersBits = 0x4b000000;

// The levels of a range, for compression: how many in a unit, and what makes the lowest of them kIntegers.
struct Scale {
  float scale;
  float bias;
};

// The levels of a range, for decompression: kIntegers and a byte, less the bias, are a multiple of `step`; and the
// range's ends.
struct Levels {
  float bias;
  float step;
  float lowest;
  float highest;
};

// How the result is written. `kStreamed` goes around the caches: for results which are larger than these.
enum class Store { kCached, kStreamed };

// For one element type. Pointers need no alignment; `count` may be 0, but for `extent`.
template <typename T>
struct ElementKernel {
  Extent (*extent)(const T* source, size_t count);
  void (*quantize)(const T* source, size_t count, const Scale& scale, uint8_t* out, Store store);
  // These two clamp to the ends.
  void (*decode)(const uint8_t* bytes, size_t count, const Levels& levels, T* target, Store store);
  // Adds in fp32 to what is in `target`.
  void (*decode_add)(const uint8_t* bytes, size_t count, const Levels& levels, T* target);
};

// So many versions' sums of weighted levels fit into 16 bits; the weights of one or two versions are at most 2^14, of
// up to four 2^13, of up to eight 2^12.
constexpr size_t kVersionsAtOnce = 8;
constexpr size_t kMostSumsInGroup = 64;

struct SumExtent {
  int32_t lowest;
  int32_t highest;
};

// How sums become bytes: the upper 16 bits of ((sum - lowest) << shift) * times, and `plus`, are parts of a level, of
// which it has 128. Unsigned numbers of 16 bits.
struct SumScale {
  int16_t lowest;
  int shift;
  uint16_t times;
  uint16_t plus;
};

// Sums of weighted levels. They are written in an order of the table's own, in groups; the last group is filled up with
// some of the others, for which there must be room.
struct SumKernel {
  size_t sums_in_group;
  // Of `versions` versions, whose bytes lie `stride` bytes apart: of each ((byte - 128) * weight + 64) >> 7. At least
  // one version and one element. Returns the extent of the sums.
  SumExtent (*add)(const uint8_t* bytes, size_t stride, const int16_t* weights, size_t versions, size_t count,
                   int16_t* sums);
  // Adds `count` of them to `totals`, in their order.
  void (*add_up)(const int16_t* sums, size_t count, int32_t* totals);
  void (*quantize)(const int16_t* sums, size_t count, const SumScale& scale, uint8_t* out, Store store);
};

struct RangeKernel {
  const char* name;
  ElementKernel<float> float32;
  ElementKernel<Float16> float16;
  ElementKernel<BFloat16> bfloat16;
  SumKernel sum;
  // After the last streamed store of a thread, before another thread may read.
  void (*end_of_stream)();
};

// The best one that this processor has, found once.
const RangeKernel& range_kernel();
// By its name, for tests and measurements; nullptr if this processor or this build has none such.
const RangeKernel* range_kernel_named(const char* name);

}  // namespace bagua_kernels

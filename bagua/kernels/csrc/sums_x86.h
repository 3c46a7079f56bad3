// Sums of versions as 16-bit integers, with the registers of lanes_x86.h. Everything is local to the file that includes
// this, as there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "lanes_x86.h"
#include "range_kernel.h"

namespace bagua_kernels {
namespace {

// Sums of a group: those of every other element, then those of the ones between.
constexpr size_t kSumsOfRegister = kByteGroup / 2;
static_assert(kByteGroup <= kMostSumsInGroup);

// Asks for what is read some ranges later, into the second-level cache: not all processors foresee it where
// many versions are read at once. A version's part of `count` bytes as a whole, and then the next version's: in the
// order in which it is used, memory would have to open another of its rows for every line.
class Ahead {
 public:
  Ahead(const uint8_t* bytes, size_t stride, size_t count)
      : next_(bytes + kRanges * count), groups_(count / kByteGroup), skip_(stride - groups_ * kByteGroup) {}

  void ask() {
    __builtin_prefetch(next_, 0, 2);
    next_ += kByteGroup;
    if (++asked_ == groups_) {
      asked_ = 0;
      next_ += skip_;
    }
  }

 private:
  static constexpr size_t kRanges = 2;
  const uint8_t* next_;
  size_t groups_;
  size_t skip_;
  size_t asked_ = 0;
};

// The number of versions is known to the compiler: it keeps their weights in registers, and there is no loop over them.
template <size_t kVersions>
SumExtent add_so_many(const uint8_t* bytes, size_t stride, const int16_t* weights, size_t count, int16_t* sums) {
  Words weight[kVersions];
  for (size_t version = 0; version < kVersions; ++version) weight[version] = fill_words(weights[version]);
  Words lowest = fill_words(INT16_MAX);
  Words highest = fill_words(INT16_MIN);
  // `of(version)` gives a group's bytes.
  const auto group = [&](int16_t* to, const auto& of) {
    Words even = fill_words(0);
    Words odd = fill_words(0);
    for (size_t version = 0; version < kVersions; ++version) {
      Words even_bytes;
      Words odd_bytes;
      split_bytes(of(version), even_bytes, odd_bytes);
      even = add(even, multiply_rounded(even_bytes, weight[version]));
      odd = add(odd, multiply_rounded(odd_bytes, weight[version]));
    }
    lowest = smaller_key(lowest, smaller_key(even, odd));
    highest = larger_key(highest, larger_key(even, odd));
    store_words(to, even);
    store_words(to + kSumsOfRegister, odd);
  };
  Ahead ahead(bytes, stride, count);
  size_t done = 0;
  for (; done + kByteGroup <= count; done += kByteGroup) {
    group(sums + done, [&](size_t version) {
      ahead.ask();
      return load_words(bytes + version * stride + done);
    });
  }
  if (done < count) {
    group(sums + done, [&](size_t version) {
      const uint8_t* from = bytes + version * stride + done;
      uint8_t padded[kByteGroup];
      for (size_t i = 0; i < kByteGroup; ++i) padded[i] = from[done + i < count ? i : 0];
      return load_words(padded);
    });
  }
  return {smallest_key(lowest), largest_key(highest)};
}

SumExtent add_versions(const uint8_t* bytes, size_t stride, const int16_t* weights, size_t versions, size_t count,
                       int16_t* sums) {
  static_assert(kVersionsAtOnce == 8);
  switch (versions) {
    case 1: return add_so_many<1>(bytes, stride, weights, count, sums);
    case 2: return add_so_many<2>(bytes, stride, weights, count, sums);
    case 3: return add_so_many<3>(bytes, stride, weights, count, sums);
    case 4: return add_so_many<4>(bytes, stride, weights, count, sums);
    case 5: return add_so_many<5>(bytes, stride, weights, count, sums);
    case 6: return add_so_many<6>(bytes, stride, weights, count, sums);
    case 7: return add_so_many<7>(bytes, stride, weights, count, sums);
    default: return add_so_many<8>(bytes, stride, weights, count, sums);
  }
}

// Compilers vectorise it; `count` is a multiple of a group.
void add_up(const int16_t* sums, size_t count, int32_t* totals) {
  for (size_t first = 0; first < count; first += kByteGroup) {
    for (size_t i = 0; i < kByteGroup; ++i) totals[first + i] += sums[first + i];
  }
}

void quantize_sums(const int16_t* sums, size_t count, const SumScale& scale, uint8_t* out, Store how) {
  const Words lowest = fill_words(scale.lowest);
  const Words times = fill_words(scale.times);
  const Words plus = fill_words(scale.plus);
  const __m128i shift = _mm_cvtsi32_si128(scale.shift);
  const auto parts = [&](const int16_t* from) {
    return add(multiply_high(shift_left(subtract(load_words(from), lowest), shift), times), plus);
  };
  const auto group = [&](size_t at) { return join_bytes(parts(sums + at), parts(sums + at + kSumsOfRegister)); };
  size_t done = 0;
  if (how == Store::kStreamed && reinterpret_cast<uintptr_t>(out) % kStreamAlignment == 0) {
    for (; done + kByteGroup <= count; done += kByteGroup) stream_bytes(out + done, group(done));
  }
  for (; done + kByteGroup <= count; done += kByteGroup) store_bytes(out + done, group(done));
  if (done < count) {
    uint8_t bytes[kByteGroup];
    store_bytes(bytes, group(done));
    std::memcpy(out + done, bytes, count - done);
  }
}

}  // namespace
}  // namespace bagua_kernels

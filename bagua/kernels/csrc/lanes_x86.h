// A register of fp32 numbers and what the kernels do with it: one definition for each instruction set that the file
// which includes this is built for. Everything is local to that file: code for one instruction set must not be taken by
// the linker for another's.
#pragma once

// Some intrinsics of AVX-512 pass a register that is left undefined on purpose, of which GCC warns where they are used.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "range_kernel.h"

namespace bagua_kernels {
namespace {

// The one instruction that compares within a register finds the smallest unsigned number.
inline int16_t smallest_of_eight(__m128i keys) {
  const __m128i order = _mm_set1_epi16(INT16_MIN);
  return static_cast<int16_t>(_mm_cvtsi128_si32(_mm_xor_si128(_mm_minpos_epu16(_mm_xor_si128(keys, order)), order)));
}
inline int16_t largest_of_eight(__m128i keys) {
  const __m128i order = _mm_set1_epi16(INT16_MAX);
  return static_cast<int16_t>(_mm_cvtsi128_si32(_mm_xor_si128(_mm_minpos_epu16(_mm_xor_si128(keys, order)), order)));
}

#if defined(__AVX512F__) && defined(__AVX512BW__)

#if defined(__AVX512BF16__)
constexpr char kLanesName[] = "avx512bf16";
#else
constexpr char kLanesName[] = "avx512";
#endif
constexpr size_t kLanes = 16;
using Lanes = __m512;

inline Lanes fill(float value) { return _mm512_set1_ps(value); }
inline Lanes add(Lanes a, Lanes b) { return _mm512_add_ps(a, b); }
inline Lanes subtract(Lanes a, Lanes b) { return _mm512_sub_ps(a, b); }
inline Lanes multiply(Lanes a, Lanes b) { return _mm512_mul_ps(a, b); }
// If one is NaN: the second.
inline Lanes smaller(Lanes a, Lanes b) { return _mm512_min_ps(a, b); }
inline Lanes larger(Lanes a, Lanes b) { return _mm512_max_ps(a, b); }
// 0 where `sum` was 0 and `value` is finite, else NaN.
inline Lanes add_if_not_finite(Lanes sum, Lanes value) { return _mm512_fmadd_ps(value, _mm512_setzero_ps(), sum); }

inline float smallest(Lanes values) { return _mm512_reduce_min_ps(values); }
inline float largest(Lanes values) { return _mm512_reduce_max_ps(values); }
inline bool all_zero(Lanes values) { return _mm512_cmp_ps_mask(values, _mm512_setzero_ps(), _CMP_EQ_OQ) == 0xffff; }

inline Lanes load(const float* from) { return _mm512_loadu_ps(from); }
inline Lanes load(const Float16* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline Lanes load(const BFloat16* from) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
// kIntegers and the byte.
inline Lanes load_numbers(const uint8_t* from) {
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return _mm512_castsi512_ps(_mm512_or_si512(wide, _mm512_set1_epi32(kIntegersBits)));
}

inline __m256i to_float16(Lanes values) {
  return _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline __m256i to_bfloat16(Lanes values) {
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}
inline void store(float* to, Lanes values) { _mm512_storeu_ps(to, values); }
inline void store(Float16* to, Lanes values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), to_float16(values));
}
inline void store(BFloat16* to, Lanes values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), to_bfloat16(values));
}
// To an address that is a multiple of the bytes stored.
inline void stream(float* to, Lanes values) { _mm512_stream_ps(to, values); }
inline void stream(Float16* to, Lanes values) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), to_float16(values));
}
inline void stream(BFloat16* to, Lanes values) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), to_bfloat16(values));
}

#if defined(__AVX512BF16__)
// A BFloat16 that is rounded from a normal number or from zero: by one instruction instead of six, which takes
// subnormal numbers for zeros.
struct NormalBFloat16 {
  uint16_t bits;
};
inline __m256i normal_to_bfloat16(Lanes values) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(values)); }
inline void store(NormalBFloat16* to, Lanes values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), normal_to_bfloat16(values));
}
inline void stream(NormalBFloat16* to, Lanes values) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), normal_to_bfloat16(values));
}
#endif

// Takes kByteGroup positive numbers and clamps what they are beyond kIntegers to a byte. Packing saturates, which
// clamps; it works within quarters of a register, which the permutation puts in order.
constexpr size_t kByteGroup = 64;
inline __m512i beyond_integers(Lanes values) {
  return _mm512_sub_epi32(_mm512_castps_si512(values), _mm512_set1_epi32(kIntegersBits));
}
inline __m512i to_bytes(const Lanes* values) {
  const __m512i low = _mm512_packs_epi32(beyond_integers(values[0]), beyond_integers(values[1]));
  const __m512i high = _mm512_packs_epi32(beyond_integers(values[2]), beyond_integers(values[3]));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, _mm512_packus_epi16(low, high));
}
inline void store_bytes(uint8_t* to, __m512i bytes) { _mm512_storeu_si512(to, bytes); }
// To an address that is a multiple of kStreamAlignment.
constexpr size_t kStreamAlignment = 32;
inline void stream_bytes(uint8_t* to, __m512i bytes) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), _mm512_castsi512_si256(bytes));
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to) + 1, _mm512_extracti64x4_epi64(bytes, 1));
}

// Integers in the order of the 16-bit floats whose bits they are given: negative ones are turned round.
constexpr size_t kKeys = 32;
using Keys = __m512i;
inline Keys load_keys(const void* from) {
  const __m512i bits = _mm512_loadu_si512(from);
  const __m512i sign = _mm512_srai_epi16(bits, 15);
  return _mm512_xor_si512(bits, _mm512_and_si512(sign, _mm512_set1_epi16(0x7fff)));
}
inline Keys smaller_key(Keys a, Keys b) { return _mm512_min_epi16(a, b); }
inline Keys larger_key(Keys a, Keys b) { return _mm512_max_epi16(a, b); }
inline int16_t smallest_key(Keys keys) {
  const __m256i half = _mm256_min_epi16(_mm512_castsi512_si256(keys), _mm512_extracti64x4_epi64(keys, 1));
  return smallest_of_eight(_mm_min_epi16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
}
inline int16_t largest_key(Keys keys) {
  const __m256i half = _mm256_max_epi16(_mm512_castsi512_si256(keys), _mm512_extracti64x4_epi64(keys, 1));
  return largest_of_eight(_mm_max_epi16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
}

// 16-bit integers.
using Words = __m512i;
inline Words load_words(const void* from) { return _mm512_loadu_si512(from); }
inline void store_words(void* to, Words words) { _mm512_storeu_si512(to, words); }
inline Words fill_words(int value) { return _mm512_set1_epi16(static_cast<int16_t>(value)); }
inline Words add(Words a, Words b) { return _mm512_add_epi16(a, b); }
inline Words subtract(Words a, Words b) { return _mm512_sub_epi16(a, b); }
// The upper 16 bits of the product of unsigned numbers.
inline Words multiply_high(Words a, Words b) { return _mm512_mulhi_epu16(a, b); }
// Of signed numbers, a * b / 2^15, rounded.
inline Words multiply_rounded(Words a, Words b) { return _mm512_mulhrs_epi16(a, b); }
inline Words shift_left(Words words, __m128i bits) { return _mm512_sll_epi16(words, bits); }
// Of 64 bytes every other one, from the first and from the second, less 128, times 256.
inline void split_bytes(Words bytes, Words& even, Words& odd) {
  const Words centred = _mm512_xor_si512(bytes, _mm512_set1_epi8(INT8_MIN));
  even = _mm512_slli_epi16(centred, 8);
  odd = _mm512_and_si512(centred, _mm512_set1_epi16(-256));
}
// Back to bytes, of which the words have 128ths.
inline Words join_bytes(Words even, Words odd) {
  constexpr int kOrAnd = 0xf8;
  const Words high = _mm512_set1_epi16(-256);
  return _mm512_ternarylogic_epi32(_mm512_srli_epi16(even, 7), _mm512_slli_epi16(odd, 1), high, kOrAnd);
}
inline void end_of_stream() { _mm_sfence(); }

#elif defined(__AVX2__) && defined(__F16C__) && defined(__FMA__)

constexpr char kLanesName[] = "avx2";
constexpr size_t kLanes = 8;
using Lanes = __m256;

inline Lanes fill(float value) { return _mm256_set1_ps(value); }
inline Lanes add(Lanes a, Lanes b) { return _mm256_add_ps(a, b); }
inline Lanes subtract(Lanes a, Lanes b) { return _mm256_sub_ps(a, b); }
inline Lanes multiply(Lanes a, Lanes b) { return _mm256_mul_ps(a, b); }
inline Lanes smaller(Lanes a, Lanes b) { return _mm256_min_ps(a, b); }
inline Lanes larger(Lanes a, Lanes b) { return _mm256_max_ps(a, b); }
inline Lanes add_if_not_finite(Lanes sum, Lanes value) { return _mm256_fmadd_ps(value, _mm256_setzero_ps(), sum); }

inline float smallest(Lanes values) {
  __m128 half = _mm_min_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
  half = _mm_min_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_min_ss(half, _mm_movehdup_ps(half)));
}
inline float largest(Lanes values) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
inline bool all_zero(Lanes values) {
  return _mm256_movemask_ps(_mm256_cmp_ps(values, _mm256_setzero_ps(), _CMP_EQ_OQ)) == 0xff;
}

inline Lanes load(const float* from) { return _mm256_loadu_ps(from); }
inline Lanes load(const Float16* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline Lanes load(const BFloat16* from) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline Lanes load_numbers(const uint8_t* from) {
  const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  return _mm256_castsi256_ps(_mm256_or_si256(wide, _mm256_set1_epi32(kIntegersBits)));
}

inline __m128i to_float16(Lanes values) {
  return _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline __m128i to_bfloat16(Lanes values) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i narrow = _mm256_srli_epi32(rounded, 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(narrow), _mm256_extracti128_si256(narrow, 1));
}
inline void store(float* to, Lanes values) { _mm256_storeu_ps(to, values); }
inline void store(Float16* to, Lanes values) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), to_float16(values)); }
inline void store(BFloat16* to, Lanes values) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), to_bfloat16(values)); }
inline void stream(float* to, Lanes values) { _mm256_stream_ps(to, values); }
inline void stream(Float16* to, Lanes values) { _mm_stream_si128(reinterpret_cast<__m128i*>(to), to_float16(values)); }
inline void stream(BFloat16* to, Lanes values) {
  _mm_stream_si128(reinterpret_cast<__m128i*>(to), to_bfloat16(values));
}

constexpr size_t kByteGroup = 32;
// Packing saturates, which clamps; it works within halves of a register, which the permutation puts in order.
inline __m256i beyond_integers(Lanes values) {
  return _mm256_sub_epi32(_mm256_castps_si256(values), _mm256_set1_epi32(kIntegersBits));
}
inline __m256i to_bytes(const Lanes* values) {
  const __m256i low = _mm256_packs_epi32(beyond_integers(values[0]), beyond_integers(values[1]));
  const __m256i high = _mm256_packs_epi32(beyond_integers(values[2]), beyond_integers(values[3]));
  return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
inline void store_bytes(uint8_t* to, __m256i bytes) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bytes); }
constexpr size_t kStreamAlignment = 32;
inline void stream_bytes(uint8_t* to, __m256i bytes) { _mm256_stream_si256(reinterpret_cast<__m256i*>(to), bytes); }

constexpr size_t kKeys = 16;
using Keys = __m256i;
inline Keys load_keys(const void* from) {
  const __m256i bits = _mm256_loadu_si256(static_cast<const __m256i*>(from));
  const __m256i sign = _mm256_srai_epi16(bits, 15);
  return _mm256_xor_si256(bits, _mm256_and_si256(sign, _mm256_set1_epi16(0x7fff)));
}
inline Keys smaller_key(Keys a, Keys b) { return _mm256_min_epi16(a, b); }
inline Keys larger_key(Keys a, Keys b) { return _mm256_max_epi16(a, b); }
inline int16_t smallest_key(Keys keys) {
  return smallest_of_eight(_mm_min_epi16(_mm256_castsi256_si128(keys), _mm256_extracti128_si256(keys, 1)));
}
inline int16_t largest_key(Keys keys) {
  return largest_of_eight(_mm_max_epi16(_mm256_castsi256_si128(keys), _mm256_extracti128_si256(keys, 1)));
}

using Words = __m256i;
inline Words load_words(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
inline void store_words(void* to, Words words) { _mm256_storeu_si256(static_cast<__m256i*>(to), words); }
inline Words fill_words(int value) { return _mm256_set1_epi16(static_cast<int16_t>(value)); }
inline Words add(Words a, Words b) { return _mm256_add_epi16(a, b); }
inline Words subtract(Words a, Words b) { return _mm256_sub_epi16(a, b); }
inline Words multiply_high(Words a, Words b) { return _mm256_mulhi_epu16(a, b); }
inline Words multiply_rounded(Words a, Words b) { return _mm256_mulhrs_epi16(a, b); }
inline Words shift_left(Words words, __m128i bits) { return _mm256_sll_epi16(words, bits); }
inline void split_bytes(Words bytes, Words& even, Words& odd) {
  const Words centred = _mm256_xor_si256(bytes, _mm256_set1_epi8(INT8_MIN));
  even = _mm256_slli_epi16(centred, 8);
  odd = _mm256_and_si256(centred, _mm256_set1_epi16(-256));
}
inline Words join_bytes(Words even, Words odd) {
  const Words high = _mm256_and_si256(_mm256_slli_epi16(odd, 1), _mm256_set1_epi16(-256));
  return _mm256_or_si256(_mm256_srli_epi16(even, 7), high);
}
inline void end_of_stream() { _mm_sfence(); }

#else
#error "build this with -mavx2 -mfma -mf16c, or with -mavx512f -mavx512bw, too"
#endif

}  // namespace
}  // namespace bagua_kernels

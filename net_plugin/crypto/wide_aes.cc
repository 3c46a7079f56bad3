#include "crypto/wide_aes.h"

#include <crypto_verify_16.h>

#include <algorithm>
#include <cstring>

#include "crypto/protected_memory.h"

#ifdef __x86_64__
#include <cpuid.h>
#include <immintrin.h>

// Each with whole blocks only. `aes` is AES_KEY, `counter` the block of the first one.
extern "C" {
void gcm_init_vpclmulqdq_avx2(void* powers, const std::uint64_t* hash_key);
void gcm_ghash_vpclmulqdq_avx2(std::uint8_t* hash, const void* powers, const std::uint8_t* in, std::size_t bytes);
void aes_gcm_enc_update_vaes_avx2(const std::uint8_t* in, std::uint8_t* out, std::size_t bytes, const void* aes,
                                  const std::uint8_t* counter, const void* powers, std::uint8_t* hash);
void aes_gcm_dec_update_vaes_avx2(const std::uint8_t* in, std::uint8_t* out, std::size_t bytes, const void* aes,
                                  const std::uint8_t* counter, const void* powers, std::uint8_t* hash);
}
#endif

namespace bagua_net {

#ifdef __x86_64__

namespace {

constexpr std::size_t kNonceBytes = 12;

void store_big_endian(std::uint64_t value, std::uint8_t* bytes) {
  for (int i = 0; i < 8; ++i) bytes[i] = static_cast<std::uint8_t>(value >> (56 - 8 * i));
}

std::uint64_t load_big_endian(const std::uint8_t* bytes) {
  std::uint64_t value = 0;
  for (int i = 0; i < 8; ++i) value = value << 8 | bytes[i];
  return value;
}

// The counter block of that number; 1 is that of the tag, 2 of the first block.
struct Counter {
  std::uint8_t block[16];
  Counter(const std::uint8_t* nonce, std::size_t number) {
    std::copy_n(nonce, kNonceBytes, block);
    for (int i = 0; i < 4; ++i) block[12 + i] = static_cast<std::uint8_t>(number >> (24 - 8 * i));
  }
};

// FIPS 197, section 5.2: each round key is made from the two before it.
__attribute__((target("aes,sse2"))) __m128i mix(__m128i before, __m128i assisted) {
  before = _mm_xor_si128(before, _mm_slli_si128(before, 4));
  before = _mm_xor_si128(before, _mm_slli_si128(before, 8));
  return _mm_xor_si128(before, assisted);
}

template <int kConstant>
__attribute__((target("aes,sse2"))) void expand_two(__m128i* keys) {
  keys[2] = mix(keys[0], _mm_shuffle_epi32(_mm_aeskeygenassist_si128(keys[1], kConstant), 0xff));
  keys[3] = mix(keys[1], _mm_shuffle_epi32(_mm_aeskeygenassist_si128(keys[2], 0), 0xaa));
}

__attribute__((target("aes,sse2"))) void expand(const std::uint8_t* key, __m128i* keys) {
  keys[0] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(key));
  keys[1] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(key) + 1);
  expand_two<0x01>(keys);
  expand_two<0x02>(keys + 2);
  expand_two<0x04>(keys + 4);
  expand_two<0x08>(keys + 6);
  expand_two<0x10>(keys + 8);
  expand_two<0x20>(keys + 10);
  keys[14] = mix(keys[12], _mm_shuffle_epi32(_mm_aeskeygenassist_si128(keys[13], 0x40), 0xff));
}

}  // namespace

bool cpu_has_wide_aes() {
  static const bool kHas = [] {
    constexpr unsigned kVaes = 1u << 9;
    constexpr unsigned kVpclmulqdq = 1u << 10;
    unsigned eax = 0;
    unsigned ebx = 0;
    unsigned ecx = 0;
    unsigned edx = 0;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("aes") &&
           __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 1 && (ecx & kVaes) != 0 && (ecx & kVpclmulqdq) != 0;
  }();
  return kHas;
}

__attribute__((target("aes,sse2"))) void WideAes::encrypt_block(const std::uint8_t* in, std::uint8_t* out) const {
  const auto* const keys = reinterpret_cast<const __m128i*>(round_keys_.keys);
  __m128i block = _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in)), keys[0]);
  for (std::size_t i = 1; i < kRoundKeys - 1; ++i) block = _mm_aesenc_si128(block, keys[i]);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_aesenclast_si128(block, keys[kRoundKeys - 1]));
}

void WideAes::set_key(const std::uint8_t* key) {
  expand(key, reinterpret_cast<__m128i*>(round_keys_.keys));
  round_keys_.rounds = kRoundKeys - 2;
  struct Block {
    std::uint8_t bytes[kBlock];
  };
  Wiped<Block> hash_key;
  encrypt_block(hash_key.key.bytes, hash_key.key.bytes);
  struct Halves {
    std::uint64_t of[2];
  };
  Wiped<Halves> halves;
  for (std::size_t i = 0; i < 2; ++i) halves.key.of[i] = load_big_endian(hash_key.key.bytes + 8 * i);
  gcm_init_vpclmulqdq_avx2(powers_.bytes, halves.key.of);
}

void WideAes::finish(const std::uint8_t* nonce, std::uint8_t* out, const std::uint8_t* in, std::size_t bytes,
                     bool seals, std::uint8_t* hash) const {
  std::uint8_t last[2 * kBlock] = {};  // what is left of the text, with zeros behind it, and the lengths
  const std::size_t whole = bytes / kBlock * kBlock;
  const std::size_t left = bytes - whole;
  if (left > 0) {
    std::uint8_t stream[kBlock];
    encrypt_block(Counter(nonce, 2 + bytes / kBlock).block, stream);
    for (std::size_t i = 0; i < left; ++i) {
      const std::uint8_t input = in[whole + i];
      out[whole + i] = input ^ stream[i];
      last[i] = seals ? out[whole + i] : input;
    }
  }
  store_big_endian(8 * bytes, last + kBlock + 8);
  if (left > 0) {
    gcm_ghash_vpclmulqdq_avx2(hash, powers_.bytes, last, 2 * kBlock);
  } else {
    gcm_ghash_vpclmulqdq_avx2(hash, powers_.bytes, last + kBlock, kBlock);
  }
  std::uint8_t mask[kBlock];
  encrypt_block(Counter(nonce, 1).block, mask);
  for (std::size_t i = 0; i < kBlock; ++i) hash[i] ^= mask[i];
}

void WideAes::seal(const std::uint8_t* nonce, std::uint8_t* out, const std::uint8_t* in, std::size_t bytes) const {
  alignas(16) std::uint8_t hash[kBlock] = {};
  aes_gcm_enc_update_vaes_avx2(in, out, bytes / kBlock * kBlock, &round_keys_, Counter(nonce, 2).block, powers_.bytes,
                               hash);
  finish(nonce, out, in, bytes, true, hash);
  std::copy_n(hash, kBlock, out + bytes);
}

bool WideAes::open(const std::uint8_t* nonce, std::uint8_t* out, const std::uint8_t* in, std::size_t bytes) const {
  alignas(16) std::uint8_t hash[kBlock] = {};
  std::uint8_t tag[kBlock];
  std::copy_n(in + bytes, kBlock, tag);
  aes_gcm_dec_update_vaes_avx2(in, out, bytes / kBlock * kBlock, &round_keys_, Counter(nonce, 2).block, powers_.bytes,
                               hash);
  finish(nonce, out, in, bytes, false, hash);
  return ::crypto_verify_16(hash, tag) == 0;
}

#else

bool cpu_has_wide_aes() { return false; }
void WideAes::set_key(const std::uint8_t*) {}
void WideAes::seal(const std::uint8_t*, std::uint8_t*, const std::uint8_t*, std::size_t) const {}
bool WideAes::open(const std::uint8_t*, std::uint8_t*, const std::uint8_t*, std::size_t) const { return false; }

#endif

}  // namespace bagua_net

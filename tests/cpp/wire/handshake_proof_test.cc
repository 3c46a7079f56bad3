// Proofs: the algorithm against published vectors; a proof fits its own connection, role and words, and nothing else.
#include "wire/handshake_key.h"

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "support/check.h"
#include "wire/handshake_message.h"

namespace bagua_net {
namespace {

std::string hex(const HandshakeProof& proof) {
  static const char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::uint8_t byte : proof) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

std::string hmac(const std::vector<std::uint8_t>& key, const std::string& data) {
  return hex(HmacSha256(key.data(), key.size()).add(data.data(), data.size()).finish());
}

}  // namespace

// RFC 4231, test cases 1, 2, 3, 6 and 7: short and long keys and data.
TEST_CASE(the_algorithm_gives_the_published_results) {
  CHECK_EQ(hmac(std::vector<std::uint8_t>(20, 0x0b), "Hi There"),
           "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK_EQ(hmac({'J', 'e', 'f', 'e'}, "what do ya want for nothing?"),
           "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK_EQ(hmac(std::vector<std::uint8_t>(20, 0xaa), std::string(50, '\xdd')),
           "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  CHECK_EQ(hmac(std::vector<std::uint8_t>(131, 0xaa), "Test Using Larger Than Block-Size Key - Hash Key First"),
           "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  CHECK_EQ(hmac(std::vector<std::uint8_t>(131, 0xaa),
                "This is a test using a larger than block-size key and a larger than block-size data. The key needs to "
                "be hashed before being used by the HMAC algorithm."),
           "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST_CASE(a_proof_is_about_every_byte_that_was_said) {
  HandshakeKey key{1};
  std::array<std::uint8_t, kHelloBytes> hello{2};
  std::array<std::uint8_t, kChallengeBytes> challenge{3};
  std::array<std::uint8_t, kReplyBytes + 3 * kAddressBytes> reply{4};  // with addresses
  const HandshakeProof connectors = connector_proof(key, hello.data(), challenge.data());
  const HandshakeProof listeners = listener_proof(key, hello.data(), challenge.data(), reply.data(), reply.size());
  const auto check_changed = [&](std::uint8_t* byte, bool of_reply) {
    *byte ^= 0x80;
    CHECK(of_reply == (connector_proof(key, hello.data(), challenge.data()) == connectors));
    CHECK(listener_proof(key, hello.data(), challenge.data(), reply.data(), reply.size()) != listeners);
    *byte ^= 0x80;
  };
  for (std::uint8_t& byte : key) check_changed(&byte, false);
  for (std::uint8_t& byte : hello) check_changed(&byte, false);
  for (std::uint8_t& byte : challenge) check_changed(&byte, false);
  for (std::uint8_t& byte : reply) check_changed(&byte, true);
}

TEST_CASE(a_proof_differs_in_any_bit) {
  const std::uint8_t key = 1;
  const HandshakeProof proof = HmacSha256(&key, 1).add(&key, 1).finish();
  CHECK(is_same_mac(proof, proof.data()));
  for (std::size_t bit = 0; bit < 8 * kProofBytes; ++bit) {
    HandshakeProof changed = proof;
    changed[bit / 8] ^= static_cast<std::uint8_t>(1 << (bit % 8));
    CHECK(!is_same_mac(proof, changed.data()));
  }
}

}  // namespace bagua_net

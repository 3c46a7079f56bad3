// The Noise handshake against published vectors, and what it refuses. The vectors are those of cacophony
// (github.com/haskell-cryptography/cacophony, vectors/cacophony.txt), which snow and others are tested with, too: all
// that it has for NNpsk0 with X25519, SHA-256 and either cipher.
#include "crypto/noise_handshake.h"

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "support/check.h"

namespace bagua_net {
namespace {

using Bytes = std::vector<std::uint8_t>;

Bytes unhex(const std::string& text) {
  Bytes bytes;
  for (std::size_t i = 0; i < text.size(); i += 2) {
    bytes.push_back(static_cast<std::uint8_t>(std::stoi(text.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

const Bytes kPrologue = unhex("4a6f686e2047616c74");
const Bytes kPsk = unhex("54686973206973206d7920417573747269616e20706572737065637469766521");
const Bytes kInitiatorsKey = unhex("893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a");
const Bytes kRespondersKey = unhex("bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b");

struct Message {
  std::string payload;
  std::string sealed;
};
struct Vector {
  Cipher cipher;
  std::string hash;
  std::vector<Message> messages;
};
const std::vector<Vector> kVectors = {
    {Cipher::kAes256Gcm,
     "9f3b1f9afd7767767b5b9d1069844a6154fdbdcc36dfb3e31c0fffc5c973d530",
     {{"4c756477696720766f6e204d69736573",
       "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c79447c37a89fc17813788d30df2d59501d60"
       "66f5f8aecc3406bbd9829f2d24a531b1"},
      {"4d757272617920526f746862617264",
       "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f1448088432f29d79368ef9de4e1ae7a362fb05bf0"
       "ad668e026bf5714554497b3a720461"},
      {"462e20412e20486179656b", "7c01e898a6201f36aecee532e29cd0b7f8ffa29d3366ad0dce39a6"},
      {"4361726c204d656e676572", "a9ff535aace3db6a1da1a7fb00fe2de2622bb373abad9fb42c00e0"},
      {"4a65616e2d426170746973746520536179", "6cfc49a3e65472edc2d0152abe5ce950170a8a47c959f30bd48b5f0aacf29adbfd"},
      {"457567656e2042f6686d20766f6e2042617765726b",
       "9bc86e6d974ed21ba04604a94aa68de21677eb409ead070c0cd569b069ee19ba142aa4c1a9"}}},
    {Cipher::kChaCha20Poly1305,
     "f4d03dc34495c95729ea6de9e1b59004b59733102488b3e24bc441e0be208eaf",
     {{"4c756477696720766f6e204d69736573",
       "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c794479b962b8aff8485742ac32f905ba4536"
       "9e2465fb59e138a93d67a0d1266b6a54"},
      {"4d757272617920526f746862617264",
       "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f144808843d6062704d5a9c422a8e834423f8c1fea"
       "da7e8d0d910a1a2cd030fb584221e3"},
      {"462e20412e20486179656b", "e632c3763d7669067383433197a3baddf146e9e70ad4b4e9e59e0f"},
      {"4361726c204d656e676572", "64c6bee32ea91c8474bb4c21d7a700109ad45af77b29764ba5eb1e"},
      {"4a65616e2d426170746973746520536179", "e2fa0bed0603b62d3ccac2ecabbf3fe33f3e86514909b323361626266cb2471cc8"},
      {"457567656e2042f6686d20766f6e2042617765726b",
       "0c01dc9cec1fe4ddd692e8dd32188aa351088dc91183639a53b57aa4692b5ebdef8b8ca111"}}}};

bool is_available(Cipher cipher) { return cipher != Cipher::kAes256Gcm || cpu_has_aes(); }
const std::vector<Cipher> kCiphers = {Cipher::kChaCha20Poly1305, Cipher::kAes256Gcm};

struct Ends {
  NoiseHandshake initiator;
  NoiseHandshake responder;
  explicit Ends(Cipher cipher, const Bytes& responders_psk = kPsk, const Bytes& responders_prologue = kPrologue)
      : initiator(cipher, NoiseHandshake::Role::kInitiator, {kPsk.data(), kInitiatorsKey.data()}, kPrologue.data(),
                  kPrologue.size()),
        responder(cipher, NoiseHandshake::Role::kResponder, {responders_psk.data(), kRespondersKey.data()},
                  responders_prologue.data(), responders_prologue.size()) {}
};

Bytes write(NoiseHandshake& end, const Bytes& payload) {
  Bytes message(payload.size() + kNoiseOverhead);
  CHECK(end.write(payload.data(), payload.size(), message.data()));
  return message;
}
// Empty: refused.
Bytes read(NoiseHandshake& end, const Bytes& message) {
  Bytes payload(message.size() - kNoiseOverhead);
  return end.read(message.data(), payload.size(), payload.data()) ? payload : Bytes{};
}

}  // namespace

TEST_CASE(the_published_vectors) {
  for (const Vector& vector : kVectors) {
    if (!is_available(vector.cipher)) continue;  // this CPU has no AES
    Ends ends(vector.cipher);
    const Bytes first = write(ends.initiator, unhex(vector.messages[0].payload));
    CHECK(first == unhex(vector.messages[0].sealed));
    CHECK(read(ends.responder, first) == unhex(vector.messages[0].payload));
    const Bytes second = write(ends.responder, unhex(vector.messages[1].payload));
    CHECK(second == unhex(vector.messages[1].sealed));
    CHECK(read(ends.initiator, second) == unhex(vector.messages[1].payload));
    const Bytes hash = unhex(vector.hash);
    CHECK(std::equal(hash.begin(), hash.end(), ends.initiator.hash().begin()));
    CHECK(ends.initiator.hash() == ends.responder.hash());
    ConnectionKeys initiators;
    ConnectionKeys responders;
    ends.initiator.split(&initiators);
    ends.responder.split(&responders);
    for (std::size_t i = 2; i < vector.messages.size(); ++i) {
      const bool from_initiator = i % 2 == 0;
      const Bytes payload = unhex(vector.messages[i].payload);
      Bytes sealed(payload.size() + kTagBytes);
      CHECK((from_initiator ? initiators : responders).out.seal(sealed.data(), payload.data(), payload.size()));
      CHECK(sealed == unhex(vector.messages[i].sealed));
      Bytes opened(payload.size());
      CHECK((from_initiator ? responders : initiators).in.open(opened.data(), sealed.data(), opened.size()));
      CHECK(opened == payload);
    }
  }
}

// Who gets hold of the memory later cannot read what was recorded.
TEST_CASE(the_keys_of_a_handshake_are_gone_when_it_is_over) {
  for (const Cipher cipher : kCiphers) {
    if (!is_available(cipher)) continue;
    Ends ends(cipher);
    CHECK(!read(ends.responder, write(ends.initiator, {7})).empty());
    CHECK(!read(ends.initiator, write(ends.responder, {8})).empty());
    const auto holds = [](const NoiseHandshake& end, const Bytes& wanted) {
      const auto* const begin = reinterpret_cast<const std::uint8_t*>(&end);
      const auto* const last = begin + sizeof end;
      return std::search(begin, last, wanted.begin(), wanted.end()) != last;
    };
    const Bytes blank(sizeof(CipherState) - 64);
    CHECK(holds(ends.initiator, kInitiatorsKey));
    const bool expands = cipher == Cipher::kAes256Gcm;  // the key; what another cipher leaves of the room is not set
    if (expands) CHECK(!holds(ends.initiator, blank));
    ConnectionKeys keys;
    ends.initiator.split(&keys);
    CHECK(!holds(ends.initiator, kInitiatorsKey));
    if (expands) CHECK(holds(ends.initiator, blank));
  }
}

TEST_CASE(a_peer_without_the_secret_is_refused) {
  for (const Cipher cipher : kCiphers) {
    if (!is_available(cipher)) continue;
    Bytes other = kPsk;
    other[31] ^= 1;
    Ends ends(cipher, other);
    CHECK(read(ends.responder, write(ends.initiator, {1})).empty());
    Bytes prologue = kPrologue;
    prologue[0] ^= 1;
    Ends disagreeing(cipher, kPsk, prologue);
    CHECK(read(disagreeing.responder, write(disagreeing.initiator, {1})).empty());
  }
}

TEST_CASE(every_changed_bit_of_either_message_is_refused) {
  for (const Cipher cipher : kCiphers) {
    if (!is_available(cipher)) continue;
    const std::size_t bits = 8 * (kNoiseOverhead + 1);
    for (std::size_t bit = 0; bit < bits; ++bit) {
      Ends ends(cipher);
      Bytes first = write(ends.initiator, {7});
      first[bit / 8] ^= static_cast<std::uint8_t>(1 << bit % 8);
      CHECK(read(ends.responder, first).empty());
    }
    for (std::size_t bit = 0; bit < bits; bit += 3) {
      Ends ends(cipher);
      CHECK(!read(ends.responder, write(ends.initiator, {7})).empty());
      Bytes second = write(ends.responder, {8});
      second[bit / 8] ^= static_cast<std::uint8_t>(1 << bit % 8);
      CHECK(read(ends.initiator, second).empty());
    }
  }
}

TEST_CASE(a_public_key_that_forces_the_result_is_refused) {
  // A peer sends the zero point: the shared key would not depend on this end's, which goes on with none.
  Ends ends(Cipher::kChaCha20Poly1305);
  const Bytes first(kNoiseOverhead + 1);
  CHECK(read(ends.responder, first).empty());
  Bytes second(kNoiseOverhead + 1);
  CHECK(!ends.responder.write(first.data(), 1, second.data()));
}

TEST_CASE(a_nonce_is_used_once_and_goes_on_behind_a_new_key) {
  for (const Cipher cipher : kCiphers) {
    if (!is_available(cipher)) continue;
    CipherState sealing;
    CipherState opening;
    sealing.set_key(cipher, kPsk.data());
    opening.set_key(cipher, kPsk.data());
    std::set<Bytes> seen;
    for (std::uint64_t number = 0; number < 300; ++number) {
      CHECK_EQ(sealing.next_nonce(), number);
      const Bytes same(40, 1);
      Bytes sealed(same.size() + kTagBytes);
      CHECK(sealing.seal(sealed.data(), same.data(), same.size()));
      CHECK(seen.insert(sealed).second);
      Bytes opened(same.size());
      CHECK(opening.open(opened.data(), sealed.data(), opened.size()));
      CHECK(opened == same);
      CHECK(!opening.open(opened.data(), sealed.data(), opened.size()));  // again
      if (number % 100 == 99) {
        const Bytes before(sealing.key(), sealing.key() + kKeyBytes);
        sealing.rekey();
        opening.rekey();
        CHECK(Bytes(sealing.key(), sealing.key() + kKeyBytes) != before);
      }
    }
  }
}

}  // namespace bagua_net

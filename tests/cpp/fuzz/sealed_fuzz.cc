// libFuzzer target: what may come over an encrypted connection, to either end of the handshake and to the records
// behind it: noise, or what was really said with some bits changed, cut or repeated. No byte is given to the reader
// that was not written.
#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "fuzz/fuzz_input.h"
#include "support/sealed_tape.h"
#include "wire/sealed_handshake.h"

namespace bagua_net {
namespace {

using Bytes = std::vector<std::uint8_t>;

Cipher cipher_of(FuzzInput& input) {
  return input.byte() % 2 == 0 && cpu_has_aes() ? Cipher::kAes256Gcm : Cipher::kChaCha20Poly1305;
}

void records(FuzzInput& input) {
  const Cipher cipher = cipher_of(input);
  Bytes wire;
  Bytes plain;
  {
    auto tape = std::make_unique<Tape>();
    const Tape& kept = *tape;
    const auto writer = make_sealed_byte_stream(std::move(tape), keys_of(cipher, 1, 1), 2);
    for (std::size_t i = input.byte() % 4; i > 0; --i) {
      Bytes message(1 + input.number(300), static_cast<std::uint8_t>(i));
      const iovec piece{message.data(), message.size()};
      require(writer->write(&piece, 1) == static_cast<ssize_t>(message.size()), "a write was not taken");
      plain.insert(plain.end(), message.begin(), message.end());
    }
    wire = kept.written;
  }
  auto tape = std::make_unique<Tape>();
  tape->most = 1 + input.number(400);
  if (input.byte() % 4 == 0) wire.resize(input.number(wire.size()));
  if (input.byte() % 4 == 0 && !wire.empty()) {
    const std::size_t from = input.number(wire.size() - 1);
    const Bytes again(wire.begin() + static_cast<std::ptrdiff_t>(from), wire.end());
    wire.insert(wire.end(), again.begin(), again.end());
  }
  const std::size_t first = input.number(wire.size());
  input.disturb(wire.data() + first, wire.size() - first);
  tape->given = wire;
  const auto reader = make_sealed_byte_stream(std::move(tape), keys_of(cipher, 1, 1), 2);
  Bytes heard;
  for (;;) {
    std::array<std::uint8_t, 100> room;
    const iovec pieces[2] = {{room.data(), 32}, {room.data() + 32, room.size() - 32}};
    const ssize_t got = reader->read(pieces, 2);
    if (got <= 0) break;
    heard.insert(heard.end(), room.begin(), room.begin() + got);
  }
  require(heard.size() <= plain.size() && std::equal(heard.begin(), heard.end(), plain.begin()),
          "bytes were read that nobody wrote");
}

void handshake(FuzzInput& input) {
  const Cipher cipher = cipher_of(input);
  const HandshakeKey key{7};
  Hello hello;
  hello.cipher = cipher;
  std::array<std::uint8_t, kHelloBytes> encoded;
  encode_hello(hello, encoded.data());
  auto connector = SealedHandshake::begin(SealedHandshake::Role::kInitiator, cipher, key, {1}, encoded.data());
  std::array<std::uint8_t, kSealedHelloBytes> first;
  require(connector->seal_hello(encoded.data(), first.data()), "our hello is none");
  const auto said = first;
  input.disturb(first.data(), first.size());
  if (!is_known_cipher(hello_cipher(first.data())) || hello_cipher(first.data()) == Cipher::kNone) return;
  auto listener =
      SealedHandshake::begin(SealedHandshake::Role::kResponder, hello_cipher(first.data()), key, {2}, first.data());
  std::array<std::uint8_t, kHelloBytes> opened;
  const bool is_opened = listener->open_hello(first.data(), opened.data());
  require(is_opened == (first == said), "a changed hello was taken, or a right one was not");
  if (!is_opened) return;
  require(opened == encoded, "another hello was opened");
  std::array<std::uint8_t, kSealedChallengeBytes> second;
  require(listener->seal_challenge(second.data()), "our challenge is none");
  const auto answered = second;
  input.disturb(second.data() + kChallengeClearBytes, second.size() - kChallengeClearBytes);
  const bool is_answered = connector->open_challenge(second.data());
  require(is_answered == (second == answered), "a changed challenge was taken, or a right one was not");
}

}  // namespace
}  // namespace bagua_net

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  bagua_net::FuzzInput input(data, size);
  input.byte() % 2 == 0 ? bagua_net::records(input) : bagua_net::handshake(input);
  return 0;
}

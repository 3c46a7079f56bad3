// Two processes' worth of transport with encryption: what is on the wire, nonces through lost connections, and ranks
// that do not agree. Recorded and changed exchanges, damaged and lost connections: recorded_exchange_test.cc.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "support/connection_ends.h"
#include "support/context_pair.h"
#include "support/kept_log.h"
#include "support/relayed_pair.h"
#include "transport/connect/peer_probe.h"
#include "wire/byte_order.h"
#include "wire/sealed_handshake.h"

namespace bagua_net {
namespace {

using Bytes = std::vector<std::uint8_t>;

HandshakeSettings encrypting_settings() {
  const Bytes bytes(64, 's');
  HandshakeSettings settings = settings_with(1);
  settings.secret = JobSecret::derive(bytes.data(), bytes.size());
  settings.encrypts = true;
  settings.recovery = Recovery::kOn;
  return settings;
}

}  // namespace

// Neither what is sent, nor a frame's header, the token or a name. In the clear all of it but the token.
TEST_CASE(nothing_but_ids_is_on_the_wire) {
  const Secret secret;
  for (const bool encrypts : {false, true}) {
    RelayedPair pair(encrypts ? encrypted(secret) : recovering(0, 1));
    pair.connect();
    const Bytes message(100003, 0x5a);
    pair.transfer(message);
    pair.relay->stop();
    ConnectHandle handle;
    CHECK_OK(decode_connect_handle(pair.original.data(), &handle));
    Bytes length(sizeof(std::uint64_t));
    store_little_endian<std::uint64_t>(length.data(), message.size());
    std::array<char, 48> name = {};  // as the hello has it
    [[maybe_unused]] const int ignored = ::gethostname(name.data(), name.size() - 1);
    const auto seen = pair.relay->seen();
    const auto has = [&](auto begin, auto end) {
      return std::any_of(seen.begin(), seen.end(), [&](const auto& connection) {
        return std::any_of(connection.begin(), connection.end(), [&](const Bytes& bytes) {
          return std::search(bytes.begin(), bytes.end(), begin, end) != bytes.end();
        });
      });
    };
    CHECK(!has(handle.token.begin(), handle.token.end()));
    CHECK(has(handle.listen_id.begin(), handle.listen_id.end()));
    CHECK_EQ(has(message.begin(), message.begin() + 16), !encrypts);
    CHECK_EQ(has(length.begin(), length.end()), !encrypts);
    CHECK_EQ(has(name.begin(), name.end()), !encrypts);
  }
}

// All that is sent is zeros. With a key and nonce that were used twice, sixteen bytes of the wire would come again,
// wherever they are: through replays, and in whichever connection.
TEST_CASE(no_nonce_is_used_twice_through_lost_connections) {
  const Secret secret;
  for (const Encryption encryption : {Encryption::kOn, Encryption::kChaCha20}) {
    std::size_t cuts = 0;
    RelayedPair pair(encrypted(secret, encryption), [&cuts](const WireRelay::Passing& passing) {
      const bool is_due = passing.offset > 100000 + 20000 * passing.connection && cuts < 4;
      if (!is_due) return WireRelay::Fate::kPass;
      ++cuts;
      return WireRelay::Fate::kCut;
    });
    pair.connect();
    for (int i = 0; i < 6; ++i) pair.transfer(Bytes(150000));
    pair.relay->stop();
    CHECK_EQ(cuts, 4u);
    CHECK(pair.relay->connections() >= 5u);
    std::vector<std::array<std::uint8_t, 16>> windows;
    for (const auto& connection : pair.relay->seen()) {
      for (std::size_t direction = 0; direction < 2; ++direction) {
        const Bytes& seen = connection[direction];
        // In the clear: the beginning of hello and challenge.
        const std::size_t begin = direction == 0 ? kHelloClearBytes : kChallengeClearBytes;
        for (std::size_t i = begin; i + 16 <= seen.size(); ++i) {
          if (seen[i] >= 32) continue;  // of equal ones, both or none
          std::array<std::uint8_t, 16> window;
          std::copy_n(seen.begin() + static_cast<std::ptrdiff_t>(i), window.size(), window.begin());
          windows.push_back(window);
        }
      }
    }
    CHECK(windows.size() > 100000u);
    std::sort(windows.begin(), windows.end());
    CHECK(std::adjacent_find(windows.begin(), windows.end()) == windows.end());
  }
}

TEST_CASE(ranks_of_which_one_encrypts_are_named) {
  const Secret secret;
  for (const bool listener_encrypts : {true, false}) {
    PluginConfig off = encrypted(secret);
    off.encryption = Encryption::kOff;
    const std::unique_ptr<TransportContext> sending = make_context(listener_encrypts ? off : encrypted(secret));
    const std::unique_ptr<TransportContext> receiving = make_context(listener_encrypts ? encrypted(secret) : off);
    Handle handle{};
    ListenComm* const listener = listen_on(*receiving, &handle);
    Status status;
    SendComm* comm = nullptr;
    wait_until(
        [&] {
          status = sending->connect(0, handle.data(), &comm);
          return !status.is_ok();
        },
        "the error");
    CHECK(status.code() == StatusCode::kInvalidUsage);
    CHECK(status.message().find("BAGUA_NET_ENCRYPTION") != std::string::npos);
    receiving->close(listener);
  }
}

// Who changes the handle in the bootstrap cannot choose the weaker cipher, nor none.
TEST_CASE(a_changed_handle_does_not_change_the_cipher) {
  if (!cpu_has_aes()) return;
  const Secret secret;
  for (const bool encrypts : {true, false}) {
    PluginConfig config = encrypted(secret);
    config.connect_timeout_ms = 1000;
    const std::unique_ptr<TransportContext> sending = make_context(config);
    const std::unique_ptr<TransportContext> receiving = make_context(config);
    Handle handle{};
    ListenComm* const listener = listen_on(*receiving, &handle);
    ConnectHandle decoded;
    CHECK_OK(decode_connect_handle(handle.data(), &decoded));
    decoded.has_aes = false;
    decoded.protection.encrypts = encrypts;
    encode_connect_handle(decoded, handle.data());
    Status status;
    SendComm* comm = nullptr;
    RecvComm* accepted = nullptr;
    wait_until(
        [&] {
          status = sending->connect(0, handle.data(), &comm);
          CHECK_OK(receiving->accept(listener, &accepted));
          CHECK(comm == nullptr && accepted == nullptr);
          return !status.is_ok();
        },
        "the error");
    receiving->close(listener);
  }
}

// libsodium runs AES instructions without looking whether the CPU has them, so a peer must not be able to ask for them.
TEST_CASE(a_listener_without_aes_does_not_open_what_aes_has_sealed) {
  if (!cpu_has_aes()) return;
  for (const bool listener_uses_aes : {false, true}) {
    const KeptLog log;
    HandshakeSettings settings = encrypting_settings();
    settings.uses_aes = listener_uses_aes;
    const ListeningService listening(settings);
    Hello hello = listening.hello();
    hello.key_id = settings.secret->id();
    hello.host_name = "of-an-opened-hello";
    // With AES, a hello that it has to refuse as well, but opens.
    hello.features = listener_uses_aes ? kFeatureAes : 0;
    hello.cipher = listener_uses_aes ? Cipher::kChaCha20Poly1305 : Cipher::kAes256Gcm;
    std::array<std::uint8_t, kHelloBytes> encoded;
    encode_hello(hello, encoded.data());
    const HandshakeKeyRef key = handshake_key(listening.handle.token, settings.secret.get());
    const auto connector =
        SealedHandshake::begin(SealedHandshake::Role::kInitiator, hello.cipher, *key, {1}, encoded.data());
    std::array<std::uint8_t, kSealedHelloBytes> message;
    CHECK(connector->seal_hello(encoded.data(), message.data()));
    const OwnedFd socket = connect_to(listening.address);
    send_bytes(socket, message.data(), message.size());
    CHECK(read_reply(socket, *key, {}).verdict == HandshakeVerdict::kWrongProof);
    wait_until([] { return KeptLog::has("does not know the token"); }, "the listener's line");
    CHECK_EQ(KeptLog::has(hello.host_name), listener_uses_aes);
  }
}

// A receiver that has lost all its connections asks, and what it asks is sealed, too.
TEST_CASE(a_sender_that_encrypts_answers_whether_it_has_a_comm) {
  const HandshakeSettings settings = encrypting_settings();
  ListeningService listening(settings);
  ConnectingService connecting(listening.handle_bytes.data(), settings);
  const EstablishedConnection accepted = listening.accept_from(&connecting);
  CHECK(accepted.contact.hello.cipher != Cipher::kNone);
  const auto answer = [](const PeerContact& contact) {
    PeerProbe probe(contact);
    PeerAnswer last = PeerAnswer::kNone;
    wait_until(
        [&] {
          last = probe.ask(monotonic_ms());
          return last != PeerAnswer::kNone;
        },
        "an answer");
    return last;
  };
  CHECK(answer(accepted.contact) == PeerAnswer::kAlive);
  PeerContact other = accepted.contact;
  HandshakeKey wrong = *other.key;
  wrong[0] ^= 1;
  other.key = std::make_shared<const HandshakeKey>(wrong);
  CHECK(answer(other) == PeerAnswer::kGone);
  // In the clear, about a comm that is there.
  PeerContact plain = accepted.contact;
  plain.hello.cipher = Cipher::kNone;
  for (const RandomId& listen_id : {plain.hello.listen_id, RandomId{1}}) {
    plain.hello.listen_id = listen_id;
    CHECK(answer(plain) == PeerAnswer::kGone);
  }
  connecting.connection = {};
  CHECK(answer(accepted.contact) == PeerAnswer::kGone);
}

}  // namespace bagua_net

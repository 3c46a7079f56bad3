#include "wire/handshake_message.h"

#include <algorithm>
#include <cstring>

#include "crypto/protected_memory.h"
#include "wire/byte_order.h"

namespace bagua_net {
namespace {

constexpr char kHelloMagic[] = "BNHELLO1";
constexpr char kChallengeMagic[] = "BNCHALL1";
constexpr char kReplyMagic[] = "BNREPLY1";
constexpr std::size_t kMagicBytes = 8;
constexpr std::size_t kCipherOffset = 10;
constexpr std::size_t kSerialOffset = 12;
constexpr std::size_t kListenIdOffset = 16;
constexpr std::size_t kKeyIdOffset = 32;
constexpr std::size_t kCommIdOffset = 48;
constexpr std::size_t kHostNameOffset = 80;
constexpr std::size_t kHostNameBytes = 48;
constexpr std::size_t kNonceOffset = kHostNameOffset + kHostNameBytes;
constexpr std::size_t kChallengeNonceOffset = 16;
static_assert(kKeyIdOffset + sizeof(KeyId) == kHelloClearBytes);
static_assert(kNonceOffset + sizeof(RandomId) == kHelloBytes);
static_assert(kChallengeNonceOffset + sizeof(RandomId) == kChallengeBytes);

}  // namespace

const char* handshake_verdict_name(HandshakeVerdict verdict) {
  switch (verdict) {
    case HandshakeVerdict::kAccepted: return "accepted";
    case HandshakeVerdict::kWrongVersion: return "wrong protocol version";
    case HandshakeVerdict::kUnknownListen: return "nobody listens for this connection any more";
    case HandshakeVerdict::kNoPlace: return "the connection has no place for another data stream now";
    case HandshakeVerdict::kUnknownStream: return "the data stream fits no connection";
    case HandshakeVerdict::kWrongProof: return "the connector does not know the token of the connect handle";
    case HandshakeVerdict::kOtherProtection: return "the ranks have different secrets, or only one of them encrypts";
  }
  return "unknown verdict";
}

void encode_hello(const Hello& hello, std::uint8_t* bytes) {
  std::memset(bytes, 0, kHelloBytes);
  std::memcpy(bytes, kHelloMagic, kMagicBytes);
  store_little_endian<std::uint16_t>(bytes + 8, hello.protocol_version);
  store_little_endian<std::uint16_t>(bytes + kCipherOffset, static_cast<std::uint16_t>(hello.cipher));
  store_little_endian<std::uint32_t>(bytes + kSerialOffset, hello.serial);
  store_little_endian<std::uint16_t>(bytes + 40, hello.stream_index);
  store_little_endian<std::uint16_t>(bytes + 42, hello.streams_wanted);
  store_little_endian<std::uint16_t>(bytes + 44, hello.port);
  std::copy(hello.listen_id.begin(), hello.listen_id.end(), bytes + kListenIdOffset);
  std::copy(hello.key_id.begin(), hello.key_id.end(), bytes + kKeyIdOffset);
  std::copy(hello.comm_id.begin(), hello.comm_id.end(), bytes + kCommIdOffset);
  store_little_endian<std::uint64_t>(bytes + 64, hello.process_id);
  store_little_endian<std::uint32_t>(bytes + 72, hello.max_chunk_bytes);
  store_little_endian<std::uint32_t>(bytes + 76, hello.features);
  const std::size_t name_bytes = std::min(hello.host_name.size(), kHostNameBytes - 1);
  std::memcpy(bytes + kHostNameOffset, hello.host_name.data(), name_bytes);
  std::copy(hello.nonce.begin(), hello.nonce.end(), bytes + kNonceOffset);
}

void encode_challenge(const Challenge& challenge, std::uint8_t* bytes) {
  std::memset(bytes, 0, kChallengeBytes);
  std::memcpy(bytes, kChallengeMagic, kMagicBytes);
  std::copy(challenge.nonce.begin(), challenge.nonce.end(), bytes + kChallengeNonceOffset);
}

std::size_t encode_reply(const Reply& reply, std::uint8_t* bytes) {
  std::memset(bytes, 0, kReplyBytes);
  std::memcpy(bytes, kReplyMagic, kMagicBytes);
  store_little_endian<std::uint16_t>(bytes + 8, reply.protocol_version);
  store_little_endian<std::uint16_t>(bytes + 10, static_cast<std::uint16_t>(reply.verdict));
  store_little_endian<std::uint16_t>(bytes + 12, reply.streams);
  store_little_endian<std::uint64_t>(bytes + 16, reply.process_id);
  store_little_endian<std::uint32_t>(bytes + 24, reply.max_chunk_bytes);
  store_little_endian<std::uint32_t>(bytes + 28, reply.features);
  std::uint8_t* at = bytes + kReplyBytes;
  for (const HandleAddress& address : reply.addresses) {
    at = std::copy(address.bytes.begin(), address.bytes.end(), at);
    store_little_endian<std::uint16_t>(at, address.port);
    at += 2;
  }
  return static_cast<std::size_t>(at - bytes);
}

bool is_hello_prefix(const std::uint8_t* bytes, std::size_t count) {
  return std::memcmp(bytes, kHelloMagic, std::min(count, kMagicBytes)) == 0;
}

std::uint16_t hello_version(const std::uint8_t* bytes) { return load_little_endian<std::uint16_t>(bytes + 8); }

Cipher hello_cipher(const std::uint8_t* bytes) {
  return static_cast<Cipher>(load_little_endian<std::uint16_t>(bytes + kCipherOffset));
}

void decode_clear_hello(const std::uint8_t* bytes, Hello* hello) {
  hello->protocol_version = hello_version(bytes);
  hello->cipher = hello_cipher(bytes);
  hello->serial = load_little_endian<std::uint32_t>(bytes + kSerialOffset);
  std::copy_n(bytes + kListenIdOffset, hello->listen_id.size(), hello->listen_id.begin());
  std::copy_n(bytes + kKeyIdOffset, hello->key_id.size(), hello->key_id.begin());
}

void decode_hello(const std::uint8_t* bytes, Hello* hello) {
  decode_clear_hello(bytes, hello);
  hello->stream_index = load_little_endian<std::uint16_t>(bytes + 40);
  hello->streams_wanted = load_little_endian<std::uint16_t>(bytes + 42);
  hello->port = load_little_endian<std::uint16_t>(bytes + 44);
  std::copy_n(bytes + kCommIdOffset, hello->comm_id.size(), hello->comm_id.begin());
  hello->process_id = load_little_endian<std::uint64_t>(bytes + 64);
  hello->max_chunk_bytes = load_little_endian<std::uint32_t>(bytes + 72);
  hello->features = load_little_endian<std::uint32_t>(bytes + 76);
  // The name goes into log lines only: anything unprintable from the network is replaced.
  const char* name = reinterpret_cast<const char*>(bytes + kHostNameOffset);
  hello->host_name.assign(name, strnlen(name, kHostNameBytes));
  for (char& letter : hello->host_name) {
    if (letter < 0x21 || letter > 0x7e) letter = '?';
  }
  std::copy(bytes + kNonceOffset, bytes + kHelloBytes, hello->nonce.begin());
}

bool decode_challenge(const std::uint8_t* bytes, Challenge* challenge) {
  if (std::memcmp(bytes, kChallengeMagic, kMagicBytes) != 0) return false;
  std::copy(bytes + kChallengeNonceOffset, bytes + kChallengeBytes, challenge->nonce.begin());
  return true;
}

Status decode_reply(const std::uint8_t* bytes, Reply* reply) {
  if (std::memcmp(bytes, kReplyMagic, kMagicBytes) != 0) {
    return Status::remote_error("the listener's reply does not come from Bagua-Net: another program owns its port");
  }
  reply->protocol_version = load_little_endian<std::uint16_t>(bytes + 8);
  reply->verdict = static_cast<HandshakeVerdict>(load_little_endian<std::uint16_t>(bytes + 10));
  reply->streams = load_little_endian<std::uint16_t>(bytes + 12);
  reply->process_id = load_little_endian<std::uint64_t>(bytes + 16);
  reply->max_chunk_bytes = load_little_endian<std::uint32_t>(bytes + 24);
  reply->features = load_little_endian<std::uint32_t>(bytes + 28);
  return Status::ok();
}

std::vector<HandleAddress> decode_addresses(const std::uint8_t* bytes, std::size_t count) {
  std::vector<HandleAddress> addresses(count);
  for (HandleAddress& address : addresses) {
    std::copy_n(bytes, address.bytes.size(), address.bytes.begin());
    address.port = load_little_endian<std::uint16_t>(bytes + address.bytes.size());
    bytes += kAddressBytes;
  }
  return addresses;
}

namespace {

constexpr char kLabel[] = "bagua-net handshake 3";

}  // namespace

HandshakeKeyRef handshake_key(const Token& token, const JobSecret* secret) {
  Protected<HandshakeKey> key = make_protected<HandshakeKey>();
  if (secret == nullptr) {
    std::copy(token.begin(), token.end(), key->begin());
  } else {
    HmacSha256(secret->key(), secret->key_bytes())
        .add(kLabel, sizeof kLabel)
        .add(token.data(), token.size())
        .finish(key.get());
  }
  return key;
}

namespace {

constexpr std::size_t kLabelBytes = 16;
constexpr char kConnectorLabel[] = "bagua-net conn 3";
constexpr char kListenerLabel[] = "bagua-net list 3";
static_assert(sizeof kConnectorLabel == kLabelBytes + 1 && sizeof kListenerLabel == kLabelBytes + 1);

}  // namespace

HandshakeProof connector_proof(const HandshakeKey& key, const std::uint8_t* hello, const std::uint8_t* challenge) {
  return HmacSha256(key.data(), key.size())
      .add(kConnectorLabel, kLabelBytes)
      .add(hello, kHelloBytes)
      .add(challenge, kChallengeBytes)
      .finish();
}

HandshakeProof listener_proof(const HandshakeKey& key, const std::uint8_t* hello, const std::uint8_t* challenge,
                              const std::uint8_t* reply, std::size_t reply_bytes) {
  return HmacSha256(key.data(), key.size())
      .add(kListenerLabel, kLabelBytes)
      .add(hello, kHelloBytes)
      .add(challenge, kChallengeBytes)
      .add(reply, reply_bytes)
      .finish();
}

}  // namespace bagua_net

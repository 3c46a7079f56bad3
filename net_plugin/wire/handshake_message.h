// The messages that open a data stream. Pure bytes.
//
//   connector                                      listener
//      hello: which listen, which stream, a nonce -->
//                                              <-- challenge: a nonce          (or a reply that refuses)
//      proof              -->
//                                              <-- reply, and the listener's proof
//
// Hello, 144 bytes                                    Reply, 32 bytes
//   byte  size  field                                   byte  size  field
//      0     8  magic "BNHELLO1"                           0     8  magic "BNREPLY1"
//      8     2  protocol version                           8     2  protocol version
//     10     2  cipher: 0 = none (crypto/cipher_state.h)    10     2  verdict (HandshakeVerdict)
//     12     4  serial number, or 0                       12     2  data streams of this comm
//     16    16  listen id, from the connect handle        14     2  zero
//     32     8  key id of the job's secret, or zero       16     8  process id
//     40     2  stream index in the comm                  24     4  largest chunk of a striped message
//     42     2  data streams that the connector wants     28     4  features
//     44     2  port where the connector listens, or 0
//     46     2  zero                                    Challenge, 32 bytes
//     48    16  comm id: random, one per connect          byte  size  field
//     64     8  process id                                   0     8  magic "BNCHALL1"
//     72     4  largest chunk that the connector wants       8     8  zero
//     76     4  features                                    16    16  nonce: random, one per connection
//     80    48  host name, zero-padded
//    128    16  nonce: random, one per connection
//
// Behind the reply that accepts stream 0: the addresses that the listener's handle has no room for, 16 bytes each and 2
// of the port.
//
// Stream 0 goes first: its reply settles the number of streams and the chunk size (the smaller of what both ends
// want), then the others join with the same comm id. Later the connector may let more join (kJoiningStream), as many as
// the listener's handle allows in all. A connector that loses a connection before the reply says the same hello again,
// with a new nonce and a larger serial number: the listener lets go of the stream's former connection. The proof of the
// former one may arrive later, over a longer path: its serial number says that it is not to be accepted. They count the
// hellos of a process, wrap, and are compared modulo 2^32 (RFC 1982); 0 is none. A refusal before the
// connector's proof, or of a wrong one, has no proof of the listener. Features: a bit each; what both ends name is
// used. 1 = the listener acknowledges chunks whose header asks for it. 2 = connections that are lost are replaced, and
// chunks that were not acknowledged sent again. 4 = headers, payloads and acknowledgements have checksums; unlike the
// others, used if either end names it. 8 = the CPU has AES, and the cipher is to be AES-256-GCM if both have. 16 = the
// connector understands acknowledgements that name an address which the listener has lost.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "crypto/cipher_state.h"
#include "crypto/hmac_sha256.h"
#include "crypto/job_secret.h"
#include "wire/connect_handle.h"

namespace bagua_net {

constexpr std::size_t kHelloBytes = 144;
constexpr std::size_t kHelloVersionBytes = 10;  // of a hello, up to its version
constexpr std::size_t kHelloClearBytes = 40;    // of a hello, up to its key id
constexpr std::size_t kChallengeBytes = 32;
constexpr std::size_t kReplyBytes = 32;
constexpr std::size_t kAddressBytes = 18;  // behind a reply
constexpr std::size_t kMaxReplyBytes = kReplyBytes + (kMaxAddresses - 1) * kAddressBytes;

// The stream index of a connection that joins a comm which is in use already. It has no place of its own: chunks say
// where they belong, so each end counts its streams as it likes. The reply's number of streams is 1.
constexpr std::uint16_t kJoiningStream = 0xffff;

// The same for a connection that takes the place of one that was lost: of stream 0, or of any other.
constexpr std::uint16_t kReplacingFirstStream = 0xfffe;
constexpr std::uint16_t kReplacingStream = 0xfffd;
// No stream: its sender has lost all connections of a comm that the other end opened, and asks whether that still has
// it. A challenge says yes, a refusal no. The id is that of the comm; the listen's means nothing. Without an id,
// nothing is asked: the kernel's answer was to be seen (PathProbe). Zeros follow.
constexpr std::uint16_t kAskingStream = 0xfffc;
constexpr bool is_joining(std::uint16_t stream_index) { return stream_index >= kReplacingStream; }

constexpr std::uint32_t kFeatureAcknowledgements = 1;
constexpr std::uint32_t kFeatureRecovery = 2;
constexpr std::uint32_t kFeatureChecksums = 4;
constexpr std::uint32_t kFeatureAes = 8;
constexpr std::uint32_t kFeatureLostAddresses = 16;

enum class HandshakeVerdict : std::uint16_t {
  kAccepted = 0,
  kWrongVersion = 1,     // the reply's version field says which is spoken
  kUnknownListen = 2,    // nobody listens under that id (any more)
  kUnknownStream = 3,    // a joining stream fits no comm, or there is no room for it
  kNoPlace = 4,          // not noticed yet that a stream was lost, or a later connection has its place: try again
  kWrongProof = 5,       // the connector does not know the token
  kOtherProtection = 6,  // the ranks have different secrets, or only one encrypts
};

const char* handshake_verdict_name(HandshakeVerdict verdict);

struct Hello {
  std::uint16_t protocol_version = kProtocolVersion;
  std::uint32_t serial = 0;  // 0: it has none
  std::uint16_t stream_index = 0;
  std::uint16_t streams_wanted = 1;
  std::uint16_t port = 0;
  RandomId listen_id{};
  Cipher cipher = Cipher::kNone;  // other than none: the message is sealed (wire/sealed_handshake.h)
  KeyId key_id{};
  RandomId comm_id{};
  std::uint64_t process_id = 0;
  std::uint32_t max_chunk_bytes = 0;
  std::uint32_t features = 0;
  std::string host_name;
  RandomId nonce{};
};

struct Challenge {
  RandomId nonce{};
};

struct Reply {
  std::uint16_t protocol_version = kProtocolVersion;
  HandshakeVerdict verdict = HandshakeVerdict::kAccepted;
  std::uint16_t streams = 1;
  std::uint64_t process_id = 0;
  std::uint32_t max_chunk_bytes = 0;
  std::uint32_t features = 0;
  std::vector<HandleAddress> addresses;  // behind it
};

// Whether a connection with the serial number `serial` may take the place of one that has `former`.
constexpr bool is_later(std::uint32_t serial, std::uint32_t former) {
  return serial == 0 || former == 0 || static_cast<std::int32_t>(serial - former) > 0;
}

void encode_hello(const Hello& hello, std::uint8_t* bytes);
void encode_challenge(const Challenge& challenge, std::uint8_t* bytes);
// At most kMaxReplyBytes; returns how many.
std::size_t encode_reply(const Reply& reply, std::uint8_t* bytes);

// True while the first `count` bytes could be the start of a hello: an unauthenticated peer is dropped at its first
// wrong byte.
bool is_hello_prefix(const std::uint8_t* bytes, std::size_t count);
// Of the first kHelloVersionBytes: a hello of another version may have another length.
std::uint16_t hello_version(const std::uint8_t* bytes);
// Of the first kHelloClearBytes; it may be one that we do not know.
Cipher hello_cipher(const std::uint8_t* bytes);
// The fields of the first kHelloClearBytes alone.
void decode_clear_hello(const std::uint8_t* bytes, Hello* hello);
// A version other than ours is not an error here: the listener answers it with a verdict.
void decode_hello(const std::uint8_t* bytes, Hello* hello);
// False: it is something else, for instance a reply.
bool decode_challenge(const std::uint8_t* bytes, Challenge* challenge);
// Of its first kReplyBytes.
Status decode_reply(const std::uint8_t* bytes, Reply* reply);
std::vector<HandleAddress> decode_addresses(const std::uint8_t* bytes, std::size_t count);

// HandshakeKey: what both ends of a handshake have to know. Without a secret of the job, the listen's token, which
// travels in NCCL's bootstrap; with one, HMAC-SHA-256 of the token with the secret, so that who sees the bootstrap
// still does not know it.

using HandshakeKey = std::array<std::uint8_t, 32>;
// In protected memory.
using HandshakeKeyRef = std::shared_ptr<const HandshakeKey>;

// secret: nullptr: the job has none.
HandshakeKeyRef handshake_key(const Token& token, const JobSecret* secret = nullptr);

// HandshakeProof: shows that its sender knows the key of a handshake, without telling it. HMAC-SHA-256 (RFC 2104),
// keyed with that key, over a label that names the sender's role and over all that both ends
// have said on this connection:
//
//   connector   label (16 bytes), hello, challenge
//   listener    label (16 bytes), hello, challenge, reply, addresses behind it
//
// Each end contributes a fresh nonce, so a proof of another connection is worth nothing; the label keeps one from being
// sent back to where it came from; the hello's comm id and stream index keep one from being used for another stream.
// All parts but the last have fixed lengths. Pure bytes, no system call.
constexpr std::size_t kProofBytes = 32;
using HandshakeProof = Mac;

// hello[kHelloBytes], challenge[kChallengeBytes], reply[reply_bytes]: as they were sent.
HandshakeProof connector_proof(const HandshakeKey& key, const std::uint8_t* hello, const std::uint8_t* challenge);
HandshakeProof listener_proof(const HandshakeKey& key, const std::uint8_t* hello, const std::uint8_t* challenge,
                              const std::uint8_t* reply, std::size_t reply_bytes);

}  // namespace bagua_net

// Both ends of the handshake on one connection: ConnectorHandshake and UnauthenticatedPeer. Its messages are short, and
// the socket is a fresh non-blocking one: nothing here waits.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/owned_fd.h"
#include "base/status.h"
#include "os/socket_address.h"
#include "os/tcp_socket.h"
#include "wire/handshake_message.h"
#include "wire/sealed_handshake.h"

namespace bagua_net {

enum class HandshakeStep {
  kWaiting,        // the message is not complete
  kDone,           // the message is complete
  kFailed,         // the peer has closed the connection, or the system call failed
  kOtherProtocol,  // of a hello: not one of ours
  kOtherVersion,   // of a hello: of another version of the protocol
};

// Reads what has arrived of a message of `count` bytes, of which *received were read before.
HandshakeStep read_handshake(int socket, std::uint8_t* bytes, std::size_t count, std::size_t* received);
// Returns 0 or errno. The buffer of a new socket always has room for the messages of a handshake.
int write_handshake(int socket, const std::uint8_t* bytes, std::size_t count);

// ConnectorHandshake: the connecting end of the handshake on one connection; UnauthenticatedPeer is the other one. It
// sends a hello, answers a challenge with a proof, and reads the reply. With encryption all of it is sealed. Whoever
// has it decides what follows. Reads and writes never block. Not thread-safe.
class ConnectorHandshake {
 public:
  // On a new connection. addresses: how many follow a reply that accepts. Returns 0 or errno, as send_proof() does.
  int send_hello(int socket, const Hello& hello, HandshakeKeyRef key, std::size_t addresses = 0);

  enum class Answer {
    kWaiting,    // it is not complete
    kClosed,     // the peer has closed the connection or does not know the key, or the system call failed
    kChallenge,  // send_proof() comes next
    kReply,
  };
  Answer read(int socket);
  int send_proof(int socket);

  // After kReply; an error: it is not one of ours.
  Status reply(Reply* reply) const { return decode_reply(answer_.data(), reply); }
  // Of a reply that accepts.
  std::vector<HandleAddress> addresses() const { return decode_addresses(answer_.data() + addresses_at(), addresses_); }
  // The listener has shown that it knows the key, too.
  bool is_proven() const;
  // What the peer said before it closed the connection, or in its reply. Empty: it has not refused.
  std::string refusal() const;
  // After a reply that accepts. nullptr: the connection is not encrypted.
  Protected<ConnectionKeys> take_keys() { return sealed_ == nullptr ? nullptr : sealed_->take_keys(); }

 private:
  Answer read_challenge(int socket);
  HandshakeStep read_reply(int socket);
  HandshakeStep read_sealed_reply(int socket);
  std::size_t addresses_at() const { return sealed_ == nullptr ? kReplyBytes : kSealedReplyBytes; }
  // That follow the reply, which was read.
  std::size_t address_bytes() const;

  HandshakeKeyRef key_;
  Protected<SealedHandshake> sealed_;  // nullptr: without encryption
  std::array<std::uint8_t, kHelloBytes> hello_;
  std::array<std::uint8_t, kChallengeBytes> challenge_;
  // The challenge, later the reply with its proof.
  std::array<std::uint8_t, kMaxReplyBytes + kProofBytes> answer_;
  std::size_t addresses_ = 0;  // that follow a reply
  std::size_t received_ = 0;   // of the answer
  bool has_proved_ = false;    // send_proof() was called
  bool is_opened_ = false;     // of what was sealed, the reply
  bool is_not_peer_ = false;   // what should have been sealed was not
};

// UnauthenticatedPeer: an accepted connection until it has proved that it belongs to this job. It reads a hello,
// answers with a challenge, and reads a proof; with encryption all of it is sealed. InboundHandshakes decides about the
// reply. Reads and writes never block. Not thread-safe.
class UnauthenticatedPeer {
 public:
  UnauthenticatedPeer(OwnedFd connection, const SocketAddress& from, std::int64_t deadline)
      : socket(std::move(connection)), address(from), deadline_ms(deadline) {}

  using Step = HandshakeStep;
  // kOtherVersion: other_version() says which.
  Step read_hello();
  // After read_hello() is done. Of a sealed one before open_hello(), what is in the clear: listen id, cipher and key
  // id.
  Hello hello() const;
  bool is_sealed() const { return hello_cipher(hello_.data()) != Cipher::kNone; }
  // False: the peer does not know this key.
  bool open_hello(const HandshakeKey& key);
  std::uint16_t other_version() const { return hello_version(hello_.data()); }
  bool send_challenge();
  bool is_challenged() const { return is_challenged_; }
  // After send_challenge().
  Step read_proof();
  bool proves(const HandshakeKey& key);

  // key: for the listener's own proof, if the peer has proved that it knows the key; nullptr: without a proof.
  void send_reply(const Reply& reply, const HandshakeKey* key);
  // After a reply that accepts.
  KeyedSocket take_socket();

  bool is_of_this_host() const { return local_address(socket.get()).same_host(address); }

  OwnedFd socket;
  const SocketAddress address;
  const std::int64_t deadline_ms;  // of the whole handshake

 private:
  bool is_challenged_ = false;
  std::size_t received_ = 0;           // of the hello, then of the proof
  Protected<SealedHandshake> sealed_;  // nullptr: without encryption, or not opened
  std::array<std::uint8_t, kSealedHelloBytes> hello_;
  std::array<std::uint8_t, kChallengeBytes> challenge_;
  HandshakeProof proof_;
};

}  // namespace bagua_net

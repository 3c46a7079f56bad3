// ConnectorHandshake: the connecting end of the handshake on one connection; UnauthenticatedPeer is the other one. It
// sends a hello, answers a challenge with a proof, and reads the reply. With encryption all of it is sealed. Whoever
// has it decides what follows. Reads and writes never block. Not thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "transport/connect/handshake_io.h"
#include "wire/handshake_key.h"
#include "wire/handshake_message.h"
#include "wire/sealed_handshake.h"

namespace bagua_net {

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

}  // namespace bagua_net

// UnauthenticatedPeer: an accepted connection until it has proved that it belongs to this job. It reads a hello,
// answers with a challenge, and reads a proof; with encryption all of it is sealed. InboundHandshakes decides about the
// reply. Reads and writes never block. Not thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/owned_fd.h"
#include "os/socket_address.h"
#include "os/tcp_socket.h"
#include "transport/connect/handshake_io.h"
#include "wire/handshake_key.h"
#include "wire/handshake_message.h"
#include "wire/sealed_handshake.h"

namespace bagua_net {

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

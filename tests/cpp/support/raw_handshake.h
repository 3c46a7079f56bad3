// Both sides of a handshake by hand, over blocking sockets, for peers that do what ours never would.
#pragma once

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/owned_fd.h"
#include "os/random_bytes.h"
#include "os/socket_address.h"
#include "support/check.h"
#include "support/comm_parts.h"
#include "support/loopback.h"
#include "wire/connect_handle.h"
#include "wire/handshake_message.h"

namespace bagua_net {

// What was said on a connection: proofs are about it.
struct Said {
  std::array<std::uint8_t, kHelloBytes> hello{};
  std::array<std::uint8_t, kChallengeBytes> challenge{};
};

inline void make_blocking(const OwnedFd& socket) {
  CHECK_EQ(::fcntl(socket.get(), F_SETFL, 0), 0);
  const timeval limit{kDeadlineMs / 1000, 0};
  CHECK_EQ(::setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit), 0);
}

inline OwnedFd connect_to(const SocketAddress& address) {
  OwnedFd socket(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
  CHECK_EQ(::connect(socket.get(), address.data(), address.length()), 0);
  make_blocking(socket);
  return socket;
}

inline void send_bytes(const OwnedFd& socket, const void* bytes, std::size_t count) {
  CHECK_EQ(::send(socket.get(), bytes, count, MSG_NOSIGNAL), static_cast<ssize_t>(count));
}

inline void read_bytes(const OwnedFd& socket, void* bytes, std::size_t count) {
  CHECK_EQ(::recv(socket.get(), bytes, count, MSG_WAITALL), static_cast<ssize_t>(count));
}

// Closes with a reset.
inline void reset_connection(OwnedFd* socket) {
  const linger reset{1, 0};
  CHECK_EQ(::setsockopt(socket->get(), SOL_SOCKET, SO_LINGER, &reset, sizeof reset), 0);
  socket->reset();
}

// --- the connector

// With a nonce of its own.
inline Said say_hello(const OwnedFd& socket, Hello hello) {
  CHECK_OK(fill_random(hello.nonce.data(), hello.nonce.size()));
  Said said;
  encode_hello(hello, said.hello.data());
  send_bytes(socket, said.hello.data(), said.hello.size());
  return said;
}

// False: the hello was refused, with *reply.
inline bool read_challenge(const OwnedFd& socket, Said* said, Reply* reply) {
  read_bytes(socket, said->challenge.data(), said->challenge.size());
  Challenge challenge;
  if (decode_challenge(said->challenge.data(), &challenge)) return true;
  CHECK_OK(decode_reply(said->challenge.data(), reply));
  CHECK(reply->verdict != HandshakeVerdict::kAccepted);
  return false;
}

inline void prove(const OwnedFd& socket, const HandshakeKey& key, const Said& said) {
  const HandshakeProof proof = connector_proof(key, said.hello.data(), said.challenge.data());
  send_bytes(socket, proof.data(), proof.size());
}

inline Reply read_reply(const OwnedFd& socket, const HandshakeKey& key, const Said& said) {
  std::array<std::uint8_t, kReplyBytes> bytes;
  read_bytes(socket, bytes.data(), bytes.size());
  Reply reply;
  CHECK_OK(decode_reply(bytes.data(), &reply));
  if (reply.verdict != HandshakeVerdict::kAccepted) return reply;
  HandshakeProof proof;
  read_bytes(socket, proof.data(), proof.size());
  CHECK(is_same_mac(listener_proof(key, said.hello.data(), said.challenge.data(), bytes.data(), kReplyBytes),
                    proof.data()));
  return reply;
}

inline Reply shake_hands(const OwnedFd& socket, const HandshakeKey& key, const Hello& hello) {
  Said said = say_hello(socket, hello);
  Reply reply;
  if (!read_challenge(socket, &said, &reply)) return reply;
  prove(socket, key, said);
  return read_reply(socket, key, said);
}

// Of a stream of a comm of nobody's; what tests do not care for.
inline Hello hello_to(const RandomId& listen_id) {
  Hello hello;
  hello.listen_id = listen_id;
  hello.max_chunk_bytes = 65536;
  return hello;
}

// --- the listener

inline Said read_hello(const OwnedFd& socket, Hello* hello) {
  Said said;
  read_bytes(socket, said.hello.data(), said.hello.size());
  decode_hello(said.hello.data(), hello);
  return said;
}

inline void challenge(const OwnedFd& socket, Said* said) {
  Challenge challenge;
  CHECK_OK(fill_random(challenge.nonce.data(), challenge.nonce.size()));
  encode_challenge(challenge, said->challenge.data());
  send_bytes(socket, said->challenge.data(), said->challenge.size());
}

inline void read_proof(const OwnedFd& socket, const HandshakeKey& key, const Said& said) {
  HandshakeProof proof;
  read_bytes(socket, proof.data(), proof.size());
  CHECK(is_same_mac(connector_proof(key, said.hello.data(), said.challenge.data()), proof.data()));
}

inline void send_reply(const OwnedFd& socket, const HandshakeKey& key, const Said& said, const Reply& reply) {
  std::array<std::uint8_t, kMaxReplyBytes + kProofBytes> bytes;
  const std::size_t count = encode_reply(reply, bytes.data());
  const HandshakeProof proof = listener_proof(key, said.hello.data(), said.challenge.data(), bytes.data(), count);
  std::copy_n(proof.begin(), kProofBytes, bytes.data() + count);
  send_bytes(socket, bytes.data(), count + kProofBytes);
}

inline Reply acceptance(std::uint16_t streams, std::uint32_t features = 0) {
  return {kProtocolVersion, HandshakeVerdict::kAccepted, streams, 1, 65536, features, {}};
}

// All of it: the connector is ours.
inline Hello answer_handshake(const OwnedFd& socket, const HandshakeKey& key, const Reply& reply) {
  Hello hello;
  Said said = read_hello(socket, &hello);
  challenge(socket, &said);
  read_proof(socket, key, said);
  send_reply(socket, key, said, reply);
  return hello;
}

// Where nobody listens, and no other process can meanwhile.
struct PortOfNobody {
  SocketAddress address;
  OwnedFd socket{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};

  PortOfNobody() {
    const SocketAddress any = loopback().address;
    CHECK_EQ(::bind(socket.get(), any.data(), any.length()), 0);
    address = local_address(socket.get());
  }
  // From now on connections are taken.
  void listen() { CHECK_EQ(::listen(socket.get(), 16), 0); }
};

// A socket that listens, and a handle that leads to it.
struct RawListener {
  SocketAddress address;
  OwnedFd socket;
  Token token{1, 2, 3};
  std::array<std::uint8_t, 128> handle{};

  explicit RawListener(in_addr_t host = INADDR_LOOPBACK) : address(loopback(host).address) {
    CHECK_OK(tcp_listen(&address, &socket));
    ConnectHandle encoded;
    encoded.token = token;
    encoded.port = address.port();
    encoded.max_streams = 4;
    const in_addr host_bytes{htonl(host)};
    std::memcpy(encoded.address.data(), &host_bytes, sizeof host_bytes);
    encode_connect_handle(encoded, handle.data());
  }
  // The next connection that comes, blocking.
  OwnedFd next() const {
    OwnedFd accepted;
    SocketAddress peer;
    wait_until(
        [&] {
          CHECK_OK(tcp_accept(socket.get(), &accepted, &peer));
          return accepted.is_open();
        },
        "a connection");
    make_blocking(accepted);
    return accepted;
  }
  // It is open as long as what is returned; *hello is what the connector said.
  OwnedFd answer_next(const Reply& reply, Hello* hello = nullptr) const {
    OwnedFd accepted = next();
    const Hello said = answer_handshake(accepted, *handshake_key(token), reply);
    if (hello != nullptr) *hello = said;
    return accepted;
  }
};

}  // namespace bagua_net

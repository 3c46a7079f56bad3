// The short messages of a handshake, on a fresh non-blocking socket. Nothing here waits.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bagua_net {

enum class HandshakeStep {
  kWaiting,        // more has to come
  kDone,           // the message is there
  kFailed,         // the peer is gone, or the system refused
  kOtherProtocol,  // of a hello: it is none
  kOtherVersion,   // of a hello: of another version of the protocol
};

// Goes on reading a message of `count` bytes, of which *received are there.
HandshakeStep read_handshake(int socket, std::uint8_t* bytes, std::size_t count, std::size_t* received);
// 0 or errno. The buffer of a fresh socket always has room for the messages of a handshake.
int write_handshake(int socket, const std::uint8_t* bytes, std::size_t count);

}  // namespace bagua_net

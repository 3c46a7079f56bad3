// The short messages of a handshake, on a fresh non-blocking socket. Nothing here waits.
#pragma once

#include <cstddef>
#include <cstdint>

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

}  // namespace bagua_net

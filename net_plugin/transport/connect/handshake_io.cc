#include "transport/connect/handshake_io.h"

#include <sys/socket.h>

#include <cerrno>

namespace bagua_net {

HandshakeStep read_handshake(int socket, std::uint8_t* bytes, std::size_t count, std::size_t* received) {
  while (*received < count) {
    const ssize_t got = ::recv(socket, bytes + *received, count - *received, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return HandshakeStep::kWaiting;
    if (got <= 0) return HandshakeStep::kFailed;
    *received += static_cast<std::size_t>(got);
  }
  return HandshakeStep::kDone;
}

int write_handshake(int socket, const std::uint8_t* bytes, std::size_t count) {
  const ssize_t sent = ::send(socket, bytes, count, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (sent == static_cast<ssize_t>(count)) return 0;
  return sent < 0 ? errno : ECONNRESET;
}

}  // namespace bagua_net

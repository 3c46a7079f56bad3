#include "bench/raw_socket.h"

#include <sys/socket.h>
#include <sys/time.h>

#include <cerrno>
#include <cstring>

namespace bagua_net::bench {
namespace {

constexpr char kMagic[] = "BAGUARAW";
constexpr std::size_t kMagicBytes = sizeof kMagic - 1;

}  // namespace

RawHello::Bytes RawHello::encode() const {
  Bytes bytes{};
  std::memcpy(bytes.data(), kMagic, kMagicBytes);
  bytes[8] = static_cast<std::uint8_t>(stream >> 8);
  bytes[9] = static_cast<std::uint8_t>(stream);
  bytes[10] = static_cast<std::uint8_t>(streams >> 8);
  bytes[11] = static_cast<std::uint8_t>(streams);
  return bytes;
}

bool RawHello::decode(const Bytes& bytes, RawHello* hello) {
  if (std::memcmp(bytes.data(), kMagic, kMagicBytes) != 0) return false;
  hello->stream = static_cast<std::size_t>(bytes[8] << 8 | bytes[9]);
  hello->streams = static_cast<std::size_t>(bytes[10] << 8 | bytes[11]);
  return true;
}

void set_call_deadline(int socket, int option, std::int64_t timeout_ms) {
  timeval time{};
  time.tv_sec = timeout_ms / 1000;
  time.tv_usec = timeout_ms % 1000 * 1000;
  setsockopt(socket, SOL_SOCKET, option, &time, sizeof time);
}

Status stream_failure(const std::string& operation, std::size_t stream, ssize_t result, int error,
                      std::int64_t timeout_ms) {
  const std::string where = operation + " on stream " + std::to_string(stream);
  if (result == 0) return Status::remote_error(where + ": closed by the other end: has that process ended?");
  if (error == EAGAIN || error == EWOULDBLOCK) {
    return Status::remote_error(where + ": nothing moved for " + std::to_string(timeout_ms) +
                                " ms: does the other end run the same command?");
  }
  if (error == ECONNRESET || error == EPIPE) {
    return Status::remote_error(Status::system_error(where, error).message() + ": has the other process ended?");
  }
  return Status::system_error(where, error);
}

Status receive_exactly(int socket, std::size_t stream, std::int64_t timeout_ms, std::uint8_t* data, std::size_t bytes) {
  for (std::size_t offset = 0; offset < bytes;) {
    const ssize_t received = recv(socket, data + offset, bytes - offset, 0);
    if (received < 0 && errno == EINTR) continue;
    if (received <= 0) return stream_failure("recv", stream, received, errno, timeout_ms);
    offset += static_cast<std::size_t>(received);
  }
  return Status::ok();
}

Status send_exactly(int socket, std::size_t stream, std::int64_t timeout_ms, const std::uint8_t* data,
                    std::size_t bytes) {
  for (std::size_t offset = 0; offset < bytes;) {
    const ssize_t sent = send(socket, data + offset, bytes - offset, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return stream_failure("send", stream, sent, errno, timeout_ms);
    offset += static_cast<std::size_t>(sent);
  }
  return Status::ok();
}

}  // namespace bagua_net::bench

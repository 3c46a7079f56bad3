#include "bench/bare_transport.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "base/monotonic_clock.h"
#include "bench/endpoint.h"
#include "os/random_bytes.h"

namespace bagua_net::bench {
namespace {

// Longer than any live peer needs for the bytes that it sends right after connecting.
constexpr std::int64_t kTokenDeadlineMs = 2000;

Status peer_closed(const std::string& peer) {
  return Status::remote_error("connection to " + peer + " closed by the peer: has that rank ended?");
}

Status socket_failure(const char* operation, const std::string& peer, int error) {
  if (error == ECONNRESET || error == EPIPE) {
    return Status::remote_error(Status::system_error(operation, error).message() + " on the connection to " + peer +
                                ": has that rank ended?");
  }
  return Status::system_error(operation + (" on the connection to " + peer), error);
}

bool is_temporary(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

// Both move what the kernel takes or has, as NCCL does: again and again until it takes nothing.
Status send_some(int socket, const std::string& peer, const std::uint8_t* data, std::size_t bytes,
                 std::size_t* offset) {
  while (*offset < bytes) {
    const ssize_t sent = send(socket, data + *offset, bytes - *offset, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) return is_temporary(errno) ? Status::ok() : socket_failure("send", peer, errno);
    *offset += static_cast<std::size_t>(sent);
  }
  return Status::ok();
}

Status receive_some(int socket, const std::string& peer, std::uint8_t* data, std::size_t bytes, std::size_t* offset) {
  while (*offset < bytes) {
    const ssize_t received = recv(socket, data + *offset, bytes - *offset, MSG_DONTWAIT);
    if (received == 0) return peer_closed(peer);
    if (received < 0) return is_temporary(errno) ? Status::ok() : socket_failure("recv", peer, errno);
    *offset += static_cast<std::size_t>(received);
  }
  return Status::ok();
}

}  // namespace

BareTransport::BareTransport(const SocketAddress& address, int channels)
    : address_(address), channels_(static_cast<std::size_t>(channels)) {}

// A handle is the token and the listener's address as text.
Status BareTransport::listen(std::vector<Handle>* handles) {
  for (std::size_t index = 0; index < channels_.size(); ++index) {
    Channel& channel = channels_[index];
    SocketAddress wanted = address_;
    if (wanted.port() != 0) wanted.set_port(static_cast<std::uint16_t>(wanted.port() + index));
    SocketAddress bound;
    BAGUA_NET_RETURN_IF_ERROR(listen_on(wanted, &channel.listener, &bound));
    BAGUA_NET_RETURN_IF_ERROR(fill_random(channel.token.data(), kTokenBytes));
    Handle handle(channel.token.begin(), channel.token.end());
    const std::string text = bound.to_string();
    handle.insert(handle.end(), text.begin(), text.end());
    handles->push_back(std::move(handle));
  }
  return Status::ok();
}

Status BareTransport::connect(int index, Handle* next_rank, bool* connected) {
  Channel& channel = channel_at(index);
  *connected = false;
  if (next_rank->size() <= kTokenBytes) {
    return Status::invalid_argument("the handle of channel " + std::to_string(index) + " has " +
                                    std::to_string(next_rank->size()) +
                                    " bytes: it is not one that a bare rank printed");
  }
  const std::string peer(next_rank->begin() + kTokenBytes, next_rank->end());
  if (!channel.connecting.is_open()) {
    SocketAddress address;
    BAGUA_NET_RETURN_IF_ERROR(parse_endpoint("the handle of channel " + std::to_string(index), peer, &address));
    channel.connecting = OwnedFd(socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!channel.connecting.is_open()) return Status::system_error("socket for " + peer, errno);
    if (::connect(channel.connecting.get(), address.data(), address.length()) != 0 && errno != EINPROGRESS) {
      return Status::system_error("connect to " + peer, errno);
    }
    return Status::ok();
  }

  pollfd writable{channel.connecting.get(), POLLOUT, 0};
  if (poll(&writable, 1, 0) == 0) return Status::ok();
  int error = 0;
  socklen_t length = sizeof error;
  getsockopt(channel.connecting.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  if (error != 0) return Status::system_error("connect to " + peer, error);
  BAGUA_NET_RETURN_IF_ERROR(set_no_delay(channel.connecting.get()));
  // A new socket has room for 16 bytes; a short count means that it broke.
  if (send(channel.connecting.get(), next_rank->data(), kTokenBytes, MSG_NOSIGNAL) !=
      static_cast<ssize_t>(kTokenBytes)) {
    return socket_failure("send", peer, errno);
  }
  channel.send.socket = std::move(channel.connecting);
  channel.send.peer = peer;
  channel.send.is_send = true;
  *connected = true;
  return Status::ok();
}

Status BareTransport::accept(int index, bool* accepted) {
  Channel& channel = channel_at(index);
  *accepted = false;
  if (!channel.accepted.is_open()) {
    sockaddr_storage storage{};
    socklen_t length = sizeof storage;
    const int fd =
        accept4(channel.listener.get(), reinterpret_cast<sockaddr*>(&storage), &length, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      return is_temporary(errno) || errno == ECONNABORTED ? Status::ok() : Status::system_error("accept", errno);
    }
    channel.accepted = OwnedFd(fd);
    channel.accepted_at = monotonic_ms();
    channel.accepted_peer = SocketAddress(reinterpret_cast<const sockaddr*>(&storage), length).to_string();
  }

  std::array<std::uint8_t, kTokenBytes> token{};
  const ssize_t peeked = recv(channel.accepted.get(), token.data(), kTokenBytes, MSG_PEEK);
  if (peeked == static_cast<ssize_t>(kTokenBytes) && token == channel.token) {
    recv(channel.accepted.get(), token.data(), kTokenBytes, 0);
    BAGUA_NET_RETURN_IF_ERROR(set_no_delay(channel.accepted.get()));
    channel.receive.socket = std::move(channel.accepted);
    channel.receive.peer = channel.accepted_peer;
    channel.listener.reset();
    *accepted = true;
    return Status::ok();
  }
  // A stranger: closed, wrong or silent. The listener goes on.
  const bool is_waiting = peeked > 0 ? peeked < static_cast<ssize_t>(kTokenBytes) : peeked < 0 && is_temporary(errno);
  if (!is_waiting || monotonic_ms() - channel.accepted_at > kTokenDeadlineMs) channel.accepted.reset();
  return Status::ok();
}

BareTransport::Request* BareTransport::free_request(Connection* connection) {
  for (Request& request : connection->requests) {
    if (request.state == Request::State::kFree) return &request;
  }
  return nullptr;
}

Status BareTransport::isend(int channel, const void* data, std::size_t bytes, void** request_out) {
  Connection* connection = &channel_at(channel).send;
  Request* request = free_request(connection);
  *request_out = request;
  if (request == nullptr) return Status::ok();
  request->state = Request::State::kSize;
  request->connection = connection;
  request->data = static_cast<std::uint8_t*>(const_cast<void*>(data));  // only ever read from
  request->bytes = bytes;
  request->offset = 0;
  const auto size = static_cast<std::uint32_t>(bytes);
  std::memcpy(request->first.data(), &size, kSizeBytes);
  request->first_bytes = kSizeBytes;
  if (bytes <= kInlineBytes) {
    std::memcpy(request->first.data() + kSizeBytes, data, bytes);
    request->first_bytes += bytes;
  }
  return Status::ok();
}

Status BareTransport::irecv(int channel, void* data, std::size_t bytes, void** request_out) {
  Connection* connection = &channel_at(channel).receive;
  Request* request = free_request(connection);
  *request_out = request;
  if (request == nullptr) return Status::ok();
  request->state = Request::State::kSize;
  request->connection = connection;
  request->data = static_cast<std::uint8_t*>(data);
  request->bytes = bytes;
  request->offset = 0;
  request->first_bytes = kSizeBytes;
  return Status::ok();
}

Status BareTransport::test_send(Request* request, bool* done) {
  const Connection& connection = *request->connection;
  if (request->state == Request::State::kSize) {
    BAGUA_NET_RETURN_IF_ERROR(send_some(connection.socket.get(), connection.peer, request->first.data(),
                                        request->first_bytes, &request->offset));
    if (request->offset < request->first_bytes) return Status::ok();
    request->state = Request::State::kPayload;
    request->offset = request->first_bytes - kSizeBytes;
  }
  BAGUA_NET_RETURN_IF_ERROR(
      send_some(connection.socket.get(), connection.peer, request->data, request->bytes, &request->offset));
  *done = request->offset == request->bytes;
  return Status::ok();
}

Status BareTransport::test_receive(Request* request, bool* done) {
  const Connection& connection = *request->connection;
  if (request->state == Request::State::kSize) {
    BAGUA_NET_RETURN_IF_ERROR(
        receive_some(connection.socket.get(), connection.peer, request->first.data(), kSizeBytes, &request->offset));
    if (request->offset < kSizeBytes) return Status::ok();
    std::uint32_t size = 0;
    std::memcpy(&size, request->first.data(), kSizeBytes);
    if (size > request->bytes) {
      return Status::invalid_usage(connection.peer + " sends a message of " + std::to_string(size) +
                                   " bytes to a receive of " + std::to_string(request->bytes) +
                                   ": give all ranks the same sizes and options");
    }
    request->bytes = size;
    request->state = Request::State::kPayload;
    request->offset = 0;
  }
  BAGUA_NET_RETURN_IF_ERROR(
      receive_some(connection.socket.get(), connection.peer, request->data, request->bytes, &request->offset));
  *done = request->offset == request->bytes;
  return Status::ok();
}

Status BareTransport::test(void* opaque, bool* done, std::size_t* bytes) {
  auto* request = static_cast<Request*>(opaque);
  *done = false;
  BAGUA_NET_RETURN_IF_ERROR(request->connection->is_send ? test_send(request, done) : test_receive(request, done));
  if (*done) {
    *bytes = request->bytes;
    request->state = Request::State::kFree;
  }
  return Status::ok();
}

Status BareTransport::close() {
  for (Channel& channel : channels_) {
    for (Connection* connection : {&channel.send, &channel.receive}) {
      if (connection->socket.is_open()) shutdown(connection->socket.get(), SHUT_RDWR);
      connection->socket.reset();
    }
    channel.connecting.reset();
    channel.accepted.reset();
    channel.listener.reset();
  }
  return Status::ok();
}

}  // namespace bagua_net::bench

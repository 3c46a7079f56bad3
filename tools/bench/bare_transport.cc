// The backend that stands for NCCL's own Socket transport as it runs by default outside the big clouds: no helper
// threads, one non-blocking TCP socket per channel and direction with TCP_NODELAY, and all I/O inside test() of the one
// thread that drives the ring. Congestion control and buffer sizes are the system's. A message is a 4-byte size in host
// order and the payload; up to 128 bytes of payload travel in the same write as the size. There is nothing else on the
// wire. 32 requests per connection.
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "base/owned_fd.h"
#include "bench/driver_protocol.h"
#include "bench/ring_transport.h"
#include "bench/tcp.h"
#include "os/tcp_socket.h"

namespace bagua_net::bench {
namespace {

constexpr int kRequestsPerConnection = 32;  // NCCL_NET_MAX_REQUESTS
constexpr std::size_t kInlineBytes = 128;   // NCCL_SOCKET_INLINE
constexpr std::size_t kSizeBytes = 4;

Failure connection_failure(const char* operation, const std::string& peer, int error) {
  const std::string text = system_failure(operation + (" on the connection to " + peer), error).what();
  return Failure(error == ECONNRESET || error == EPIPE ? text + ": has that rank ended?" : text);
}

void set_no_delay(int socket) {
  const int on = 1;
  if (setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) != 0) throw system_failure("TCP_NODELAY", errno);
}

struct Connection;

struct Request {
  enum class State { kFree, kSize, kPayload };
  State state = State::kFree;
  Connection* connection = nullptr;
  std::uint8_t* data = nullptr;
  std::size_t bytes = 0;   // payload; of a receive: room, then what the peer announced
  std::size_t offset = 0;  // within this state's bytes
  std::size_t first_bytes = 0;
  std::array<std::uint8_t, kSizeBytes + kInlineBytes> first{};  // the size, and an inline payload
};

struct Connection {
  OwnedFd socket;
  std::string peer;
  bool is_send = false;
  std::array<Request, kRequestsPerConnection> requests;

  // nullptr if all are in use.
  Request* post(std::uint8_t* data, std::size_t bytes) {
    for (Request& request : requests) {
      if (request.state != Request::State::kFree) continue;
      request.state = Request::State::kSize;
      request.connection = this;
      request.data = data;
      request.bytes = bytes;
      request.offset = 0;
      request.first_bytes = kSizeBytes;
      return &request;
    }
    return nullptr;
  }

  // What the kernel takes or has, as NCCL does: again and again until it takes nothing. Whether all has moved.
  bool move(std::uint8_t* data, std::size_t bytes, std::size_t* offset) {
    while (*offset < bytes) {
      const std::size_t left = bytes - *offset;
      const ssize_t moved = is_send ? send(socket.get(), data + *offset, left, MSG_DONTWAIT | MSG_NOSIGNAL)
                                    : recv(socket.get(), data + *offset, left, MSG_DONTWAIT);
      if (moved < 0 && is_temporary(errno)) return false;
      if (moved < 0) throw connection_failure(is_send ? "send" : "recv", peer, errno);
      if (moved == 0) throw Failure("connection to " + peer + " closed by the peer: has that rank ended?");
      *offset += static_cast<std::size_t>(moved);
    }
    return true;
  }
};

class BareTransport final : public RingTransport {
 public:
  BareTransport(const std::string& address, int channels)
      : address_(parse_endpoint("--address", address)), channels_(static_cast<std::size_t>(channels)) {}

  std::string net_name() const override { return "bare"; }
  std::vector<std::string> device_names() const override { return {address_.host()}; }

  // A handle is the listener's address as text.
  std::vector<Handle> listen() override {
    std::vector<Handle> handles;
    for (Channel& channel : channels_) {
      SocketAddress bound = address_;
      require(tcp_listen(&bound, &channel.listener));
      const std::string text = bound.to_string();
      handles.emplace_back(text.begin(), text.end());
    }
    return handles;
  }

  bool connect(int index, Handle* next_rank) override {
    Channel& channel = channel_at(index);
    Connection& connection = channel.send;
    if (!channel.connecting.is_open()) {
      connection.peer.assign(next_rank->begin(), next_rank->end());
      connection.is_send = true;
      const SocketAddress address = parse_endpoint("the handle of channel " + std::to_string(index), connection.peer);
      channel.connecting = OwnedFd(::socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
      if (!channel.connecting.is_open()) throw system_failure("socket for " + connection.peer, errno);
      if (::connect(channel.connecting.get(), address.data(), address.length()) != 0 && errno != EINPROGRESS) {
        throw system_failure("connect to " + connection.peer, errno);
      }
      return false;
    }
    pollfd writable{channel.connecting.get(), POLLOUT, 0};
    if (poll(&writable, 1, 0) == 0) return false;
    if (const int error = tcp_connect_result(channel.connecting.get())) {
      throw system_failure("connect to " + connection.peer, error);
    }
    set_no_delay(channel.connecting.get());
    connection.socket = std::move(channel.connecting);
    return true;
  }

  bool accept(int index) override {
    Channel& channel = channel_at(index);
    SocketAddress peer;
    require(tcp_accept(channel.listener.get(), &channel.receive.socket, &peer));
    if (!channel.receive.socket.is_open()) return false;
    set_no_delay(channel.receive.socket.get());
    channel.receive.peer = peer.to_string();
    channel.listener.reset();
    return true;
  }

  void* isend(int channel, const void* data, std::size_t bytes) override {
    Request* request = channel_at(channel).send.post(static_cast<std::uint8_t*>(const_cast<void*>(data)), bytes);
    if (request == nullptr) return nullptr;
    const auto size = static_cast<std::uint32_t>(bytes);
    std::memcpy(request->first.data(), &size, kSizeBytes);
    if (bytes <= kInlineBytes) {
      std::memcpy(request->first.data() + kSizeBytes, data, bytes);
      request->first_bytes += bytes;
    }
    return request;
  }

  void* irecv(int channel, void* data, std::size_t bytes) override {
    return channel_at(channel).receive.post(static_cast<std::uint8_t*>(data), bytes);
  }

  std::optional<std::size_t> test(void* opaque) override {
    auto* request = static_cast<Request*>(opaque);
    Connection* connection = request->connection;
    if (request->state == Request::State::kSize) {
      if (!connection->move(request->first.data(), request->first_bytes, &request->offset)) return {};
      request->offset = request->first_bytes - kSizeBytes;  // of a send: what was inline
      if (!connection->is_send) {
        std::uint32_t size = 0;
        std::memcpy(&size, request->first.data(), kSizeBytes);
        if (size > request->bytes) {
          throw Failure(connection->peer + " sends a message of " + std::to_string(size) + " bytes to a receive of " +
                        std::to_string(request->bytes) + ": give all ranks the same sizes and options");
        }
        request->bytes = size;
      }
      request->state = Request::State::kPayload;
    }
    if (!connection->move(request->data, request->bytes, &request->offset)) return {};
    request->state = Request::State::kFree;
    return request->bytes;
  }

  void close() override {
    for (Channel& channel : channels_) {
      for (Connection* connection : {&channel.send, &channel.receive}) {
        if (connection->socket.is_open()) shutdown(connection->socket.get(), SHUT_RDWR);
        connection->socket.reset();
      }
      channel.connecting.reset();
      channel.listener.reset();
    }
  }

 private:
  struct Channel {
    OwnedFd listener;
    OwnedFd connecting;
    Connection send;
    Connection receive;
  };

  Channel& channel_at(int channel) { return channels_[static_cast<std::size_t>(channel)]; }

  const SocketAddress address_;
  std::vector<Channel> channels_;
};

}  // namespace

std::unique_ptr<RingTransport> make_bare_transport(const std::string& address, int channels) {
  return std::make_unique<BareTransport>(address, channels);
}

}  // namespace bagua_net::bench

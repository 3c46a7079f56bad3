#include "transport/connect/path_probe.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/owned_fd.h"
#include "os/tcp_socket.h"
#include "transport/connect/handshake_io.h"
#include "wire/handshake_message.h"

namespace bagua_net {
namespace {

class TcpProbe final : public PathProbe {
 public:
  explicit TcpProbe(OwnedFd socket) : socket_(std::move(socket)) {}
  // With a reset: the kernel would repeat the packet for a quarter of an hour.
  ~TcpProbe() override {
    const linger reset{1, 0};
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
  }

  State look() override {
    pollfd state{socket_.get(), POLLOUT, 0};
    const bool has_event = ::poll(&state, 1, 0) > 0;
    if (packet_bytes_ == 0) {
      if (!has_event) return State::kConnecting;
      if (tcp_connect_result(socket_.get()) != 0) return State::kFailed;
      packet_bytes_ = std::max(tcp_packet_bytes(socket_.get()), kHelloBytes);
      send_packet();
      return State::kWaiting;
    }
    // The peer's process may have reset the connection, once its kernel had the packet.
    const bool is_reset = has_event && (state.revents & (POLLERR | POLLHUP)) != 0;
    return is_reset || tcp_undelivered_bytes(socket_.get()) == 0 ? State::kAnswered : State::kWaiting;
  }

  std::size_t packet_bytes() const override { return packet_bytes_; }

 private:
  void send_packet() {
    std::vector<std::uint8_t> packet(packet_bytes_);
    Hello hello;
    hello.stream_index = kAskingStream;
    encode_hello(hello, packet.data());
    [[maybe_unused]] const int ignored = write_handshake(socket_.get(), packet.data(), packet.size());
  }

  OwnedFd socket_;
  std::size_t packet_bytes_ = 0;  // 0: it is not connected yet
};

}  // namespace

std::unique_ptr<PathProbe> begin_tcp_probe(const NicPath& path) {
  OwnedFd socket;
  if (!tcp_connect(path.address, {}, &path.interface, &socket).is_ok()) return nullptr;
  return std::make_unique<TcpProbe>(std::move(socket));
}

}  // namespace bagua_net

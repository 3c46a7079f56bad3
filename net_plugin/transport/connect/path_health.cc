#include "transport/connect/path_health.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <vector>

#include "os/tcp_socket.h"
#include "transport/connect/handshake_io.h"
#include "transport/recovery/recovery_timing.h"
#include "wire/handshake_message.h"

namespace bagua_net {
namespace {

// Comms ask once a second, and all are to get the same answer.
constexpr std::int64_t kKnownMs = 1000;
// Between attempts. The nearest healthy situation is a firewall that never lets this pair connect, or refuses it at
// once: that costs a packet a second, for as long as the job runs.
constexpr std::int64_t kAskAgainMs = 1000;

// One may be lost, or answered late.
constexpr int kLostPackets = 2;

// A hello that names nothing, and zeros behind it up to the size of a packet.
void send_packet(int socket, std::size_t bytes) {
  std::vector<std::uint8_t> packet(std::max(bytes, kHelloBytes));
  Hello hello;
  hello.stream_index = kAskingStream;
  encode_hello(hello, packet.data());
  [[maybe_unused]] const int ignored = write_handshake(socket, packet.data(), packet.size());
}

// Otherwise the kernel repeats the packet for a quarter of an hour.
void discard(OwnedFd* socket) {
  const linger reset{1, 0};
  ::setsockopt(socket->get(), SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
  socket->reset();
}

}  // namespace

void PathHealth::look(Known& probe, std::int64_t now_ms) {
  const int socket = probe.socket.get();
  pollfd state{socket, POLLOUT, 0};
  if (probe.sent_ms == 0) {
    const bool is_answered = ::poll(&state, 1, 0) > 0;
    if (is_answered && tcp_connect_result(socket) == 0) {
      probe.sent_ms = now_ms;
      probe.packet_bytes = tcp_packet_bytes(socket);
      send_packet(socket, probe.packet_bytes);
    } else if (is_answered || now_ms - probe.asked_ms >= kConnectAnswerMs) {
      probe.socket.reset();
      return;
    }
  }
  if (probe.sent_ms == 0) return;
  // The peer's process may have reset the connection, once its kernel had the packet.
  const bool is_reset = ::poll(&state, 1, 0) > 0 && (state.revents & (POLLERR | POLLHUP)) != 0;
  if (tcp_undelivered_bytes(socket) == 0 || is_reset) {
    probe.found_ms = now_ms;
    probe.answered_ms = probe.sent_ms;
    probe.lost_packets = 0;
    probe.is_told = false;
    discard(&probe.socket);
  } else if (now_ms - probe.sent_ms >= kConnectAnswerMs) {
    ++probe.lost_packets;
    discard(&probe.socket);
  }
}

bool PathHealth::works(const NicPath& path, std::int64_t now_ms) {
  const MutexLock lock(mutex_);
  Known& probe = known(path);
  if (probe.found_ms != 0 && now_ms - probe.found_ms < kKnownMs) return true;
  if (probe.socket.is_open()) {
    look(probe, now_ms);
    if (probe.found_ms == now_ms) return true;
  }
  if (!probe.socket.is_open() && now_ms - probe.asked_ms >= kAskAgainMs) {
    probe.asked_ms = now_ms;
    probe.sent_ms = 0;
    // No route, no descriptor: treated like no answer.
    if (!tcp_connect(path.address, {}, &path.interface, &probe.socket).is_ok()) probe.socket.reset();
  }
  return false;
}

bool PathHealth::is_due(const NicPath& path) {
  const MutexLock lock(mutex_);
  const Known& probe = known(path);
  return probe.socket.is_open() && probe.sent_ms != 0;
}

std::int64_t PathHealth::answered_ms(const NicPath& path) {
  const MutexLock lock(mutex_);
  return known(path).answered_ms;
}

std::size_t PathHealth::take_lost_packet_bytes(const NicPath& path) {
  const MutexLock lock(mutex_);
  Known& probe = known(path);
  if (probe.lost_packets < kLostPackets || probe.is_told) return 0;
  probe.is_told = true;
  return probe.packet_bytes;
}

void PathHealth::on_silent(const NicPath& path, std::int64_t now_ms) {
  const MutexLock lock(mutex_);
  known(path).silent_ms = now_ms;
}

std::int64_t PathHealth::silent_ms(const NicPath& path) {
  const MutexLock lock(mutex_);
  return known(path).silent_ms;
}

}  // namespace bagua_net

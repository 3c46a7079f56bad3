#include "transport/connect/path_health.h"

#include <poll.h>

#include "os/tcp_socket.h"
#include "transport/recovery/recovery_timing.h"

namespace bagua_net {
namespace {

// Comms ask once a second, and all are to get the same answer.
constexpr std::int64_t kKnownMs = 1000;
// Between attempts. The nearest healthy situation is a firewall that never lets this pair connect, or refuses it at
// once: that costs a packet a second, for as long as the job runs.
constexpr std::int64_t kAskAgainMs = 1000;

}  // namespace

bool PathHealth::works(const NicPath& path, std::int64_t now_ms) {
  const MutexLock lock(mutex_);
  Known& probe = known(path);
  if (probe.opened_ms != 0 && now_ms - probe.opened_ms < kKnownMs) return true;
  if (probe.socket.is_open()) {
    pollfd state{probe.socket.get(), POLLOUT, 0};
    const bool is_answered = ::poll(&state, 1, 0) > 0;
    if (is_answered && tcp_connect_result(probe.socket.get()) == 0) {
      probe.opened_ms = now_ms;
      probe.socket.reset();
      return true;
    }
    if (is_answered || now_ms - probe.asked_ms >= kConnectAnswerMs) probe.socket.reset();
  }
  if (!probe.socket.is_open() && now_ms - probe.asked_ms >= kAskAgainMs) {
    probe.asked_ms = now_ms;
    // No route, no descriptor: treated like no answer.
    if (!tcp_connect(path.address, {}, &path.interface, &probe.socket).is_ok()) probe.socket.reset();
  }
  return false;
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

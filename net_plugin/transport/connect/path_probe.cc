#include "transport/connect/path_probe.h"

#include <poll.h>

#include "os/tcp_socket.h"

namespace bagua_net {

bool PathProbe::ask(const NicPath& path) {
  if (socket_.is_open()) {
    pollfd state{socket_.get(), POLLOUT, 0};
    const bool is_open = ::poll(&state, 1, 0) > 0 && tcp_connect_result(socket_.get()) == 0;
    socket_.reset();
    if (is_open) return true;
  }
  // No route, no descriptor: treated like no answer.
  if (!tcp_connect(path.address, {}, &path.interface, &socket_).is_ok()) socket_.reset();
  return false;
}

}  // namespace bagua_net

#include "transport/connect/departure.h"

#include <poll.h>

namespace bagua_net {

Departure departure(int socket) {
  pollfd state{socket, POLLRDHUP, 0};  // -1 is ignored
  if (::poll(&state, 1, 0) <= 0) return Departure::kNone;
  return (state.revents & POLLERR) != 0 ? Departure::kReset : Departure::kClosed;
}

}  // namespace bagua_net

// Departure: whether the other end of a connection is still there, which a look at the socket tells without reading.
#pragma once

namespace bagua_net {

enum class Departure { kNone, kReset, kClosed };

Departure departure(int socket);  // of no socket (-1): kNone

}  // namespace bagua_net

// The first hello of a comm, of which those of its further connections are copies.
#pragma once

#include "base/status.h"
#include "transport/connect/handshake_settings.h"
#include "wire/connect_handle.h"
#include "wire/handshake_message.h"

namespace bagua_net {

// All but the number of streams and the port. handle: of the listener.
Status fill_first_hello(const HandshakeSettings& settings, const ConnectHandle& handle, Hello* hello);

}  // namespace bagua_net

// From an open transport to connected channels, as ring mode does it: handles leave in the "listening" answer,
// the neighbour's come back in the "connect" command.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "bench/json_line.h"
#include "bench/ring_transport.h"

namespace bagua_net::bench {

// Listens on every channel. Adds to the answer: the handles in hexadecimal and what the transport is.
Status listen_on_channels(const std::string& transport_name, RingTransport* transport, JsonLine* answer);

// `words`: the command "connect HANDLE...", one handle per channel. Until every channel is connected both ways, or
// timeout_ms. `neighbours` says in an error who should have been there.
Status connect_channels(const std::vector<std::string>& words, int channels, std::int64_t timeout_ms,
                        const std::string& neighbours, RingTransport* transport);

}  // namespace bagua_net::bench

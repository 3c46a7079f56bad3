// Raw mode: how fast TCP alone moves bytes from a client to a server over N connections, one thread each: the limit that
// transports are measured against. The threads write and read blocks of the size given and do nothing else.
//
// Client threads take the next block of the run from one shared counter, so a slow connection takes fewer; the server
// needs no block borders, it counts what arrives on all connections together. When the run's bytes have arrived, it
// acknowledges with one byte on connection 0.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"

namespace bagua_net::bench {

// `words`: the command line behind "raw". Returns when told to quit; a failure has been reported on stdout already.
Status run_raw_mode(const std::vector<std::string>& words);

}  // namespace bagua_net::bench

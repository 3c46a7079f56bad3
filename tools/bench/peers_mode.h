// Peers mode: this process is one of two ranks that keep many comms between them, commanded over stdin.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"

namespace bagua_net::bench {

// `words`: the command line behind "peers". Returns when told to quit; a failure has been reported on stdout already.
Status run_peers_mode(const std::vector<std::string>& words);

}  // namespace bagua_net::bench

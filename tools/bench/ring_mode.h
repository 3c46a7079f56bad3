// Ring mode: this process is one rank of a ring all-reduce over one transport, commanded over stdin.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"

namespace bagua_net::bench {

// `words`: the command line behind "ring". Returns when told to quit; a failure has been reported on stdout already.
Status run_ring_mode(const std::vector<std::string>& words);

}  // namespace bagua_net::bench

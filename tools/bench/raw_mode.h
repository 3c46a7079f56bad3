// Raw mode: how fast TCP alone moves bytes from a client to a server over N connections with a thread each: the limit
// that transports are measured against. The threads write and read blocks and do nothing else. Each run says how much
// memory the blocks come from, because TCP copies cache-hot memory faster and for less CPU.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"

namespace bagua_net::bench {

// `words`: the command line behind "raw". Returns when told to quit; a failure has been reported on stdout already.
Status run_raw_mode(const std::vector<std::string>& words);

}  // namespace bagua_net::bench

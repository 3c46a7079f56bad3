// Burn mode: this process keeps one CPU busy, as a worker of a data loader does, until it is told to quit.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"

namespace bagua_net::bench {

// `words`: the command line behind "burn". A failure has been reported on stdout already.
Status run_burn_mode(const std::vector<std::string>& words);

}  // namespace bagua_net::bench

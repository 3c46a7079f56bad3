// The modes of the driver. `words`: the command line behind the name of the mode. They return when told to quit, and
// throw a Failure.
#pragma once

#include "bench/driver_protocol.h"

namespace bagua_net::bench {

void run_ring_mode(const Words& words);
void run_raw_mode(const Words& words);

}  // namespace bagua_net::bench

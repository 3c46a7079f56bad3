// Carries the core's log messages (base/log_sink.h) to NCCL's logger. Any thread may log.
#pragma once

#include "abi/nccl_types.h"

namespace bagua_net::abi {

// The name in NCCL's log, and the value of NCCL_NET that asks for us.
constexpr char kPluginName[] = "BaguaNet";

// The logger comes with every init and nowhere else. nullptr (unit tests of NCCL, a table driven by hand): messages
// are dropped.
void install_nccl_logger(nccl::Logger* logger);

}  // namespace bagua_net::abi

// PluginLog: the logger that the driver hands to a plugin. Prints in the manner of NCCL's log to stderr, as far as
// BAGUA_DRIVER_LOG asks for it, and keeps the last warning: the NCCL interface returns a number only, and the
// reason behind it is in that warning.
// Any thread may log. One per process, because NCCL's logger is a plain function without a context.
#pragma once

#include <string>

#include "abi/nccl_types.h"
#include "base/status.h"

namespace bagua_net::bench {

// Reads BAGUA_DRIVER_LOG: "" or unset, "warn" or "info".
Status configure_plugin_log();
nccl::Logger* plugin_logger();
void forget_plugin_warnings();      // those of a start that went well say nothing about later failures
std::string last_plugin_warning();  // "" if there was none

}  // namespace bagua_net::bench

// Whether the user has chosen what the plugin's tuner for NCCL chooses otherwise: channels, algorithm, protocol.
#pragma once

#include <string>

#include "base/environment_reader.h"

namespace bagua_net {

// The first such variable with its value, as "NCCL_ALGO=Tree"; empty: there is none, and the tuner chooses.
std::string tuning_choice(const EnvironmentReader& environment);

}  // namespace bagua_net

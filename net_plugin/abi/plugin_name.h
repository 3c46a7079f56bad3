// The name in NCCL's log, and the value of NCCL_NET that asks for us.
#pragma once

namespace bagua_net::abi {

constexpr char kPluginName[] = "BaguaNet";

}  // namespace bagua_net::abi

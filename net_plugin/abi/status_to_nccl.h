// The one place where an outcome of the core becomes one of NCCL's result codes.
#pragma once

#include "abi/nccl_types.h"
#include "base/status.h"

namespace bagua_net::abi {

nccl::Result status_to_nccl(StatusCode code);

}  // namespace bagua_net::abi

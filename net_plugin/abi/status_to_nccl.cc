#include "abi/status_to_nccl.h"

namespace bagua_net::abi {

nccl::Result status_to_nccl(StatusCode code) {
  // No default: a new code must choose here, or the build warns.
  switch (code) {
    case StatusCode::kOk: return nccl::Result::kSuccess;
    case StatusCode::kSystemError: return nccl::Result::kSystemError;
    case StatusCode::kInternalError: return nccl::Result::kInternalError;
    case StatusCode::kInvalidArgument: return nccl::Result::kInvalidArgument;
    case StatusCode::kInvalidUsage: return nccl::Result::kInvalidUsage;
    case StatusCode::kRemoteError:
    case StatusCode::kDamagedData: return nccl::Result::kRemoteError;
  }
  return nccl::Result::kInternalError;
}

}  // namespace bagua_net::abi

#include "base/status.h"

#include <cstring>

namespace bagua_net {

const char* status_code_name(StatusCode code) {
  switch (code) {
    case StatusCode::kOk: return "ok";
    case StatusCode::kSystemError: return "system error";
    case StatusCode::kInternalError: return "internal error";
    case StatusCode::kInvalidArgument: return "invalid argument";
    case StatusCode::kInvalidUsage: return "invalid usage";
    case StatusCode::kRemoteError: return "remote error";
    case StatusCode::kDamagedData: return "damaged data";
  }
  return "unknown status";
}

Status::Status(StatusCode code, std::string message)
    : failure_(std::make_shared<const Failure>(Failure{code, std::move(message), 0})) {}

Status Status::system_error(const std::string& operation, int error_number) {
  // strerrordesc_np and friends need a newer glibc; strerror_r's GNU form returns the text and never fails.
  char buffer[128];
  const char* reason = strerror_r(error_number, buffer, sizeof buffer);
  Status status;
  status.failure_ = std::make_shared<const Failure>(
      Failure{StatusCode::kSystemError, operation + ": " + reason + " (errno " + std::to_string(error_number) + ")",
              error_number});
  return status;
}

const std::string& Status::message() const {
  // Never destroyed: a thread of ours may outlive the process's static objects.
  static const auto* const kNone = new std::string;
  return failure_ ? failure_->message : *kNone;
}

Status Status::with_context(const std::string& context) const {
  if (is_ok()) return *this;
  Status status;
  status.failure_ = std::make_shared<const Failure>(
      Failure{failure_->code, context + ": " + failure_->message, failure_->error_number});
  return status;
}

}  // namespace bagua_net

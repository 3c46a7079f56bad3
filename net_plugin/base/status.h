// Status: the outcome of every operation that can fail. Success is a null pointer, so the hot path pays nothing;
// a failure carries the code that NCCL is told and one sentence for the log (operation, peer, value, remedy).
#pragma once

#include <memory>
#include <string>
#include <utility>

namespace bagua_net {

enum class StatusCode {
  kOk,
  kSystemError,      // a system call failed on this host
  kInternalError,    // a bug of ours, or NCCL used us in a way that it never should
  kInvalidArgument,  // a bad value passed by the caller
  kInvalidUsage,     // the job is set up wrongly: sizes or settings that do not fit together
  kRemoteError,      // the peer is gone or does not speak our protocol
  kDamagedData,      // what the peer sent does not have its checksum
};

const char* status_code_name(StatusCode code);

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message);

  static Status ok() { return {}; }
  static Status system_error(const std::string& operation, int error_number);
  static Status internal_error(std::string message) { return {StatusCode::kInternalError, std::move(message)}; }
  static Status invalid_argument(std::string message) { return {StatusCode::kInvalidArgument, std::move(message)}; }
  static Status invalid_usage(std::string message) { return {StatusCode::kInvalidUsage, std::move(message)}; }
  static Status remote_error(std::string message) { return {StatusCode::kRemoteError, std::move(message)}; }
  static Status damaged_data(std::string message) { return {StatusCode::kDamagedData, std::move(message)}; }

  bool is_ok() const { return failure_ == nullptr; }
  StatusCode code() const { return failure_ ? failure_->code : StatusCode::kOk; }
  const std::string& message() const;
  int error_number() const { return failure_ ? failure_->error_number : 0; }

  // The same failure, with "context: " before its message.
  Status with_context(const std::string& context) const;

 private:
  struct Failure {
    StatusCode code;
    std::string message;
    int error_number = 0;
  };
  std::shared_ptr<const Failure> failure_;
};

#define BAGUA_NET_RETURN_IF_ERROR(expression)                 \
  do {                                                        \
    ::bagua_net::Status bagua_net_status_ = (expression);     \
    if (!bagua_net_status_.is_ok()) return bagua_net_status_; \
  } while (false)

}  // namespace bagua_net

#include "abi/nccl_log.h"

#include <atomic>
#include <cstring>

#include "base/log_sink.h"

namespace bagua_net::abi {
namespace {

// Relaxed: the pointer is all there is to see; the function behind it was there before NCCL opened us.
std::atomic<nccl::Logger*> nccl_logger{nullptr};

const char* base_name(const char* path) {
  const char* slash = std::strrchr(path, '/');
  return slash == nullptr ? path : slash + 1;
}

void log_to_nccl(LogLevel level, const char* file, int line, const char* message) {
  nccl::Logger* logger = nccl_logger.load(std::memory_order_relaxed);
  if (logger == nullptr) return;
  // NCCL keeps the last WARN whatever NCCL_DEBUG says, and torch puts it into its exception ("Last error: ..."): that
  // is how a user sees our reason with logging off. INFO passes NCCL_DEBUG_SUBSYS by one matching flag; INIT is in its
  // default set, NET is not.
  const nccl::LogLevel nccl_level = level == LogLevel::kWarn ? nccl::LogLevel::kWarn : nccl::LogLevel::kInfo;
  logger(nccl_level, nccl::kLogInit | nccl::kLogNet, base_name(file), line, "NET/BaguaNet: %s", message);
}

}  // namespace

void install_nccl_logger(nccl::Logger* logger) {
  nccl_logger.store(logger, std::memory_order_relaxed);
  set_log_function(logger == nullptr ? nullptr : &log_to_nccl);
}

}  // namespace bagua_net::abi

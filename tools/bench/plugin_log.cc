#include "bench/plugin_log.h"

#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <mutex>

namespace bagua_net::bench {
namespace {

struct LogState {
  nccl::LogLevel shown = nccl::LogLevel::kNone;  // set before the plugin is opened
  std::mutex mutex;                              // guards last_warning
  std::string last_warning;
};

LogState& log_state() {
  static LogState state;
  return state;
}

// NOLINTNEXTLINE(modernize-avoid-variadic-functions): NCCL's type of a logger
void write_log(nccl::LogLevel level, unsigned long /*flags*/, const char* file, int line, const char* format, ...) {
  char message[2048];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  LogState& state = log_state();
  if (level == nccl::LogLevel::kWarn) {
    const std::lock_guard<std::mutex> lock(state.mutex);
    state.last_warning = message;
  }
  if (static_cast<int>(level) > static_cast<int>(state.shown)) return;
  if (level == nccl::LogLevel::kWarn) {
    std::fprintf(stderr, "bagua-net-driver:%d WARN %s:%d %s\n", static_cast<int>(getpid()), file, line, message);
  } else {
    std::fprintf(stderr, "bagua-net-driver:%d INFO %s\n", static_cast<int>(getpid()), message);
  }
}

}  // namespace

Status configure_plugin_log() {
  const char* value = std::getenv("BAGUA_DRIVER_LOG");
  const std::string level = value == nullptr ? "" : value;
  if (level == "warn") {
    log_state().shown = nccl::LogLevel::kWarn;
  } else if (level == "info") {
    log_state().shown = nccl::LogLevel::kInfo;
  } else if (!level.empty()) {
    return Status::invalid_argument("BAGUA_DRIVER_LOG is \"" + level + "\", but must be warn, info or empty");
  }
  return Status::ok();
}

nccl::Logger* plugin_logger() { return &write_log; }

void forget_plugin_warnings() {
  LogState& state = log_state();
  const std::lock_guard<std::mutex> lock(state.mutex);
  state.last_warning.clear();
}

std::string last_plugin_warning() {
  LogState& state = log_state();
  const std::lock_guard<std::mutex> lock(state.mutex);
  return state.last_warning;
}

}  // namespace bagua_net::bench

#include "base/log_sink.h"

#include <atomic>

namespace bagua_net {
namespace {
// Relaxed would do for the pointer itself; acquire/release also publishes whatever state the function relies on.
std::atomic<LogFunction> log_function{nullptr};
}  // namespace

void set_log_function(LogFunction function) { log_function.store(function, std::memory_order_release); }

void log_message(LogLevel level, const char* file, int line, const std::string& message) {
  if (LogFunction function = log_function.load(std::memory_order_acquire)) {
    function(level, file, line, message.c_str());
  }
}

}  // namespace bagua_net

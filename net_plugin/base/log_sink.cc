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

bool RareLog::is_due(LogLevel level, const std::string& kind, std::int64_t now_ms) {
  Kind& found = kinds_[{level, kind}];
  if (now_ms < found.due_ms) {
    ++found.left_out;
    return false;
  }
  found.due_ms = now_ms + kPauseMs;
  return true;
}

void RareLog::add(LogLevel level, const std::string& kind, std::string text) {
  const std::uint64_t left_out = std::exchange(kinds_[{level, kind}].left_out, 0);
  if (left_out > 0) text += " (and " + std::to_string(left_out) + " more of this kind since the last such line)";
  lines_.push_back({level, std::move(text), kind});
}

}  // namespace bagua_net

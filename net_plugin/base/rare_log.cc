#include "base/rare_log.h"

namespace bagua_net {

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

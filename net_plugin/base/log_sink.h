// LogSink: where the core's messages go. `abi` installs NCCL's logger; without one (unit tests, the Python module)
// messages are dropped.
// Any thread may log. Nothing in the hot path does.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/monotonic_clock.h"

namespace bagua_net {

enum class LogLevel { kWarn, kInfo };

// A plain function pointer: it can be swapped atomically, and NCCL's own logger is one.
using LogFunction = void (*)(LogLevel level, const char* file, int line, const char* message);

void set_log_function(LogFunction function);  // nullptr: drop messages
void log_message(LogLevel level, const char* file, int line, const std::string& message);

// RareLog: log lines that unauthenticated peers can cause. The first line of each kind is logged, then at most one in
// ten seconds, with the number of lines in between. Lines are kept here until the caller has released its lock, because
// NCCL's logger may block. Not thread-safe.
class RareLog {
 public:
  struct Line {
    LogLevel level;
    std::string text;
    std::string kind;
  };

  // True: a line of this kind may be logged now, with add(). Kinds are a few constants.
  bool is_due(LogLevel level, const std::string& kind, std::int64_t now_ms);
  void add(LogLevel level, const std::string& kind, std::string text);

  // The text is made if it is due.
  template <typename MakeText>
  void add_if_due(LogLevel level, const std::string& kind, MakeText make_text) {
    if (is_due(level, kind, monotonic_ms())) add(level, kind, make_text());
  }

  std::vector<Line> take() { return std::exchange(lines_, {}); }

 private:
  static constexpr std::int64_t kPauseMs = 10000;

  struct Kind {
    std::int64_t due_ms = 0;
    std::uint64_t left_out = 0;
  };
  std::map<std::pair<LogLevel, std::string>, Kind> kinds_;
  std::vector<Line> lines_;
};

}  // namespace bagua_net

#define BAGUA_NET_WARN(message) ::bagua_net::log_message(::bagua_net::LogLevel::kWarn, __FILE__, __LINE__, (message))
#define BAGUA_NET_INFO(message) ::bagua_net::log_message(::bagua_net::LogLevel::kInfo, __FILE__, __LINE__, (message))

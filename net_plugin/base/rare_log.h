// RareLog: log lines that unauthenticated peers can cause. The first line of each kind is logged, then at most one in
// ten seconds, with the number of lines in between. Lines are kept here until the caller has released its lock, because
// NCCL's logger may block. Not thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/log_sink.h"
#include "base/monotonic_clock.h"

namespace bagua_net {

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

// What both modes of the driver speak: `--name value` options, commands as lines of words on stdin, answers as JSON
// lines on stdout. Main thread only, but for Failure.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace bagua_net::bench {

// Ends the process. Says value, cause and remedy.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};
void require(const Status& status);                               // that it is ok
Failure system_failure(const std::string& operation, int error);  // errno

using Words = std::vector<std::string>;

// Decimal, nothing before or behind it, within [least, most]. `name` is what the failure calls it.
std::int64_t parse_integer(const std::string& name, const std::string& text, std::int64_t least, std::int64_t most);

class Options {
 public:
  // One that is not in `known`, or lacks its value, is a failure.
  Options(const Words& words, const Words& known);

  // A failure if it was not given and has no default.
  std::string text(const std::string& name, const std::optional<std::string>& otherwise = {}) const;
  std::int64_t integer(const std::string& name, std::int64_t least, std::int64_t most,
                       std::optional<std::int64_t> otherwise = {}) const;

 private:
  std::map<std::string, std::string> values_;
};

// One flat JSON object, with arrays of strings and of numbers.
class JsonLine {
 public:
  explicit JsonLine(std::string_view event) { add("event", event); }

  template <typename Value>
  JsonLine& add(std::string_view key, const Value& value) {
    if (text_.size() > 1) text_ += ", ";
    append(key);
    text_ += ": ";
    append(value);
    return *this;
  }
  // Written and flushed at once: the front-end waits for it.
  void send() const;

 private:
  void append(std::string_view value);
  void append(const std::string& value) { append(std::string_view(value)); }
  void append(const char* value) { append(std::string_view(value)); }
  void append(std::int64_t value) { text_ += std::to_string(value); }
  void append(std::size_t value) { text_ += std::to_string(value); }
  void append(double value);
  template <typename Value>
  void append(const std::optional<Value>& value) {
    if (value) return append(*value);
    text_ += "null";
  }
  template <typename Value>
  void append(const std::vector<Value>& values) {
    text_ += '[';
    for (const Value& value : values) {
      if (&value != values.data()) text_ += ", ";
      append(value);
    }
    text_ += ']';
  }

  std::string text_ = "{";
};

// From now on the process has 10 s to end by itself, then it is ended with exit code 1: a transport that hangs in its
// close must not keep the process.
void limit_closing_time();

// The error that ends this process: the first one is told, once. What is left to do then is closing, so this also
// limits its time.
void report_failure(const Failure& failure);

// A failure of `work` is told before the caller's destructors, so that nobody waits for it until everything is closed.
template <typename Work>
void reported(Work work) {
  try {
    work();
  } catch (const Failure& failure) {
    report_failure(failure);
    throw;
  }
}

// What goes wrong while an end is closed says nothing new: it ends because of a failure, which has been told.
template <typename Work>
void quietly(Work work) {
  try {
    work();
  } catch (const Failure&) {
    return;
  }
}

struct Command {
  std::string usage;  // "run BYTES ITERATIONS WARMUP"; with "..." at its end, one word or more come last
  std::function<void(const Words& words)> run;
};
// Runs `commands` by their first word until "quit" or the end of stdin, and says bye when `close` has returned.
void serve(const std::vector<Command>& commands, const std::function<void()>& close);

double monotonic_seconds();
double cpu_seconds();  // of all threads of this process

}  // namespace bagua_net::bench

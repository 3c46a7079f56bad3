#include "bench/driver_protocol.h"

#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>

#include "base/monotonic_clock.h"

namespace bagua_net::bench {
namespace {

constexpr unsigned kClosingSeconds = 10;

volatile sig_atomic_t failure_is_reported = 0;  // read by the signal handler

void end_process(int /*signal*/) {
  constexpr char kMessage[] =
      "{\"event\": \"error\", \"message\": \"closing the connections took more than 10 s: the process was ended\"}\n";
  if (failure_is_reported == 0 && write(STDOUT_FILENO, kMessage, sizeof kMessage - 1) < 0) _exit(EXIT_FAILURE);
  _exit(EXIT_FAILURE);
}

Words words_of(const std::string& line) {
  std::istringstream stream(line);
  Words words;
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

}  // namespace

void require(const Status& status) {
  if (!status.is_ok()) throw Failure(status.message());
}

Failure system_failure(const std::string& operation, int error) {
  return Failure(Status::system_error(operation, error).message());
}

std::int64_t parse_integer(const std::string& name, const std::string& text, std::int64_t least, std::int64_t most) {
  std::int64_t number = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  if (error == std::errc() && stop == end && number >= least && number <= most) return number;
  throw Failure(name + " is \"" + text + "\", but must be a whole number from " + std::to_string(least) + " to " +
                std::to_string(most));
}

Options::Options(const Words& words, const Words& known) {
  for (std::size_t i = 0; i < words.size(); i += 2) {
    if (std::find(known.begin(), known.end(), words[i]) == known.end()) {
      throw Failure("unknown option \"" + words[i] + "\"; --help shows those of this mode");
    }
    if (i + 1 == words.size()) throw Failure("option " + words[i] + " needs a value behind it");
    values_[words[i]] = words[i + 1];
  }
}

std::string Options::text(const std::string& name, const std::optional<std::string>& otherwise) const {
  if (const auto found = values_.find(name); found != values_.end()) return found->second;
  if (otherwise) return *otherwise;
  throw Failure("option " + name + " is missing and has no default");
}

std::int64_t Options::integer(const std::string& name, std::int64_t least, std::int64_t most,
                              std::optional<std::int64_t> otherwise) const {
  if (otherwise && values_.count(name) == 0) return *otherwise;
  return parse_integer(name, text(name), least, most);
}

void JsonLine::append(std::string_view value) {
  text_ += '"';
  for (const char character : value) {
    const auto code = static_cast<unsigned char>(character);
    if (character == '"' || character == '\\') {
      text_ += {'\\', character};
    } else if (code < 0x20 || code >= 0x7f) {
      // Bytes above ASCII come from foreign text (a path, a host name) that need not be UTF-8: escaped one by one, the
      // line always parses.
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", code);
      text_ += escape;
    } else {
      text_ += character;
    }
  }
  text_ += '"';
}

void JsonLine::append(double value) {
  char digits[32] = "null";  // JSON has no word for what is not finite
  if (std::isfinite(value)) std::snprintf(digits, sizeof digits, "%.9g", value);
  text_ += digits;
}

void JsonLine::send() const {
  std::printf("%s}\n", text_.c_str());
  std::fflush(stdout);
}

void limit_closing_time() {
  signal(SIGALRM, &end_process);
  alarm(kClosingSeconds);
}

void report_failure(const Failure& failure) {
  if (failure_is_reported != 0) return;
  JsonLine("error").add("message", failure.what()).send();
  failure_is_reported = 1;
  limit_closing_time();
}

void serve(const std::vector<Command>& commands, const std::function<void()>& close) {
  // No deadline: the front-end decides how long a driver lives, and its death ends the driver.
  for (std::string line; std::getline(std::cin, line);) {
    const Words words = words_of(line);
    if (words.empty()) continue;
    if (words[0] == "quit") break;
    std::string usages;
    const Command* known = nullptr;
    for (const Command& command : commands) {
      const Words usage = words_of(command.usage);
      const bool is_open = usage.back() == "...";
      const bool fits = is_open ? words.size() >= usage.size() - 1 : words.size() == usage.size();
      if (words[0] == usage[0] && fits) known = &command;
      usages += command.usage + ", ";
    }
    if (known == nullptr) throw Failure("\"" + line + "\" is none of the commands " + usages + "quit");
    known->run(words);
  }
  limit_closing_time();
  close();
  JsonLine("bye").send();
}

double monotonic_seconds() { return static_cast<double>(monotonic_ns()) * 1e-9; }

double cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

}  // namespace bagua_net::bench

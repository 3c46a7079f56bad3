#include "bench/driver_protocol.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>

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

}  // namespace

void write_event(const JsonLine& line) {
  const std::string text = line.text() + "\n";
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

void report_failure(const Status& status) {
  write_event(JsonLine("error").add("message", status.message()).add("code", status_code_name(status.code())));
  failure_is_reported = 1;
  limit_closing_time();
}

void limit_closing_time() {
  signal(SIGALRM, &end_process);
  alarm(kClosingSeconds);
}

bool read_command(std::vector<std::string>* words) {
  std::string line;
  while (std::getline(std::cin, line)) {
    words->clear();
    std::istringstream stream(line);
    for (std::string word; stream >> word;) words->push_back(word);
    if (!words->empty()) return true;
  }
  return false;
}

Status serve_commands(const char* mode, const std::vector<Command>& commands) {
  std::vector<std::string> words;
  while (read_command(&words) && words[0] != "quit") {
    const auto known = std::find_if(commands.begin(), commands.end(),
                                    [&](const Command& command) { return words[0] == command.name; });
    if (known == commands.end()) {
      std::string names;
      for (const Command& command : commands) names += (names.empty() ? "" : ", ") + std::string(command.name);
      return Status::invalid_argument("unknown command \"" + words[0] + "\"; " + mode + " mode knows " + names +
                                      " and quit");
    }
    BAGUA_NET_RETURN_IF_ERROR(known->run(words));
  }
  return Status::ok();
}

Status expect_arguments(const std::vector<std::string>& words, std::size_t count, const std::string& usage) {
  if (words.size() == count + 1) return Status::ok();
  return Status::invalid_argument("command \"" + words[0] + "\" has " + std::to_string(words.size() - 1) +
                                  " arguments, but is written: " + usage);
}

}  // namespace bagua_net::bench

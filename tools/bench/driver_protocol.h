// The driver's side of its protocol: commands are lines of words on stdin, answers are JSON lines on stdout. Main
// thread only.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/status.h"
#include "bench/json_line.h"

namespace bagua_net::bench {

// Written and flushed at once: the front-end waits for it.
void write_event(const JsonLine& line);

// The one error that ends this process. What is left to do then is closing, so this also calls limit_closing_time.
void report_failure(const Status& status);

// From now on the process has 10 s to end by itself, then it is ended with exit code 1: a transport that hangs in its
// close must not keep the process.
void limit_closing_time();

// Waits for the next line that is not blank; false at the end of stdin, which means the same as `quit`. The wait has
// no deadline of its own: the front-end decides how long a driver lives, and its death ends the driver.
bool read_command(std::vector<std::string>* words);

// A command has to have `count` arguments; the error shows how it is written.
Status expect_arguments(const std::vector<std::string>& words, std::size_t count, const std::string& usage);

// Runs `commands` by their first word until "quit" or the end of stdin.
struct Command {
  const char* name;
  std::function<Status(const std::vector<std::string>& words)> run;
};
Status serve_commands(const char* mode, const std::vector<Command>& commands);

// A whole mode: parses its options, starts a session of them and lets it serve. A failure is reported before the
// session's destructor, so that nobody waits for the news until everything is closed.
template <typename Session, typename Options>
Status run_mode(const std::vector<std::string>& words, Status (*parse)(const std::vector<std::string>&, Options*)) {
  Options options;
  Status status = parse(words, &options);
  if (!status.is_ok()) {
    report_failure(status);
    return status;
  }
  Session session(options);
  status = session.start();
  if (status.is_ok()) status = session.serve();
  if (!status.is_ok()) report_failure(status);
  return status;
}

}  // namespace bagua_net::bench

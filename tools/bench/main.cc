// bagua-net-driver: one process of a benchmark. `ring`: one rank of a ring all-reduce over the plugin or over plain
// sockets; `raw`: one end of plain TCP streams. Commands come on stdin, answers go to stdout, one JSON object per line;
// bagua-net-bench starts these processes and makes tables of the answers. An error is one {"event": "error"} line and
// exit code 1; the end of stdin means quit.
#include <signal.h>
#include <sys/prctl.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "bench/driver_protocol.h"
#include "bench/raw_mode.h"
#include "bench/ring_mode.h"

namespace {

constexpr char kUsage[] =
    R"(bagua-net-driver ring --transport plugin|bare --rank R --nranks W
    [--channels 2] [--slice-bytes 1048576] [--depth 4] [--timeout-ms 60000]
    plugin: --library PATH [--table auto|5..12] [--device 0..|all]
    bare:   [--address 127.0.0.1[:PORT]]
  stdin: connect HANDLE... | run BYTES ITERATIONS WARMUP | verify BYTES | quit

bagua-net-driver raw --role server [--address 127.0.0.1[:PORT]] --streams N
bagua-net-driver raw --role client --connect HOST:PORT          --streams N
    [--write-bytes 1048576] [--memory-bytes a block per stream] [--timeout-ms 60000]
  stdin: run BYTES MEMORY | quit

Answers are JSON lines on stdout. BAGUA_DRIVER_LOG=warn|info shows the plugin's log on stderr.
)";

// A driver must not outlive the front-end that reads it. If the parent died before this call, stdin is at its end, and
// the first read_command says so; during later work the signal is what ends us.
void die_with_parent() { prctl(PR_SET_PDEATHSIG, SIGKILL); }

}  // namespace

int main(int argc, char** argv) {
  using bagua_net::Status;
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (!words.empty() && (words[0] == "--help" || words[0] == "-h" || words[0] == "help")) {
    std::fputs(kUsage, stdout);
    return EXIT_SUCCESS;
  }
  die_with_parent();
  const std::string mode = words.empty() ? "" : words[0];
  const std::vector<std::string> options(words.empty() ? words.end() : words.begin() + 1, words.end());
  if (mode == "ring") return bagua_net::bench::run_ring_mode(options).is_ok() ? EXIT_SUCCESS : EXIT_FAILURE;
  if (mode == "raw") return bagua_net::bench::run_raw_mode(options).is_ok() ? EXIT_SUCCESS : EXIT_FAILURE;
  bagua_net::bench::report_failure(
      Status::invalid_argument("unknown mode \"" + mode + "\": must be ring or raw; --help shows their options"));
  return EXIT_FAILURE;
}

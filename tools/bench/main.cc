// bagua-net-driver: one process of a benchmark. `ring`: one rank of a ring all-reduce over the plugin or over plain
// sockets; `raw`: one end of plain TCP streams. Commands come on stdin, answers go to stdout, one JSON object per line;
// bagua-net-bench starts these processes and makes tables of the answers. An error is one {"event": "error"} line and
// exit code 1; the end of stdin means quit.
#include <signal.h>
#include <sys/prctl.h>

#include <cstdio>
#include <cstdlib>

#include "bench/modes.h"

namespace {

constexpr char kUsage[] =
    R"(bagua-net-driver ring --transport plugin|bare --rank R --nranks W
    [--channels 2] [--slice-bytes 1048576] [--depth 4] [--timeout-ms 60000]
    plugin: --library PATH [--device 0..|all]
    bare:   [--address 127.0.0.1]
  stdin: connect HANDLE ... | run BYTES ITERATIONS WARMUP | verify BYTES | quit

bagua-net-driver raw --role server [--address 127.0.0.1[:PORT]] --streams N
bagua-net-driver raw --role client --connect HOST:PORT          --streams N
    [--write-bytes 1048576] [--memory-bytes 1048576] [--timeout-ms 60000]
  stdin: run BYTES MEMORY | quit

Answers are JSON lines on stdout. BAGUA_DRIVER_LOG=warn|info shows the plugin's log on stderr.
)";

}  // namespace

int main(int argc, char** argv) {
  using namespace bagua_net::bench;
  const Words words(argv + 1, argv + argc);
  const std::string mode = words.empty() ? "" : words[0];
  if (mode == "--help" || mode == "-h" || mode == "help") {
    std::fputs(kUsage, stdout);
    return EXIT_SUCCESS;
  }
  // A driver must not outlive the front-end that reads it. If the parent died before this call, stdin is at its end,
  // and the first look for a command says so; during later work the signal is what ends us.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  try {
    if (mode != "ring" && mode != "raw") {
      throw Failure("unknown mode \"" + mode + "\": must be ring or raw; --help shows their options");
    }
    (mode == "ring" ? run_ring_mode : run_raw_mode)({words.begin() + 1, words.end()});
    return EXIT_SUCCESS;
  } catch (const Failure& failure) {
    report_failure(failure);
    return EXIT_FAILURE;
  }
}

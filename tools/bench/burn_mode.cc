#include "bench/burn_mode.h"

#include <poll.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#include "bench/command_line.h"
#include "bench/driver_protocol.h"
#include "bench/page_buffer.h"
#include "bench/resource_meter.h"

namespace bagua_net::bench {
namespace {

// A decoded image or a few: more than the private caches, as the samples of a data loader are.
constexpr std::int64_t kDefaultBytes = std::int64_t{4} << 20;
constexpr std::int64_t kMaxBytes = std::int64_t{1} << 30;
// Between two looks at stdin: some 10 us, so that the end is seen soon and the look costs nothing.
constexpr std::size_t kBlockBytes = std::size_t{32} << 10;

// Reads, computes and writes every byte, as decoding and augmenting do.
void work_on(std::uint8_t* data, std::size_t bytes, std::uint64_t* state) {
  for (std::size_t i = 0; i + sizeof(std::uint64_t) <= bytes; i += sizeof(std::uint64_t)) {
    std::uint64_t value = 0;
    std::memcpy(&value, data + i, sizeof value);
    *state = (*state ^ value) * 0x9e3779b97f4a7c15u + 1;
    std::memcpy(data + i, state, sizeof value);
  }
}

Status burn(const std::vector<std::string>& words) {
  CommandLine line;
  BAGUA_NET_RETURN_IF_ERROR(CommandLine::parse(words, {"--working-set-bytes"}, &line));
  std::int64_t bytes = 0;
  BAGUA_NET_RETURN_IF_ERROR(
      line.integer_or("--working-set-bytes", static_cast<std::int64_t>(kBlockBytes), kMaxBytes, kDefaultBytes, &bytes));
  PageBuffer memory;
  BAGUA_NET_RETURN_IF_ERROR(memory.allocate(static_cast<std::size_t>(bytes), "--working-set-bytes"));
  write_event(JsonLine("burning").add("pid", static_cast<std::int64_t>(getpid())));

  std::uint64_t state = 1;
  std::size_t offset = 0;
  pollfd command{STDIN_FILENO, POLLIN, 0};
  while (poll(&command, 1, 0) == 0) {
    work_on(memory.data() + offset, kBlockBytes, &state);
    offset += kBlockBytes;
    if (offset + kBlockBytes > memory.bytes()) offset = 0;
  }
  std::vector<std::string> answer;
  if (read_command(&answer) && answer[0] != "quit") {
    return Status::invalid_argument("unknown command \"" + answer[0] + "\"; burn mode knows quit");
  }
  JsonLine bye("bye");
  ResourceUsage::now().add_to(&bye);
  write_event(bye);
  return Status::ok();
}

}  // namespace

Status run_burn_mode(const std::vector<std::string>& words) {
  Status status = burn(words);
  if (!status.is_ok()) report_failure(status);
  return status;
}

}  // namespace bagua_net::bench

#include "bench/ring_options.h"

#include "bench/command_line.h"

namespace bagua_net::bench {
namespace {

constexpr std::int64_t kMaxTimeoutMs = 3'600'000;

}  // namespace

Status parse_ring_options(const std::vector<std::string>& words, RingOptions* options) {
  std::vector<std::string> known = transport_option_names();
  known.insert(known.end(), {"--rank", "--nranks", "--channels", "--slice-bytes", "--depth", "--timeout-ms"});
  CommandLine line;
  BAGUA_NET_RETURN_IF_ERROR(CommandLine::parse(words, known, &line));
  BAGUA_NET_RETURN_IF_ERROR(parse_transport_choice(line, &options->transport));

  std::int64_t number = 0;
  RingGeometry& geometry = options->geometry;
  BAGUA_NET_RETURN_IF_ERROR(line.integer("--nranks", 2, kMaxRanks, &number));
  geometry.nranks = static_cast<int>(number);
  BAGUA_NET_RETURN_IF_ERROR(line.integer("--rank", 0, geometry.nranks - 1, &number));
  geometry.rank = static_cast<int>(number);
  BAGUA_NET_RETURN_IF_ERROR(line.integer_or("--channels", 1, kMaxChannels, geometry.channels, &number));
  geometry.channels = static_cast<int>(number);
  BAGUA_NET_RETURN_IF_ERROR(line.integer_or("--depth", 1, kMaxDepth, geometry.depth, &number));
  geometry.depth = static_cast<int>(number);
  BAGUA_NET_RETURN_IF_ERROR(line.integer_or("--slice-bytes", 16, static_cast<std::int64_t>(kMaxSliceBytes),
                                            static_cast<std::int64_t>(geometry.slice_bytes), &number));
  if (number % 16 != 0) {
    return Status::invalid_argument("--slice-bytes is " + std::to_string(number) +
                                    ", but must be a multiple of 16, so that no slice cuts an element");
  }
  geometry.slice_bytes = static_cast<std::size_t>(number);
  BAGUA_NET_RETURN_IF_ERROR(line.integer_or("--timeout-ms", 100, kMaxTimeoutMs, 60000, &number));
  options->timeout_ms = number;
  return Status::ok();
}

}  // namespace bagua_net::bench

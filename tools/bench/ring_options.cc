#include "bench/ring_options.h"

#include "bench/command_line.h"
#include "bench/endpoint.h"

namespace bagua_net::bench {
namespace {

constexpr std::int64_t kMaxTimeoutMs = 3'600'000;

}  // namespace

Status parse_ring_options(const std::vector<std::string>& words, RingOptions* options) {
  CommandLine line;
  BAGUA_NET_RETURN_IF_ERROR(
      CommandLine::parse(words,
                         {"--transport", "--rank", "--nranks", "--channels", "--slice-bytes", "--depth", "--library",
                          "--table", "--device", "--address", "--timeout-ms"},
                         &line));
  BAGUA_NET_RETURN_IF_ERROR(line.choice("--transport", {"plugin", "bare"}, &options->transport));

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

  if (options->transport == "bare") {
    for (const char* name : {"--library", "--table", "--device"}) {
      if (line.has(name))
        return Status::invalid_argument(std::string(name) + " is an option of --transport plugin only");
    }
    BAGUA_NET_RETURN_IF_ERROR(parse_endpoint("--address", line.text_or("--address", "127.0.0.1"), &options->address));
    if (options->address.port() + geometry.channels - 1 > 65535) {
      return Status::invalid_argument("--address has port " + std::to_string(options->address.port()) + " and " +
                                      std::to_string(geometry.channels) +
                                      " channels need as many ports from there on: the last one is above 65535");
    }
    return Status::ok();
  }

  if (line.has("--address")) {
    return Status::invalid_argument(
        "--address is an option of --transport bare only; the plugin's interfaces are chosen by NCCL_SOCKET_IFNAME");
  }
  BAGUA_NET_RETURN_IF_ERROR(line.text("--library", &options->plugin.library_path));
  if (const std::string table = line.text_or("--table", "auto"); table != "auto") {
    BAGUA_NET_RETURN_IF_ERROR(parse_integer("--table (if not auto)", table, kOldestTable, kNewestTable, &number));
    options->plugin.table_version = static_cast<int>(number);
  }
  if (const std::string device = line.text_or("--device", "0"); device == "all") {
    options->plugin.all_devices = true;
  } else {
    BAGUA_NET_RETURN_IF_ERROR(parse_integer("--device (if not all)", device, 0, 65535, &number));
    options->plugin.device = static_cast<int>(number);
  }
  return Status::ok();
}

}  // namespace bagua_net::bench

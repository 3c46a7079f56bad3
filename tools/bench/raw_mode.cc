#include "bench/raw_mode.h"

#include <memory>

#include "bench/command_line.h"
#include "bench/driver_protocol.h"
#include "bench/endpoint.h"
#include "bench/raw_client.h"
#include "bench/raw_server.h"

namespace bagua_net::bench {
namespace {

constexpr std::int64_t kMaxStreams = 256;
constexpr std::int64_t kMaxWriteBytes = std::int64_t{1} << 30;
constexpr std::int64_t kMaxMemoryBytes = std::int64_t{1} << 40;
constexpr std::int64_t kMaxRunBytes = std::int64_t{1} << 50;

Status parse_raw_options(const std::vector<std::string>& words, RawOptions* options) {
  CommandLine line;
  BAGUA_NET_RETURN_IF_ERROR(CommandLine::parse(
      words, {"--role", "--streams", "--address", "--connect", "--write-bytes", "--memory-bytes", "--timeout-ms"},
      &line));
  std::string role;
  BAGUA_NET_RETURN_IF_ERROR(line.choice("--role", {"server", "client"}, &role));
  options->is_server = role == "server";
  if (line.has(options->is_server ? "--connect" : "--address")) {
    return Status::invalid_argument("a server takes --address to listen on, a client --connect to the server");
  }
  if (options->is_server) {
    BAGUA_NET_RETURN_IF_ERROR(parse_endpoint("--address", line.text_or("--address", "127.0.0.1"), &options->address));
  } else {
    std::string text;
    BAGUA_NET_RETURN_IF_ERROR(line.text("--connect", &text));
    BAGUA_NET_RETURN_IF_ERROR(parse_endpoint("--connect", text, &options->address));
    if (options->address.port() == 0) {
      return Status::invalid_argument("--connect is \"" + text + "\": the port is missing; the server printed it");
    }
  }
  std::int64_t number = 0;
  BAGUA_NET_RETURN_IF_ERROR(line.integer("--streams", 1, kMaxStreams, &number));
  options->streams = static_cast<std::size_t>(number);
  BAGUA_NET_RETURN_IF_ERROR(line.integer_or("--write-bytes", 1, kMaxWriteBytes, std::int64_t{1} << 20, &number));
  options->write_bytes = static_cast<std::size_t>(number);
  const auto block_each = static_cast<std::int64_t>(options->streams * options->write_bytes);
  BAGUA_NET_RETURN_IF_ERROR(line.integer_or("--memory-bytes", 1, kMaxMemoryBytes, block_each, &number));
  options->memory_bytes = static_cast<std::size_t>(number);
  BAGUA_NET_RETURN_IF_ERROR(line.integer_or("--timeout-ms", 100, 3'600'000, 60000, &number));
  options->timeout_ms = number;
  return Status::ok();
}

Status serve(std::size_t most_memory_bytes, RawEnd* end) {
  BAGUA_NET_RETURN_IF_ERROR(end->connect());
  write_event(JsonLine("connected"));
  const auto run = [&](const std::vector<std::string>& words) {
    BAGUA_NET_RETURN_IF_ERROR(expect_arguments(words, 2, "run BYTES MEMORY"));
    std::int64_t bytes = 0;
    BAGUA_NET_RETURN_IF_ERROR(parse_integer("BYTES of run", words[1], 1, kMaxRunBytes, &bytes));
    std::int64_t memory_bytes = 0;
    BAGUA_NET_RETURN_IF_ERROR(parse_integer("MEMORY of run (at most --memory-bytes)", words[2], 1,
                                            static_cast<std::int64_t>(most_memory_bytes), &memory_bytes));
    return end->run(bytes, static_cast<std::size_t>(memory_bytes));
  };
  BAGUA_NET_RETURN_IF_ERROR(serve_commands("raw", {{"run", run}}));
  limit_closing_time();
  write_event(JsonLine("bye"));
  return Status::ok();
}

}  // namespace

Status run_raw_mode(const std::vector<std::string>& words) {
  RawOptions options;
  Status status = parse_raw_options(words, &options);
  if (!status.is_ok()) {
    report_failure(status);
    return status;
  }
  std::unique_ptr<RawEnd> end;
  if (options.is_server) {
    end = std::make_unique<RawServer>(options);
  } else {
    end = std::make_unique<RawClient>(options);
  }
  status = serve(options.memory_bytes, end.get());
  // Before the destructor: nobody has to wait for the news until every thread is joined.
  if (!status.is_ok()) report_failure(status);
  return status;
}

}  // namespace bagua_net::bench

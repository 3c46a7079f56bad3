// The knob table: defaults, every kind of value, every kind of bad value, and names that are not in it.
#include "config/plugin_config.h"

#include <cstdlib>
#include <set>
#include <tuple>

#include "support/check.h"
#include "support/variables.h"

using bagua_net::CongestionControl;
using bagua_net::PluginConfig;
using bagua_net::reader;
using bagua_net::Recovery;
using bagua_net::Status;
using bagua_net::Variables;
using check::contains;

namespace {

PluginConfig parsed(const Variables& variables) {
  PluginConfig config;
  CHECK_OK(bagua_net::parse_plugin_config(reader(variables), &config));
  return config;
}

// What is wrong; what to do follows on a line of its own.
std::string error_of(const Variables& variables) {
  PluginConfig config;
  config.spin_us = 123;
  const Status status = bagua_net::parse_plugin_config(reader(variables), &config);
  CHECK(!status.is_ok());
  CHECK(status.code() == bagua_net::StatusCode::kInvalidUsage);
  CHECK_EQ(config.spin_us, 123);  // a failure leaves *config alone
  const std::string message = status.message();
  CHECK(message.find('\n') < message.size() - 1);
  return message.substr(0, message.find('\n'));
}

// All but the fault plan.
auto members(const PluginConfig& config) {
  return std::tuple(config.enabled, config.required, config.streams, config.workers, config.rails, config.inline_bytes,
                    config.min_chunk_bytes, config.max_chunk_bytes, config.spin_us, config.connect_timeout_ms,
                    config.handshake_timeout_ms, config.keepalive_s, config.stall_s, config.recovery, config.checksum,
                    config.zero_copy, config.msg_zerocopy, config.stats, config.trace, config.socket_buffer_bytes,
                    config.congestion_control);
}

}  // namespace

TEST_CASE(nothing_set_gives_the_defaults) {
  const PluginConfig config = parsed({});
  CHECK(members(config) == members(PluginConfig()));
  CHECK(config.enabled && !config.required);
  CHECK(!config.streams && !config.workers && !config.rails);
  CHECK(config.zero_copy && !config.msg_zerocopy && config.stats);
  CHECK(config.congestion_control == CongestionControl::kAuto);
}

// A knob that the table forgets, or that two rows write, shows here: each must change its own member and no other.
TEST_CASE(every_knob_reaches_its_own_member) {
  const PluginConfig config = parsed({{"ENABLE_BAGUA_NET", "0"},
                                      {"BAGUA_NET_REQUIRED", "1"},
                                      {"BAGUA_NET_NSTREAMS", "7"},
                                      {"BAGUA_NET_NWORKERS", "3"},
                                      {"BAGUA_NET_RAILS", "5"},
                                      {"BAGUA_NET_JOIN_NICS", "eth0+eth1, eth2+eth3"},
                                      {"BAGUA_NET_INLINE_BYTES", "1234"},
                                      {"BAGUA_NET_MIN_CHUNKSIZE", "2345"},
                                      {"BAGUA_NET_MAX_CHUNKSIZE", "3456"},
                                      {"BAGUA_NET_SPIN_US", "11"},
                                      {"BAGUA_NET_CONNECT_TIMEOUT_MS", "1212"},
                                      {"BAGUA_NET_HANDSHAKE_TIMEOUT_MS", "1313"},
                                      {"BAGUA_NET_KEEPALIVE_S", "14"},
                                      {"BAGUA_NET_STALL_S", "16"},
                                      {"BAGUA_NET_RECOVERY", "0"},
                                      {"BAGUA_NET_CHECKSUM", "1"},
                                      {"BAGUA_NET_SECRET_FILE", "/run/job.secret"},
                                      {"BAGUA_NET_ENCRYPTION", "chacha20"},
                                      {"BAGUA_NET_ZERO_COPY", "0"},
                                      {"BAGUA_NET_MSG_ZEROCOPY", "1"},
                                      {"BAGUA_NET_STATS", "0"},
                                      {"BAGUA_NET_TRACE", "/tmp/Trace.json"},
                                      {"BAGUA_NET_SOCKET_BUFFER", "71234"},
                                      {"BAGUA_NET_CONGESTION_CONTROL", "bbr"},
                                      {"BAGUA_NET_FAULT", "cut=15/s"}});
  CHECK(members(config) == std::tuple(false, true, std::optional(7), std::optional(3), std::optional(5), 1234, 2345,
                                      3456, 11, 1212, 1313, 14, 16, Recovery::kOff, true, false, true, false,
                                      "/tmp/Trace.json", 71234, CongestionControl::kBbr));
  CHECK_EQ(config.faults.cuts_per_s, 15.0);
  CHECK(!config.join_nics->is_auto);
  CHECK((config.join_nics->groups == std::vector<std::vector<std::string>>{{"eth0", "eth1"}, {"eth2", "eth3"}}));
  CHECK_EQ(config.secret_file, "/run/job.secret");
  CHECK(config.encryption == bagua_net::Encryption::kChaCha20);
  CHECK_EQ(bagua_net::knob_descriptions().size(), std::size_t{25});
}

// What a row says is the default is read back as the default: setting it changes nothing.
TEST_CASE(described_defaults_are_the_defaults) {
  Variables variables;
  for (const auto& knob : bagua_net::knob_descriptions()) {
    if (knob.default_value != bagua_net::kNotSet) variables[knob.name] = knob.default_value;
  }
  CHECK_EQ(variables.count("ENABLE_BAGUA_NET"), std::size_t{0});
  CHECK(members(parsed(variables)) == members(PluginConfig()));
}

TEST_CASE(descriptions_are_complete_and_unique) {
  std::set<std::string> names;
  for (const auto& knob : bagua_net::knob_descriptions()) {
    CHECK(names.insert(knob.name).second);
    CHECK(knob.name == "ENABLE_BAGUA_NET" || knob.name.rfind("BAGUA_NET_", 0) == 0);
    const bool is_number = knob.type == "integer" || knob.type == "size";
    CHECK(is_number || knob.type == "boolean" || knob.type == "choice" || knob.type == "path" ||
          knob.type == "interfaces" || knob.type == "fault plan");
    CHECK(!knob.default_value.empty() && !knob.range.empty() && !knob.meaning.empty());
    CHECK_EQ(knob.meaning.back(), '.');
    CHECK_EQ(knob.unit.empty(), !is_number);
  }
}

TEST_CASE(interfaces_to_join) {
  CHECK(!parsed({}).join_nics);
  CHECK(parsed({{"BAGUA_NET_JOIN_NICS", "Auto"}}).join_nics->is_auto);
  CHECK(!parsed({{"BAGUA_NET_JOIN_NICS", "off"}}).join_nics->is_auto);
  CHECK(parsed({{"BAGUA_NET_JOIN_NICS", "off"}}).join_nics->groups.empty());
  CHECK_EQ(parsed({{"BAGUA_NET_JOIN_NICS", "a+b+c+d+e+f+g+h"}}).join_nics->groups[0].size(), std::size_t{8});
  for (const char* bad :
       {"eth0", "eth0+", "+eth0", "eth0++eth1", "eth0+eth0", "eth0+eth1,eth1+eth2", "eth0+eth1,", "on", "1"}) {
    const std::string said = error_of({{"BAGUA_NET_JOIN_NICS", bad}});
    CHECK(contains(said,
                   std::string("BAGUA_NET_JOIN_NICS=") + bad + ": must be off, auto, or groups of interface names"));
  }
}

TEST_CASE(booleans) {
  for (const char* yes : {"1", "true", "TRUE", "Yes", "on", " 1 "}) {
    CHECK(parsed({{"BAGUA_NET_REQUIRED", yes}}).required);
  }
  for (const char* no : {"0", "false", "False", "NO", "off", "0\n"}) {
    CHECK(!parsed({{"ENABLE_BAGUA_NET", no}}).enabled);
  }
  for (const char* bad : {"2", "-1", "y", "enable", "01"}) {
    CHECK_EQ(error_of({{"ENABLE_BAGUA_NET", bad}}),
             std::string("ENABLE_BAGUA_NET=") + bad + ": must be 1, true, yes or on, or else 0, false, no or off");
  }
}

TEST_CASE(an_empty_value_is_not_set) {
  const PluginConfig config = parsed({{"ENABLE_BAGUA_NET", ""}, {"BAGUA_NET_NSTREAMS", "  "}});
  CHECK(config.enabled);
  CHECK(!config.streams);
}

TEST_CASE(integers_and_auto) {
  CHECK_EQ(parsed({{"BAGUA_NET_NSTREAMS", "1"}}).streams.value_or(-1), 1);
  CHECK_EQ(parsed({{"BAGUA_NET_NSTREAMS", "64"}}).streams.value_or(-1), 64);
  CHECK(!parsed({{"BAGUA_NET_NSTREAMS", "AUTO"}}).streams);
  CHECK_EQ(parsed({{"BAGUA_NET_NWORKERS", "0"}}).workers.value_or(-1), 0);
  for (const char* bad : {"0", "65", "-1", "4.0", "4x", "x", "0x4", "+4", "1e1", "99999999999999999999", "4 4"}) {
    CHECK_EQ(error_of({{"BAGUA_NET_NSTREAMS", bad}}),
             std::string("BAGUA_NET_NSTREAMS=") + bad + ": must be an integer from 1 to 64, or \"auto\"");
  }
  CHECK_EQ(error_of({{"BAGUA_NET_SPIN_US", "auto"}}),
           std::string("BAGUA_NET_SPIN_US=auto: must be an integer from 0 to 1000000 (microseconds)"));
}

TEST_CASE(sizes_have_binary_suffixes) {
  CHECK_EQ(parsed({{"BAGUA_NET_INLINE_BYTES", "0"}}).inline_bytes, 0);
  CHECK_EQ(parsed({{"BAGUA_NET_INLINE_BYTES", "65537"}}).inline_bytes, 65537);
  CHECK_EQ(parsed({{"BAGUA_NET_INLINE_BYTES", "3k"}}).inline_bytes, 3072);
  CHECK_EQ(parsed({{"BAGUA_NET_INLINE_BYTES", "2M"}}).inline_bytes, std::int64_t{2} << 20);
  CHECK_EQ(parsed({{"BAGUA_NET_INLINE_BYTES", "1G"}}).inline_bytes, std::int64_t{1} << 30);
  for (const char* bad : {"1073741825", "2G", "-1", "K", "64KB", "1.5M", "9223372036854775807K", "M1", "12 K"}) {
    CHECK_EQ(error_of({{"BAGUA_NET_INLINE_BYTES", bad}}),
             std::string("BAGUA_NET_INLINE_BYTES=") + bad +
                 ": must be a size in bytes from 0 to 1G (K, M and G are powers of 1024)");
  }
  CHECK(contains(error_of({{"BAGUA_NET_MAX_CHUNKSIZE", "1023"}}), "from 1K to 1G"));
  CHECK_EQ(parsed({{"BAGUA_NET_SOCKET_BUFFER", "0"}}).socket_buffer_bytes, 0);
  CHECK_EQ(parsed({{"BAGUA_NET_SOCKET_BUFFER", "64K"}}).socket_buffer_bytes, 65536);
  for (const char* bad : {"1", "4K", "65535", "2G", "-1"}) {
    CHECK(contains(error_of({{"BAGUA_NET_SOCKET_BUFFER", bad}}), "a size in bytes: 0, or from 64K to 1G"));
  }
}

TEST_CASE(choices) {
  CHECK(parsed({{"BAGUA_NET_CONGESTION_CONTROL", "Cubic"}}).congestion_control == CongestionControl::kCubic);
  CHECK(parsed({{"BAGUA_NET_CONGESTION_CONTROL", "system"}}).congestion_control == CongestionControl::kSystem);
  CHECK(parsed({{"BAGUA_NET_CONGESTION_CONTROL", "reno"}}).congestion_control == CongestionControl::kReno);
  CHECK_EQ(error_of({{"BAGUA_NET_CONGESTION_CONTROL", "vegas"}}),
           std::string("BAGUA_NET_CONGESTION_CONTROL=vegas: must be auto, system, cubic, reno or bbr"));
}

TEST_CASE(several_errors_are_all_listed) {
  const std::string message = error_of({{"BAGUA_NET_NSTREAMS", "many"},
                                        {"BAGUA_NET_RAILS", "17"},
                                        {"BAGUA_NET_KEEPALIVE_S", "3601"},
                                        {"BAGUA_NET_SPIN_US", "10"},
                                        {"BAGUA_NET_MIN_CHUNKSIZE", "1M"},
                                        {"BAGUA_NET_MAX_CHUNKSIZE", "64K"}});
  CHECK(contains(message, "BAGUA_NET_NSTREAMS=many: must be an integer from 1 to 64"));
  CHECK(contains(message, "; BAGUA_NET_RAILS=17: must be an integer from 1 to 16"));
  CHECK(contains(message, "; BAGUA_NET_KEEPALIVE_S=3601: must be an integer from 0 to 3600 (seconds)"));
  CHECK(contains(message, "; BAGUA_NET_MIN_CHUNKSIZE=1M: must not be larger than BAGUA_NET_MAX_CHUNKSIZE=64K"));
  CHECK(!contains(message, "BAGUA_NET_SPIN_US"));
}

TEST_CASE(chunk_sizes_must_fit_together) {
  CHECK_EQ(error_of({{"BAGUA_NET_MIN_CHUNKSIZE", "1048576"}}),
           std::string("BAGUA_NET_MIN_CHUNKSIZE=1M: must not be larger than BAGUA_NET_MAX_CHUNKSIZE=512K (the "
                       "default)"));
  CHECK(contains(error_of({{"BAGUA_NET_MAX_CHUNKSIZE", "8K"}}), "BAGUA_NET_MIN_CHUNKSIZE=64K (the default)"));
  const PluginConfig equal = parsed({{"BAGUA_NET_MIN_CHUNKSIZE", "1M"}, {"BAGUA_NET_MAX_CHUNKSIZE", "1M"}});
  CHECK_EQ(equal.min_chunk_bytes, equal.max_chunk_bytes);
  // An unreadable size is not compared: its default was never asked for.
  const std::string message = error_of({{"BAGUA_NET_MIN_CHUNKSIZE", "1M"}, {"BAGUA_NET_MAX_CHUNKSIZE", "x"}});
  CHECK(!contains(message, "larger"));
}

TEST_CASE(unknown_names_are_reported_with_the_nearest) {
  const auto one = [](const std::string& name) {
    const auto warnings = bagua_net::unknown_knob_warnings({name});
    CHECK_EQ(warnings.size(), std::size_t{1});
    CHECK_EQ(warnings[0].rfind(name + " ", 0), std::size_t{0});
    return warnings[0];
  };
  CHECK(contains(one("BAGUA_NET_STREAMS"), "Did you mean BAGUA_NET_NSTREAMS?"));
  CHECK(contains(one("BAGUA_NET_NSTREAM"), "Did you mean BAGUA_NET_NSTREAMS?"));
  CHECK(contains(one("BAGUA_NET_MIN_CHUNK_SIZE"), "Did you mean BAGUA_NET_MIN_CHUNKSIZE?"));
  CHECK(contains(one("BAGUA_NET_RIALS"), "Did you mean BAGUA_NET_RAILS?"));
  CHECK(contains(one("BAGUA_NET_ENABLE"), "Did you mean ENABLE_BAGUA_NET?"));
  CHECK(!contains(one("BAGUA_NET_COLOUR_OF_THE_SKY"), "Did you mean"));
  CHECK(!contains(one("BAGUA_NET_"), "Did you mean"));
}

TEST_CASE(known_and_foreign_names_are_not_reported) {
  std::vector<std::string> names = {"PATH", "NCCL_SOCKET_IFNAME", "MY_BAGUA_NET_STREAMS", "ENABLE_BAGUA_NE",
                                    "BAGUA_NE"};
  for (const auto& knob : bagua_net::knob_descriptions()) names.push_back(knob.name);
  CHECK_EQ(bagua_net::unknown_knob_warnings(names).size(), std::size_t{0});
}

TEST_CASE(retired_knobs_say_what_replaces_them) {
  for (const char* name : {"BAGUA_NET_IMPLEMENT", "BAGUA_NET_TOKIO_WORKER_THREADS", "BAGUA_NET_JAEGER_ADDRESS",
                           "BAGUA_NET_PROMETHEUS_ADDRESS"}) {
    const auto warnings = bagua_net::unknown_knob_warnings({name});
    CHECK_EQ(warnings.size(), std::size_t{1});
    CHECK(contains(warnings[0], std::string(name) + " has no effect in this version: "));
  }
  CHECK(contains(bagua_net::unknown_knob_warnings({"BAGUA_NET_TOKIO_WORKER_THREADS"})[0], "BAGUA_NET_NWORKERS"));
  // They may still be set to anything.
  CHECK(!parsed({{"BAGUA_NET_IMPLEMENT", "TOKIO"}}).streams);
}

TEST_CASE(the_process_environment_is_read) {
  CHECK_EQ(::setenv("BAGUA_NET_RAILS", "9", 1), 0);
  CHECK_EQ(::setenv("BAGUA_NET_NSTREAMZ", "9", 1), 0);
  PluginConfig config;
  CHECK_OK(bagua_net::parse_plugin_config(bagua_net::process_environment(), &config));
  CHECK_EQ(config.rails.value_or(-1), 9);
  const auto warnings = bagua_net::unknown_knob_warnings();
  ::unsetenv("BAGUA_NET_RAILS");
  ::unsetenv("BAGUA_NET_NSTREAMZ");
  CHECK_EQ(warnings.size(), std::size_t{1});
  CHECK(contains(warnings[0], "BAGUA_NET_NSTREAMZ is not a Bagua-Net setting"));
  CHECK(!bagua_net::process_environment()("BAGUA_NET_RAILS"));
}

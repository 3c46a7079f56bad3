// PluginConfig: every BAGUA_NET_* knob. One table (plugin_config.cc) holds name, type, default, range, unit and
// meaning; parsing, `bagua-net doctor` and docs/reference/settings.md are made from it. A bad value is an error that
// says what was given and what is allowed: never a silent default.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/congestion_control.h"
#include "base/status.h"
#include "base/text_parsing.h"
#include "config/fault_plan.h"

namespace bagua_net {

// Which network interfaces are one device of NCCL's, as BAGUA_NET_JOIN_NICS says.
struct JoinNics {
  bool is_auto = false;                          // all that NCCL_SOCKET_IFNAME selects
  std::vector<std::vector<std::string>> groups;  // names; each group is one device
};

// "off", "auto", or groups such as "eth0+eth1,eth2+eth3". Returns what the value must be, or "" after it filled *join.
std::string parse_join_nics(const std::string& text, JoinNics* join);

enum class Recovery { kAuto, kOn, kOff };
enum class Encryption { kOff, kOn, kChaCha20 };

struct PluginConfig {
  bool enabled = true;         // ENABLE_BAGUA_NET: 0 makes the library decline
  bool required = false;       // BAGUA_NET_REQUIRED: a failure to start is an error, not a fallback
  std::optional<int> streams;  // BAGUA_NET_NSTREAMS: TCP connections per comm; empty = as many as improve throughput
  std::optional<int> workers;  // BAGUA_NET_NWORKERS: I/O threads of this process; empty = auto
  std::optional<int> rails;    // BAGUA_NET_RAILS: devices that each NIC is shown as; empty = auto
  // BAGUA_NET_JOIN_NICS: interfaces that are one device; empty = those that NCCL_SOCKET_IFNAME lists
  std::optional<JoinNics> join_nics;
  std::int64_t inline_bytes = 65536;      // BAGUA_NET_INLINE_BYTES: up to this size the calling thread does the I/O
  std::int64_t min_chunk_bytes = 65536;   // BAGUA_NET_MIN_CHUNKSIZE: minimum chunk size per connection
  std::int64_t max_chunk_bytes = 524288;  // BAGUA_NET_MAX_CHUNKSIZE: maximum chunk size per connection
  int spin_us = 1000;                     // BAGUA_NET_SPIN_US: how long an idle worker polls before it sleeps
  int connect_timeout_ms = 60000;         // BAGUA_NET_CONNECT_TIMEOUT_MS: deadline of a whole connect
  int handshake_timeout_ms = 10000;       // BAGUA_NET_HANDSHAKE_TIMEOUT_MS: deadline of one connection's handshake
  int keepalive_s = 30;                   // BAGUA_NET_KEEPALIVE_S: time without a sign of life after which a comm fails
  int stall_s = 30;                       // BAGUA_NET_STALL_S: a request that waits so long is reported; 0: none is
  Recovery recovery = Recovery::kAuto;    // BAGUA_NET_RECOVERY: lost connections are replaced; auto = between hosts
  bool checksum = false;                  // BAGUA_NET_CHECKSUM: damaged data is noticed and sent again
  std::string secret_file;                // BAGUA_NET_SECRET_FILE: what all ranks know, in a file; "" = none
  Encryption encryption = Encryption::kOff;  // BAGUA_NET_ENCRYPTION: with the fastest cipher, or with ChaCha20-Poly1305
  bool zero_copy = true;                     // BAGUA_NET_ZERO_COPY: workers send large messages without copying them
  bool msg_zerocopy = false;                 // BAGUA_NET_MSG_ZEROCOPY: the same between hosts, where it saves copies
  bool stats = true;                         // BAGUA_NET_STATS: `bagua-net stats` can look at this process
  std::string trace;                         // BAGUA_NET_TRACE: the file for the trace; "" = none
  std::int64_t socket_buffer_bytes = 0;      // BAGUA_NET_SOCKET_BUFFER: 0 = the kernel's autotuning
  CongestionControl congestion_control = CongestionControl::kAuto;  // BAGUA_NET_CONGESTION_CONTROL
  FaultPlan faults;  // BAGUA_NET_FAULT: what this process does to its own connections, for tests
};

// The described default of a variable whose absence means something that no value does.
constexpr char kNotSet[] = "not set";

// One row of the knob table, as text, for the documentation and the doctor.
struct KnobDescription {
  std::string name;           // "BAGUA_NET_NSTREAMS"
  std::string type;           // "integer", "size", "boolean", "choice", "path", "interfaces", "fault plan"
  std::string default_value;  // "auto"; kNotSet
  std::string range;          // "1 to 64, or auto"
  std::string unit;           // "connections", "bytes", ""
  std::string meaning;        // one or two sentences
};

const std::vector<KnobDescription>& knob_descriptions();

EnvironmentReader process_environment();

// A setting with a value that means nothing.
struct InvalidSetting {
  std::string problem;  // variable, value and what is allowed
  std::string remedy;
};

// Fills *config and returns {}, or returns every invalid setting and leaves *config alone. A variable that is set to
// nothing ("X= command") counts as not set.
std::vector<InvalidSetting> read_plugin_config(const EnvironmentReader& environment, PluginConfig* config);
// The same, with all problems in one error.
Status parse_plugin_config(const EnvironmentReader& environment, PluginConfig* config);
// The setting that asks for a secret or for encryption, whatever its value is worth. nullptr: there is none.
const char* protection_asked_for(const EnvironmentReader& environment);

// A knob of the original bagua-net that has no effect any more.
struct RetiredKnob {
  std::string name;
  std::string replacement;  // what to do instead, as the rest of a sentence
};

const std::vector<RetiredKnob>& retired_knobs();

// One warning for each of these names that is a BAGUA_NET_* variable but not in the table: with the nearest known name
// if there is one, or with what replaces a retired knob. Other names are ignored.
std::vector<std::string> unknown_knob_warnings(const std::vector<std::string>& variable_names);
// The same for the variables of this process.
std::vector<std::string> unknown_knob_warnings();

// Whether the user has chosen what the plugin's tuner for NCCL chooses otherwise: channels, algorithm, protocol. The
// first such variable with its value, as "NCCL_ALGO=Tree"; empty: there is none, and the tuner chooses.
std::string tuning_choice(const EnvironmentReader& environment);

}  // namespace bagua_net

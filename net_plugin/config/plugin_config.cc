#include "config/plugin_config.h"

#include <strings.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "base/text_parsing.h"
#include "config/knob.h"

extern char** environ;

namespace bagua_net {

std::string parse_join_nics(const std::string& text, JoinNics* join) {
  std::string requirement =
      "off, auto, or groups of interface names joined by \"+\" and separated by commas, each name once, such as "
      "eth0+eth1,eth2+eth3";
  JoinNics parsed;
  parsed.is_auto = ::strcasecmp(text.c_str(), "auto") == 0;
  if (!parsed.is_auto && ::strcasecmp(text.c_str(), "off") != 0) {
    std::set<std::string_view> seen;
    for (const std::string_view part : split(text, ',')) {
      std::vector<std::string>& group = parsed.groups.emplace_back();
      for (const std::string_view name : split(part, '+')) {
        if (trimmed(name).empty() || !seen.insert(trimmed(name)).second) return requirement;
        group.emplace_back(trimmed(name));
      }
      if (group.size() < 2) return requirement;
    }
  }
  *join = std::move(parsed);
  return "";
}

namespace {

constexpr char kPrefix[] = "BAGUA_NET_";
constexpr char kMinChunkName[] = "BAGUA_NET_MIN_CHUNKSIZE";
constexpr char kSecretName[] = "BAGUA_NET_SECRET_FILE";
constexpr char kEncryptionName[] = "BAGUA_NET_ENCRYPTION";
constexpr char kMaxChunkName[] = "BAGUA_NET_MAX_CHUNKSIZE";

// Every setting once. Parsing, the doctor and the settings page of the documentation all read these rows.
const std::vector<Knob>& knob_table() {
  using Config = PluginConfig;
  static const std::vector<Knob> table = {
      with_meaningful_absence(boolean_knob(
          "ENABLE_BAGUA_NET", &Config::enabled,
          "1: Python processes load the plugin into NCCL when they import torch or bagua. 0: the plugin is off, and "
          "NCCL uses its own transport. Not set: the plugin is used only if NCCL itself is configured to load it, "
          "with NCCL_NET_PLUGIN or LD_LIBRARY_PATH.")),
      boolean_knob("BAGUA_NET_REQUIRED", &Config::required,
                   "1: If Bagua-Net cannot start, the job fails with the reason instead of falling back to NCCL's own "
                   "transport."),
      integer_or_auto_knob(
          "BAGUA_NET_NSTREAMS", &Config::streams, 1, 64, "connections",
          "Maximum number of TCP connections per comm (one direction of one channel between two ranks). Both ends use "
          "the smaller of their two values. auto: starts with one, or, if I/O threads drive them, with four, or two if "
          "a round trip takes a millisecond; between hosts more are tried, up to 16, and kept if that improves "
          "throughput."),
      integer_or_auto_knob("BAGUA_NET_NWORKERS", &Config::workers, 0, 64, "threads",
                           "I/O threads of this process, shared by all its comms. 0: NCCL's own thread does all I/O. "
                           "auto: derived from the CPUs available to this process and the number of ranks on this "
                           "host; of these threads, connections to other hosts use four, or one per 12.5 Gb/s of "
                           "the interface if that is more (eight if its speed is unknown), but no more than half of "
                           "the CPUs; with BAGUA_NET_ENCRYPTION six, or one per 8 Gb/s (ten if the "
                           "speed is unknown), and without AES twice as many; with joined interfaces half as many "
                           "again."),
      integer_or_auto_knob(
          "BAGUA_NET_RAILS", &Config::rails, 1, 16, "devices",
          "Number of NCCL devices per network interface. NCCL opens two channels per device, so this sets how many "
          "channels transfer data at the same time. auto: 4."),
      join_nics_knob(
          "BAGUA_NET_JOIN_NICS", &Config::join_nics,
          "Network interfaces that are one NCCL device, whose connections use all of them at the same time. "
          "eth0+eth1: these two. auto: all that NCCL_SOCKET_IFNAME selects; none if that is not set. off: none. Not "
          "set: auto where NCCL_SOCKET_IFNAME lists two or more names, as eth0,eth1 does, and NCCL is not told to join "
          "devices itself. Ranks may have different values."),
      size_knob(
          "BAGUA_NET_INLINE_BYTES", &Config::inline_bytes, 0, kGibibyte,
          "NCCL's own thread sends and receives messages up to this size while the I/O threads sleep, and messages up "
          "to a quarter of it while they are awake. 0: I/O threads handle every message."),
      size_knob(kMinChunkName, &Config::min_chunk_bytes, kKibibyte, kGibibyte,
                "Minimum chunk size per connection; twice as much within a host. Between hosts chunks have the "
                "maximum size, unless the network limits each connection or several interfaces are joined. Must not "
                "be larger than BAGUA_NET_MAX_CHUNKSIZE."),
      size_knob(kMaxChunkName, &Config::max_chunk_bytes, kKibibyte, kGibibyte, "Maximum chunk size per connection."),
      integer_knob("BAGUA_NET_SPIN_US", &Config::spin_us, 0, 1000000, "microseconds",
                   "How long an idle I/O thread polls for new work before it sleeps; if all its connections go to "
                   "other hosts, at most 200, and at most 20 while its usual wait is longer than that."),
      integer_knob(
          "BAGUA_NET_CONNECT_TIMEOUT_MS", &Config::connect_timeout_ms, 100, 3600000, "milliseconds",
          "Deadline for connecting to a peer, including retries. When it expires, the job fails with an error that "
          "names the peer. A rank that waits to be connected to has no deadline until its peer has begun."),
      integer_knob("BAGUA_NET_HANDSHAKE_TIMEOUT_MS", &Config::handshake_timeout_ms, 10, 3600000, "milliseconds",
                   "How long an accepted connection may take to authenticate as part of this job before it is "
                   "closed, and a listener to answer before its connection is opened again."),
      integer_knob("BAGUA_NET_KEEPALIVE_S", &Config::keepalive_s, 0, 3600, "seconds",
                   "Time without a response from a peer's host after which the comm fails. 0: never."),
      integer_knob(
          "BAGUA_NET_STALL_S", &Config::stall_s, 0, 3600, "seconds",
          "If an operation waits for a peer this long, one line of NCCL's log (NCCL_DEBUG=WARN) says for "
          "whom and what the kernel says of the connection; another says when it goes on. Ranks of a torch job "
          "also report to rank 0, which logs who holds the job up. 0: never."),
      choice_knob<Recovery>(
          "BAGUA_NET_RECOVERY", &Config::recovery,
          {{"auto", Recovery::kAuto}, {"1", Recovery::kOn}, {"0", Recovery::kOff}},
          "Replace lost connections and send again what they did not deliver. auto: between hosts. 0: the "
          "first lost connection fails the communicator."),
      boolean_knob("BAGUA_NET_CHECKSUM", &Config::checksum,
                   "1: Everything that is sent carries CRC-32C checksums. Data that arrives damaged is discarded, and "
                   "sent again over a new connection; without recovery, it fails the communicator. Both ends "
                   "of a connection use checksums if either asks for them."),
      path_knob(kSecretName, &Config::secret_file,
                "A file with a secret of at least 32 bytes, the same on every rank. It is part of the key of every "
                "handshake, so that someone who reads NCCL's bootstrap cannot join a connection. A file that every "
                "user may write is refused; one that every user may read, or its group may write, causes a warning. "
                "`bagua-net secret new` makes one."),
      choice_knob<Encryption>(
          kEncryptionName, &Config::encryption,
          {{"0", Encryption::kOff}, {"1", Encryption::kOn}, {"chacha20", Encryption::kChaCha20}},
          "1: All that the plugin sends is encrypted and authenticated (Noise NNpsk0), with AES-256-GCM where both "
          "CPUs "
          "have instructions for AES, and otherwise with ChaCha20-Poly1305. chacha20: always with the latter. Needs "
          "BAGUA_NET_SECRET_FILE. NCCL's bootstrap and torch's store are not covered."),
      boolean_knob("BAGUA_NET_ZERO_COPY", &Config::zero_copy,
                   "Within a host, I/O threads send messages above 512 KiB without copying them, if the kernel "
                   "supports it (vmsplice)."),
      boolean_knob(
          "BAGUA_NET_MSG_ZEROCOPY", &Config::msg_zerocopy,
          "1: Between hosts, too, I/O threads send messages above 512 KiB without copying them (MSG_ZEROCOPY), "
          "over connections whose first such send shows that the kernel does not copy after all. Not with "
          "BAGUA_NET_ENCRYPTION. It was not measured on a network card: docs/how-to/measure-network.md says "
          "how to see whether it saves CPU time."),
      boolean_knob("BAGUA_NET_STATS", &Config::stats,
                   "Other processes of the same user, and root, can read the statistics of this process: `bagua-net "
                   "stats`, `top` and `exporter`. 0: they cannot."),
      path_knob("BAGUA_NET_TRACE", &Config::trace,
                "Each process writes a trace of its messages, connections and collectives, for Perfetto, "
                "chrome://tracing and `bagua-net trace merge`. Its file has this name, with rank, host and process id "
                "before the extension, or where it contains %r, %h and %p. Files grow by some 200 bytes per message "
                "and chunk, up to 1 GiB."),
      // With smaller buffers TCP slows down to kilobytes per second.
      size_or_zero_knob("BAGUA_NET_SOCKET_BUFFER", &Config::socket_buffer_bytes, 64 * kKibibyte, kGibibyte,
                        "Size of the send and receive buffers of each connection. 0: the kernel's autotuning, which is "
                        "nearly always better."),
      choice_knob<CongestionControl>(
          "BAGUA_NET_CONGESTION_CONTROL", &Config::congestion_control,
          {{"auto", CongestionControl::kAuto},
           {"system", CongestionControl::kSystem},
           {"cubic", CongestionControl::kCubic},
           {"reno", CongestionControl::kReno},
           {"bbr", CongestionControl::kBbr}},
          "TCP congestion control of the plugin's connections. system: the kernel's setting. auto: "
          "cubic within a host, the kernel's setting between hosts."),
      fault_plan_knob("BAGUA_NET_FAULT", &Config::faults,
                      "For tests only: this process damages its own connections. cut: so many connections are closed "
                      "or reset per second. drop: so many go silent. delay: with this probability, a read or write "
                      "takes longer by this time. flip: the probability that a byte has one bit inverted. seed: the "
                      "number that all random choices depend on."),
  };
  return table;
}

std::optional<std::string> set_value(const EnvironmentReader& environment, const std::string& name) {
  const auto value = environment(name);
  if (!value) return std::nullopt;
  std::string text(trimmed(*value));
  if (text.empty()) return std::nullopt;
  return text;
}

bool is_knob_variable(const std::string& name) { return name.compare(0, sizeof kPrefix - 1, kPrefix) == 0; }

// Levenshtein distance, one row at a time.
std::size_t edit_distance(const std::string& left, const std::string& right) {
  std::vector<std::size_t> row(right.size() + 1);
  for (std::size_t j = 0; j <= right.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= left.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= right.size(); ++j) {
      const std::size_t substituted = diagonal + (left[i - 1] == right[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row.back();
}

std::vector<std::string_view> sorted_words(std::string_view name) {
  std::vector<std::string_view> words = split(name, '_');
  std::sort(words.begin(), words.end());
  return words;
}

// The known name that was probably meant, or "".
std::string nearest_knob(const std::string& name) {
  std::string nearest;
  // A third of what follows the prefix may differ: enough for typing errors, too little for unrelated words.
  std::size_t least = std::max<std::size_t>(2, (name.size() - (sizeof kPrefix - 1)) / 3) + 1;
  for (const Knob& knob : knob_table()) {
    const std::string& known = knob.description.name;
    // The same words in another order: BAGUA_NET_ENABLE for ENABLE_BAGUA_NET.
    if (sorted_words(known) == sorted_words(name)) return known;
    const std::size_t distance = edit_distance(name, known);
    if (distance >= least) continue;
    least = distance;
    nearest = known;
  }
  return nearest;
}

}  // namespace

const std::vector<KnobDescription>& knob_descriptions() {
  static const std::vector<KnobDescription> descriptions = [] {
    std::vector<KnobDescription> rows;
    for (const Knob& knob : knob_table()) rows.push_back(knob.description);
    return rows;
  }();
  return descriptions;
}

const std::vector<RetiredKnob>& retired_knobs() {
  static const std::vector<RetiredKnob> retired = {
      {"BAGUA_NET_IMPLEMENT", "there is only one engine"},
      {"BAGUA_NET_TOKIO_WORKER_THREADS", "set BAGUA_NET_NWORKERS instead"},
      {"BAGUA_NET_JAEGER_ADDRESS", "set BAGUA_NET_TRACE, which writes files for Perfetto"},
      {"BAGUA_NET_PROMETHEUS_ADDRESS",
       "ranks do not push metrics themselves; run `bagua-net exporter` on each host, which pushes to this address"},
  };
  return retired;
}

EnvironmentReader process_environment() {
  return [](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    if (value == nullptr) return std::nullopt;
    return std::string(value);
  };
}

std::vector<InvalidSetting> read_plugin_config(const EnvironmentReader& environment, PluginConfig* config) {
  PluginConfig parsed;
  std::vector<InvalidSetting> invalid;
  bool chunk_sizes_are_read = true;

  for (const Knob& knob : knob_table()) {
    const std::string& name = knob.description.name;
    const auto text = set_value(environment, name);
    if (!text) continue;
    const std::string requirement = knob.parse(*text, &parsed);
    if (requirement.empty()) continue;
    invalid.push_back({name + "=" + *text + ": must be " + requirement,
                       "Correct " + name + " or unset it. `bagua-net settings` lists the allowed values."});
    if (name == kMinChunkName || name == kMaxChunkName) chunk_sizes_are_read = false;
  }

  if (chunk_sizes_are_read && parsed.min_chunk_bytes > parsed.max_chunk_bytes) {
    const auto shown = [&environment](const std::string& name, std::int64_t bytes) {
      return name + "=" + size_text(bytes) + (set_value(environment, name) ? "" : " (the default)");
    };
    invalid.push_back({shown(kMinChunkName, parsed.min_chunk_bytes) + ": must not be larger than " +
                           shown(kMaxChunkName, parsed.max_chunk_bytes),
                       std::string("Lower ") + kMinChunkName + " or raise " + kMaxChunkName + "."});
  }
  if (parsed.encryption != Encryption::kOff && parsed.secret_file.empty()) {
    invalid.push_back({std::string(kEncryptionName) + "=" + set_value(environment, kEncryptionName).value_or("") +
                           ": needs a secret that all ranks share, and BAGUA_NET_SECRET_FILE is not set",
                       "Make a secret with `bagua-net secret new FILE`, and set BAGUA_NET_SECRET_FILE to it on every "
                       "rank."});
  }
  if (invalid.empty()) *config = std::move(parsed);
  return invalid;
}

const char* protection_asked_for(const EnvironmentReader& environment) {
  if (set_value(environment, kEncryptionName).value_or("0") != "0") return kEncryptionName;
  return set_value(environment, kSecretName) ? kSecretName : nullptr;
}

Status parse_plugin_config(const EnvironmentReader& environment, PluginConfig* config) {
  std::string problems;
  std::string remedies;
  for (const InvalidSetting& setting : read_plugin_config(environment, config)) {
    problems += (problems.empty() ? "" : "; ") + setting.problem;
    remedies += (remedies.empty() ? "" : " ") + setting.remedy;
  }
  if (problems.empty()) return Status::ok();
  return Status::invalid_usage(problems + "\n" + remedies);
}

std::vector<std::string> unknown_knob_warnings(const std::vector<std::string>& variable_names) {
  std::vector<std::string> warnings;
  for (const std::string& name : variable_names) {
    if (!is_knob_variable(name)) continue;
    const auto& known = knob_descriptions();
    if (std::any_of(known.begin(), known.end(), [&](const KnobDescription& knob) { return knob.name == name; })) {
      continue;
    }
    const auto& retired = retired_knobs();
    const auto old =
        std::find_if(retired.begin(), retired.end(), [&](const RetiredKnob& knob) { return knob.name == name; });
    if (old != retired.end()) {
      warnings.push_back(name + " has no effect in this version: " + old->replacement);
      continue;
    }
    const std::string nearest = nearest_knob(name);
    warnings.push_back(name + " is not a Bagua-Net setting and has no effect" +
                       (nearest.empty() ? "" : ". Did you mean " + nearest + "?"));
  }
  return warnings;
}

std::vector<std::string> unknown_knob_warnings() {
  std::vector<std::string> names;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string assignment = *entry;
    names.push_back(assignment.substr(0, assignment.find('=')));
  }
  std::sort(names.begin(), names.end());
  return unknown_knob_warnings(names);
}

namespace {

// With any of these the user has chosen. The names in RINGS are NCCL's older ones.
constexpr const char* kUsersChoices[] = {"NCCL_MIN_NCHANNELS",    "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS",
                                         "NCCL_MAX_CTAS",         "NCCL_MIN_NRINGS",    "NCCL_MAX_NRINGS",
                                         "NCCL_THREAD_THRESHOLDS"};
// With these, too, unless they only forbid what the policy never asks for: torch sets NCCL_ALGO=^NVLS in its
// deterministic mode, and NCCL_PROTO=^LL128 is a known remedy.
struct NamedChoice {
  const char* variable;
  std::vector<const char*> ours;
};
const NamedChoice kNamedChoices[] = {{"NCCL_ALGO", {"ring"}}, {"NCCL_PROTO", {"ll", "simple"}}};

// "^A,B" with neither of `ours`. NCCL's longer form, a list per collective, counts as a choice.
bool only_forbids_others(std::string_view value, const std::vector<const char*>& ours) {
  if (value.empty() || value.front() != '^' || value.find_first_of(":;") != std::string_view::npos) return false;
  for (const std::string_view name : split(value.substr(1), ',')) {
    for (const char* mine : ours) {
      if (strcasecmp(std::string(name).c_str(), mine) == 0) return false;
    }
  }
  return true;
}

}  // namespace

std::string tuning_choice(const EnvironmentReader& environment) {
  for (const char* name : kUsersChoices) {
    const std::optional<std::string> value = environment(name);
    if (value && !value->empty()) return std::string(name) + "=" + *value;
  }
  for (const NamedChoice& choice : kNamedChoices) {
    const std::optional<std::string> value = environment(choice.variable);
    if (value && !value->empty() && !only_forbids_others(*value, choice.ours)) {
      return std::string(choice.variable) + "=" + *value;
    }
  }
  PluginConfig config;
  const bool has_rails = parse_plugin_config(environment, &config).is_ok() && config.rails.has_value();
  return has_rails ? "BAGUA_NET_RAILS=" + std::to_string(*config.rails) : "";
}

}  // namespace bagua_net

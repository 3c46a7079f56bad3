#include "config/plugin_config.h"

#include <algorithm>
#include <cstdlib>

#include "config/knob.h"

extern char** environ;

namespace bagua_net {
namespace {

constexpr char kPrefix[] = "BAGUA_NET_";
constexpr char kMinChunkName[] = "BAGUA_NET_MIN_CHUNKSIZE";
constexpr char kMaxChunkName[] = "BAGUA_NET_MAX_CHUNKSIZE";

std::string trimmed(const std::string& text) {
  const auto begin = text.find_first_not_of(" \t\r\n");
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(" \t\r\n") - begin + 1);
}

// The table: every knob once. Parsing, the doctor and docs/knobs.md all read these rows.
const std::vector<Knob>& knob_table() {
  using Config = PluginConfig;
  static const std::vector<Knob> table = {
      with_meaningful_absence(boolean_knob(
          "ENABLE_BAGUA_NET", &Config::enabled,
          "1: Python processes hand NCCL the library when they import torch or bagua. 0: they do not, and the "
          "library declines if NCCL finds it, so that NCCL uses its own transport. Not set: no process hands "
          "it over by itself, but a library that NCCL was given works.")),
      boolean_knob("BAGUA_NET_REQUIRED", &Config::required,
                   "If Bagua-Net cannot start, the job fails with the reason instead of running on NCCL's own "
                   "transport."),
      integer_or_auto_knob(
          "BAGUA_NET_NSTREAMS", &Config::streams, 1, 64, "connections",
          "TCP connections that one comm (one direction of one channel between two ranks) may spread "
          "a message over. The two ends agree on the smaller number. auto: begins with one, or with four "
          "where I/O threads drive them; between hosts the number is doubled, up to 16, as long as that raises the "
          "throughput."),
      integer_or_auto_knob("BAGUA_NET_NWORKERS", &Config::workers, 0, 64, "threads",
                           "I/O threads of this process, shared by all its comms. 0: NCCL's own thread does all the "
                           "I/O. auto: from the CPUs that this process may use and the ranks on this host; connections "
                           "to other hosts then share four of them, or one for each 20 Gb/s of the interface."),
      integer_or_auto_knob(
          "BAGUA_NET_RAILS", &Config::rails, 1, 16, "devices",
          "Devices that each network interface is shown to NCCL as. NCCL opens two channels per "
          "device, so this sets how many channels move data at once. auto: 1 for an interface of up "
          "to 50 Gb/s, 4 for a faster one and where the speed is unknown, as on most virtual machines."),
      size_knob(
          "BAGUA_NET_INLINE_BYTES", &Config::inline_bytes, 0, kGibibyte,
          "Messages up to this size are written and read by NCCL's own thread while the I/O threads sleep; those that "
          "are awake take all above a quarter of it. 0: I/O threads take every message."),
      size_knob(kMinChunkName, &Config::min_chunk_bytes, kKibibyte, kGibibyte,
                "The least that one connection takes of a message at a time; within a host, twice as much. Must not be "
                "larger than BAGUA_NET_MAX_CHUNKSIZE."),
      size_knob(kMaxChunkName, &Config::max_chunk_bytes, kKibibyte, kGibibyte,
                "The most that one connection takes of a message at a time."),
      integer_knob("BAGUA_NET_SPIN_US", &Config::spin_us, 0, 1000000, "microseconds",
                   "How long an I/O thread that ran out of work keeps looking for more before it sleeps; at most 20 "
                   "if all its connections go to other hosts."),
      integer_knob("BAGUA_NET_CONNECT_TIMEOUT_MS", &Config::connect_timeout_ms, 100, 3600000, "milliseconds",
                   "Deadline for connecting to a peer, with all retries. After it the job gets an error that names "
                   "the peer."),
      integer_knob("BAGUA_NET_HANDSHAKE_TIMEOUT_MS", &Config::handshake_timeout_ms, 10, 3600000, "milliseconds",
                   "How long an accepted connection may take to prove that it belongs to this job before it is "
                   "closed."),
      integer_knob("BAGUA_NET_KEEPALIVE_S", &Config::keepalive_s, 0, 3600, "seconds",
                   "Time without a sign of life from a peer's host after which the comm fails. 0: never."),
      boolean_knob("BAGUA_NET_ZERO_COPY", &Config::zero_copy,
                   "Within a host, I/O threads let the kernel refer to messages above 512 KiB instead of copying them, "
                   "where it can do that (vmsplice)."),
      // With less, TCP itself moves kilobytes a second.
      size_or_zero_knob(
          "BAGUA_NET_SOCKET_BUFFER", &Config::socket_buffer_bytes, 64 * kKibibyte, kGibibyte,
          "Send and receive buffer of each connection. 0 leaves both to the kernel's autotuning, which is "
          "nearly always better."),
      choice_knob("BAGUA_NET_CONGESTION_CONTROL", &Config::congestion_control,
                  {{"auto", CongestionControl::kAuto},
                   {"system", CongestionControl::kSystem},
                   {"cubic", CongestionControl::kCubic},
                   {"reno", CongestionControl::kReno},
                   {"bbr", CongestionControl::kBbr}},
                  "TCP congestion control of our connections. system: the kernel's setting. auto: "
                  "cubic between processes of one host, the kernel's setting between hosts."),
  };
  return table;
}

std::optional<std::string> set_value(const EnvironmentReader& environment, const std::string& name) {
  const auto value = environment(name);
  if (!value) return std::nullopt;
  std::string text = trimmed(*value);
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

std::vector<std::string> sorted_words(const std::string& name) {
  std::vector<std::string> words(1);
  for (const char letter : name) {
    if (letter == '_') {
      words.emplace_back();
    } else {
      words.back() += letter;
    }
  }
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
      {"BAGUA_NET_IMPLEMENT", "there is one engine now, and nothing to choose"},
      {"BAGUA_NET_TOKIO_WORKER_THREADS", "set BAGUA_NET_NWORKERS instead"},
      {"BAGUA_NET_JAEGER_ADDRESS", "nothing is sent to a tracing server any more; NCCL_DEBUG=INFO logs what happens"},
      {"BAGUA_NET_PROMETHEUS_ADDRESS",
       "nothing is sent to a metrics server any more; NCCL_DEBUG=INFO logs what happens"},
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

Status parse_plugin_config(const EnvironmentReader& environment, PluginConfig* config) {
  PluginConfig parsed;
  std::string errors;
  const auto add_error = [&errors](const std::string& error) { errors += (errors.empty() ? "" : "; ") + error; };
  bool chunk_sizes_are_read = true;

  for (const Knob& knob : knob_table()) {
    const std::string& name = knob.description.name;
    const auto text = set_value(environment, name);
    if (!text) continue;
    const std::string requirement = knob.parse(*text, &parsed);
    if (requirement.empty()) continue;
    add_error(name + "=" + *text + ": must be " + requirement);
    if (name == kMinChunkName || name == kMaxChunkName) chunk_sizes_are_read = false;
  }

  if (chunk_sizes_are_read && parsed.min_chunk_bytes > parsed.max_chunk_bytes) {
    const auto shown = [&environment](const std::string& name, std::int64_t bytes) {
      return name + "=" + size_text(bytes) + (set_value(environment, name) ? "" : " (the default)");
    };
    add_error(shown(kMinChunkName, parsed.min_chunk_bytes) + ": must not be larger than " +
              shown(kMaxChunkName, parsed.max_chunk_bytes) + ", lower the one or raise the other");
  }

  if (!errors.empty()) return Status::invalid_usage(errors);
  *config = parsed;
  return Status::ok();
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
      warnings.push_back(name + " is accepted but has no effect now: " + old->replacement);
      continue;
    }
    const std::string nearest = nearest_knob(name);
    warnings.push_back(name + " is not a Bagua-Net variable and has no effect" +
                       (nearest.empty() ? "" : "; did you mean " + nearest + "?"));
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

}  // namespace bagua_net

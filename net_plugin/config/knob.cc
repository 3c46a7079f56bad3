#include "config/knob.h"

#include <algorithm>
#include <cctype>
#include <type_traits>

#include "base/text_parsing.h"

namespace bagua_net {
namespace {

std::string lowered(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char letter) { return static_cast<char>(std::tolower(letter)); });
  return text;
}

// "65536", "64K", "2m": K, M and G are powers of 1024.
std::optional<std::int64_t> parse_size(std::string text) {
  std::int64_t factor = 1;
  if (!text.empty()) {
    switch (text.back()) {
      case 'k':
      case 'K': factor = kKibibyte; break;
      case 'm':
      case 'M': factor = kMebibyte; break;
      case 'g':
      case 'G': factor = kGibibyte; break;
      default: break;
    }
  }
  if (factor != 1) text.pop_back();
  const auto number = parse_number<std::int64_t>(text);
  std::int64_t bytes = 0;
  if (!number || __builtin_mul_overflow(*number, factor, &bytes)) return std::nullopt;
  return bytes;
}

const PluginConfig& defaults() {
  static const PluginConfig config;
  return config;
}

}  // namespace

std::string size_text(std::int64_t bytes) {
  if (bytes != 0 && bytes % kGibibyte == 0) return std::to_string(bytes / kGibibyte) + "G";
  if (bytes != 0 && bytes % kMebibyte == 0) return std::to_string(bytes / kMebibyte) + "M";
  if (bytes != 0 && bytes % kKibibyte == 0) return std::to_string(bytes / kKibibyte) + "K";
  return std::to_string(bytes);
}

Knob boolean_knob(std::string name, bool PluginConfig::* member, std::string meaning) {
  auto parse = [member](const std::string& text, PluginConfig* config) -> std::string {
    const std::string word = lowered(text);
    const bool yes = word == "1" || word == "true" || word == "yes" || word == "on";
    const bool no = word == "0" || word == "false" || word == "no" || word == "off";
    if (!yes && !no) return "1, true, yes or on, or else 0, false, no or off";
    config->*member = yes;
    return "";
  };
  return {{std::move(name), "boolean", defaults().*member ? "1" : "0", "0 or 1 (also false/true, no/yes, off/on)", "",
           std::move(meaning)},
          std::move(parse)};
}

namespace {

// Member: int, or an optional int that "auto" leaves empty.
template <typename Member>
Knob any_integer_knob(std::string name, Member PluginConfig::* member, int minimum, int maximum, std::string unit,
                      std::string meaning) {
  constexpr bool kHasAuto = !std::is_same_v<Member, int>;
  std::string range = std::to_string(minimum) + " to " + std::to_string(maximum);
  std::string requirement = "an integer from " + range;
  if (kHasAuto) {
    requirement += ", or \"auto\"";
  } else if (!unit.empty()) {
    requirement += " (" + unit + ")";
  }
  auto parse = [=](const std::string& text, PluginConfig* config) -> std::string {
    if (kHasAuto && lowered(text) == "auto") {
      config->*member = {};
      return "";
    }
    const auto number = parse_number<std::int64_t>(text);
    if (!number || *number < minimum || *number > maximum) return requirement;
    config->*member = static_cast<int>(*number);
    return "";
  };
  const std::optional<int> initial = defaults().*member;
  if (kHasAuto) range += ", or auto";
  return {{std::move(name), "integer", initial ? std::to_string(*initial) : "auto", std::move(range), std::move(unit),
           std::move(meaning)},
          std::move(parse)};
}

}  // namespace

Knob integer_knob(std::string name, int PluginConfig::* member, int minimum, int maximum, std::string unit,
                  std::string meaning) {
  return any_integer_knob(std::move(name), member, minimum, maximum, std::move(unit), std::move(meaning));
}

Knob integer_or_auto_knob(std::string name, std::optional<int> PluginConfig::* member, int minimum, int maximum,
                          std::string unit, std::string meaning) {
  return any_integer_knob(std::move(name), member, minimum, maximum, std::move(unit), std::move(meaning));
}

namespace {

Knob ranged_size_knob(std::string name, std::int64_t PluginConfig::* member, std::int64_t minimum, std::int64_t maximum,
                      bool or_zero, std::string meaning) {
  const std::string range = (or_zero ? "0, or " : "") + size_text(minimum) + " to " + size_text(maximum);
  std::string requirement = "a size in bytes" + (or_zero ? ": 0, or from " : std::string(" from ")) +
                            size_text(minimum) + " to " + size_text(maximum) + " (K, M and G are powers of 1024)";
  auto parse = [=, requirement = std::move(requirement)](const std::string& text, PluginConfig* config) -> std::string {
    const auto bytes = parse_size(text);
    const bool is_zero = or_zero && bytes && *bytes == 0;
    if (!bytes || (!is_zero && (*bytes < minimum || *bytes > maximum))) return requirement;
    config->*member = *bytes;
    return "";
  };
  return {{std::move(name), "size", size_text(defaults().*member), range, "bytes", std::move(meaning)},
          std::move(parse)};
}

}  // namespace

Knob size_knob(std::string name, std::int64_t PluginConfig::* member, std::int64_t minimum, std::int64_t maximum,
               std::string meaning) {
  return ranged_size_knob(std::move(name), member, minimum, maximum, false, std::move(meaning));
}

Knob size_or_zero_knob(std::string name, std::int64_t PluginConfig::* member, std::int64_t minimum,
                       std::int64_t maximum, std::string meaning) {
  return ranged_size_knob(std::move(name), member, minimum, maximum, true, std::move(meaning));
}

template <typename Choice>
Knob choice_knob(std::string name, Choice PluginConfig::* member, std::vector<std::pair<std::string, Choice>> choices,
                 std::string meaning) {
  std::string range;
  std::string initial;
  for (std::size_t i = 0; i < choices.size(); ++i) {
    if (i > 0) range += i + 1 == choices.size() ? " or " : ", ";
    range += choices[i].first;
    if (choices[i].second == defaults().*member) initial = choices[i].first;
  }
  auto parse = [member, range, choices = std::move(choices)](const std::string& text,
                                                             PluginConfig* config) -> std::string {
    for (const auto& [word, value] : choices) {
      if (lowered(text) != word) continue;
      config->*member = value;
      return "";
    }
    return range;
  };
  return {{std::move(name), "choice", std::move(initial), range, "", std::move(meaning)}, std::move(parse)};
}

template Knob choice_knob(std::string, CongestionControl PluginConfig::*,
                          std::vector<std::pair<std::string, CongestionControl>>, std::string);
template Knob choice_knob(std::string, Encryption PluginConfig::*, std::vector<std::pair<std::string, Encryption>>,
                          std::string);
template Knob choice_knob(std::string, Recovery PluginConfig::*, std::vector<std::pair<std::string, Recovery>>,
                          std::string);

Knob path_knob(std::string name, std::string PluginConfig::* member, std::string meaning) {
  auto parse = [member](const std::string& text, PluginConfig* config) -> std::string {
    config->*member = text;
    return "";
  };
  return {{std::move(name), "path", kNotSet, "a file name", "", std::move(meaning)}, std::move(parse)};
}

Knob join_nics_knob(std::string name, std::optional<JoinNics> PluginConfig::* member, std::string meaning) {
  auto parse = [member](const std::string& text, PluginConfig* config) -> std::string {
    return parse_join_nics(text, &(config->*member).emplace());
  };
  return {{std::move(name), "interfaces", kNotSet, "off, auto, or groups such as eth0+eth1,eth2+eth3", "",
           std::move(meaning)},
          std::move(parse)};
}

Knob fault_plan_knob(std::string name, FaultPlan PluginConfig::* member, std::string meaning) {
  auto parse = [member](const std::string& text, PluginConfig* config) -> std::string {
    return parse_fault_plan(lowered(text), &(config->*member));
  };
  return {{std::move(name), "fault plan", kNotSet, "such as seed=7,cut=1/s,delay=5ms@0.01,flip=1e-6", "",
           std::move(meaning)},
          std::move(parse)};
}

Knob with_meaningful_absence(Knob knob) {
  knob.description.default_value = kNotSet;
  return knob;
}

}  // namespace bagua_net

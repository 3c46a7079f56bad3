// Knob: one row of the knob table, and the kinds of values that a row can have. Only plugin_config.cc, which holds the
// table, includes this.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "config/plugin_config.h"

namespace bagua_net {

constexpr std::int64_t kKibibyte = 1024;
constexpr std::int64_t kMebibyte = 1024 * kKibibyte;
constexpr std::int64_t kGibibyte = 1024 * kMebibyte;

// Returns what the value must be ("an integer from 1 to 64"), or "" after it stored the value.
using KnobParser = std::function<std::string(const std::string& text, PluginConfig* config)>;

struct Knob {
  KnobDescription description;
  KnobParser parse;
};

// Each makes a row that stores its value in `member`. The default that it describes is the member's own in a default
// PluginConfig, and the range the one that it checks, so that the documentation cannot name another.
Knob boolean_knob(std::string name, bool PluginConfig::* member, std::string meaning);
Knob integer_knob(std::string name, int PluginConfig::* member, int minimum, int maximum, std::string unit,
                  std::string meaning);
Knob integer_or_auto_knob(std::string name, std::optional<int> PluginConfig::* member, int minimum, int maximum,
                          std::string unit, std::string meaning);
Knob size_knob(std::string name, std::int64_t PluginConfig::* member, std::int64_t minimum, std::int64_t maximum,
               std::string meaning);
Knob size_or_zero_knob(std::string name, std::int64_t PluginConfig::* member, std::int64_t minimum,
                       std::int64_t maximum, std::string meaning);
template <typename Choice>
Knob choice_knob(std::string name, Choice PluginConfig::* member, std::vector<std::pair<std::string, Choice>> choices,
                 std::string meaning);
// A file. Absence means none, which no value does.
Knob path_knob(std::string name, std::string PluginConfig::* member, std::string meaning);
Knob join_nics_knob(std::string name, std::optional<JoinNics> PluginConfig::* member, std::string meaning);
Knob fault_plan_knob(std::string name, FaultPlan PluginConfig::* member, std::string meaning);

// The row of a variable whose absence means something that no value does: "not set" is described as its default.
Knob with_meaningful_absence(Knob knob);

// The shortest exact spelling of a size that a size knob reads back: 65536 is "64K", 65537 is "65537".
std::string size_text(std::int64_t bytes);

}  // namespace bagua_net

#include "config/tuning_choice.h"

#include <strings.h>

#include <optional>
#include <string_view>
#include <vector>

#include "base/text_parsing.h"
#include "config/plugin_config.h"

namespace bagua_net {
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

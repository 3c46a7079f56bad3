// Environment variables that are not those of this process.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "base/text_parsing.h"

namespace bagua_net {

using Variables = std::map<std::string, std::string>;

inline EnvironmentReader reader(const Variables& variables) {
  return [variables](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional<std::string>(found->second);
  };
}

}  // namespace bagua_net

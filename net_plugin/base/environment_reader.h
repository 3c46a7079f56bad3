// EnvironmentReader: reads one variable; nullopt = not set. Tests pass their own.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace bagua_net {

using EnvironmentReader = std::function<std::optional<std::string>(const std::string& name)>;

}  // namespace bagua_net

#include "config/join_nics.h"

#include <strings.h>

#include <set>
#include <string_view>
#include <utility>

#include "base/text_parsing.h"

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

}  // namespace bagua_net

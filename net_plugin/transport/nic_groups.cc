#include "transport/nic_groups.h"

#include <algorithm>
#include <utility>

namespace bagua_net {
namespace {

constexpr char kName[] = "BAGUA_NET_JOIN_NICS";

std::string names_of(const std::vector<NetworkInterface>& interfaces) {
  std::string names;
  for (const NetworkInterface& interface : interfaces) names += (names.empty() ? "" : ", ") + interface.name;
  return names;
}

// Whether the user has named an interface in full: for "auto", in a list of exact names. A prefix may match others by
// chance, such as a bridge without ports.
bool is_to_join(const JoinNics& join, const std::string& filter, const std::string& name) {
  for (const std::vector<std::string>& group : join.groups) {
    if (std::find(group.begin(), group.end(), name) != group.end()) return true;
  }
  return join.is_auto && filter.substr(0, 1) == "=" &&
         ("," + filter.substr(1) + ",").find("," + name + ",") != std::string::npos;
}

}  // namespace

std::string why_not_joined(const NicGroup& group, const NetworkInterface& interface) {
  const NetworkInterface& first = group.front();
  if (interface.is_loopback || first.is_loopback) return "a loopback interface cannot be joined";
  if (interface.address.family() != first.address.family()) {
    return "the addresses of " + first.name + " and " + interface.name + " are of different families";
  }
  return "";
}

Status group_interfaces(const JoinNics& join, const std::vector<NetworkInterface>& interfaces, bool is_selected,
                        std::vector<NicGroup>* groups, std::vector<std::string>* lost) {
  groups->clear();
  lost->clear();
  const auto find = [&](const std::string& name) {
    return std::find_if(interfaces.begin(), interfaces.end(), [&](const auto& other) { return other.name == name; });
  };
  // The group of each interface; -1: it is alone.
  std::vector<int> group_of(interfaces.size(), -1);
  for (std::size_t number = 0; number < join.groups.size(); ++number) {
    std::string missing;
    std::size_t found = 0;
    for (const std::string& name : join.groups[number]) {
      const auto interface = find(name);
      if (interface == interfaces.end()) {
        missing += (missing.empty() ? "" : ", ") + name;
        continue;
      }
      group_of[static_cast<std::size_t>(interface - interfaces.begin())] = static_cast<int>(number);
      ++found;
    }
    if (missing.empty()) continue;
    std::string said = std::string(kName) + " names " + missing + ", and NCCL uses " + names_of(interfaces);
    if (found == 0) {
      return Status::invalid_usage(said + " on this host.\nName interfaces that NCCL_SOCKET_IFNAME selects, or unset " +
                                   kName + ".");
    }
    said += " on this host: ";
    lost->push_back(said + (found > 1 ? "joined without" : "nothing is joined"));
  }
  if (join.is_auto && is_selected) group_of.assign(interfaces.size(), 0);
  if (join.is_auto && !is_selected && interfaces.size() > 1) {
    lost->push_back(std::string(kName) + "=auto joins only what NCCL_SOCKET_IFNAME selects, and that is not set: " +
                    names_of(interfaces) + " are a device each");
  }

  std::vector<int> number_of;  // of each group that was begun
  for (std::size_t index = 0; index < interfaces.size(); ++index) {
    const NetworkInterface& interface = interfaces[index];
    const auto begun = std::find(number_of.begin(), number_of.end(), group_of[index]);
    if (group_of[index] >= 0 && begun != number_of.end()) {
      NicGroup& group = (*groups)[static_cast<std::size_t>(begun - number_of.begin())];
      const std::string why = why_not_joined(group, interface);
      if (why.empty()) {
        group.push_back(interface);
        continue;
      }
      lost->push_back(std::string(kName) + ": " + interface.name + " is a device of its own, because " + why);
      group_of[index] = -1;
    }
    groups->push_back({interface});
    number_of.push_back(group_of[index]);
  }
  return Status::ok();
}

Status group_interfaces(const JoinNics& join, const std::vector<InterfaceChoice>& choices,
                        const EnvironmentReader& environment, std::vector<NicGroup>* groups,
                        std::vector<std::string>* lost) {
  std::vector<NetworkInterface> used;
  for (const InterfaceChoice& choice : choices) {
    if (choice.used) used.push_back(choice.interface);
  }
  const std::string filter = environment("NCCL_SOCKET_IFNAME").value_or("");
  // NCCL does not heed a shorter one.
  const bool is_selected = filter.size() > 1;
  BAGUA_NET_RETURN_IF_ERROR(group_interfaces(join, used, is_selected, groups, lost));
  for (const InterfaceChoice& choice : choices) {
    const std::string& name = choice.interface.name;
    if (!choice.used && is_to_join(join, filter, name)) {
      lost->push_back(name + " is not joined, also if that changes before the job ends: " + choice.reason);
    }
  }
  return Status::ok();
}

}  // namespace bagua_net

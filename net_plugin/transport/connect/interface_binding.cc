#include "transport/connect/interface_binding.h"

#include "os/local_address.h"

namespace bagua_net {

bool InterfaceBinding::is_to_be_bound(const JoinTicket& ticket, const NicPath& path) const {
  if (settings_.recovery == Recovery::kOff || left_.count(path.interface.name) != 0) return false;
  if (is_joining(ticket.hello.stream_index) && ticket.hello.stream_index != kJoiningStream) return false;
  return leaves_elsewhere(path.address, path.interface);
}

void InterfaceBinding::on_unbound(const NicPath& path) {
  const std::string& name = path.interface.name;
  if (!left_.insert(name).second) return;
  log_->add(LogLevel::kWarn, name,
            "Bagua-Net: " + path.address.host() + " cannot be reached over " + name + " (" +
                path.interface.address.host() +
                "): the connection leaves by another interface, and shares its bandwidth. Give " + name +
                " a route to that network, or leave it out of NCCL_SOCKET_IFNAME. If both interfaces are in one "
                "subnet, set net.ipv4.conf.all.arp_ignore=1 and arp_announce=2 on every host");
}

}  // namespace bagua_net

#include "transport/connect/opened_comms.h"

#include <iterator>

namespace bagua_net {

void OpenedComms::add(const JoinTicket& ticket, const std::shared_ptr<StreamArrivals>& arrivals) {
  for (auto comm = comms_.begin(); comm != comms_.end();) {
    comm = comm->second.arrivals.expired() ? comms_.erase(comm) : std::next(comm);
  }
  comms_[ticket.hello.comm_id] = {ticket.hello.listen_id, ticket.key, arrivals};
}

bool OpenedComms::has(const RandomId& comm_id) const {
  const auto found = comms_.find(comm_id);
  if (found == comms_.end()) return false;
  const std::shared_ptr<StreamArrivals> arrivals = found->second.arrivals.lock();
  return arrivals != nullptr && !arrivals->is_closed();
}

HandshakeKeyRef OpenedComms::find_key(const RandomId& listen_id) const {
  for (const auto& [comm_id, comm] : comms_) {
    if (comm.listen_id == listen_id) return comm.key;
  }
  return nullptr;
}

}  // namespace bagua_net

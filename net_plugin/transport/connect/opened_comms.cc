#include "transport/connect/opened_comms.h"

#include <iterator>

namespace bagua_net {

void OpenedComms::add(const RandomId& comm_id, const std::shared_ptr<StreamArrivals>& arrivals) {
  for (auto comm = comms_.begin(); comm != comms_.end();) {
    comm = comm->second.expired() ? comms_.erase(comm) : std::next(comm);
  }
  comms_[comm_id] = arrivals;
}

bool OpenedComms::has(const RandomId& comm_id) const {
  const auto found = comms_.find(comm_id);
  if (found == comms_.end()) return false;
  const std::shared_ptr<StreamArrivals> arrivals = found->second.lock();
  return arrivals != nullptr && !arrivals->is_closed();
}

}  // namespace bagua_net

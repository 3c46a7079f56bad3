// OpenedComms: the comms that connect() has returned, for peers that have lost all connections of one and ask whether
// it is still there. Not thread-safe: the connection service's mutex guards every call.
#pragma once

#include <map>
#include <memory>

#include "transport/connect/stream_arrivals.h"
#include "wire/connect_handle.h"

namespace bagua_net {

class OpenedComms {
 public:
  // Remembers a comm, and forgets those that are gone. arrivals: its own; expire with it.
  void add(const RandomId& comm_id, const std::shared_ptr<StreamArrivals>& arrivals);
  // It is here, and neither closed nor failed.
  bool has(const RandomId& comm_id) const;
  // It is or was here.
  bool knows(const RandomId& comm_id) const { return comms_.count(comm_id) != 0; }

 private:
  std::map<RandomId, std::weak_ptr<StreamArrivals>> comms_;
};

}  // namespace bagua_net

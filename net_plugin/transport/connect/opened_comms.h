// OpenedComms: the comms that connect() has returned, for peers that have lost all connections of one and ask whether
// it is still there. Not thread-safe: the connection service's mutex guards every call.
#pragma once

#include <map>
#include <memory>

#include "transport/connect/established_connection.h"
#include "transport/connect/stream_arrivals.h"
#include "wire/handshake_key.h"

namespace bagua_net {

class OpenedComms {
 public:
  // Remembers a comm, and forgets those that are gone. arrivals: its own; expire with it.
  void add(const JoinTicket& ticket, const std::shared_ptr<StreamArrivals>& arrivals);
  // It is here, and neither closed nor failed.
  bool has(const RandomId& comm_id) const;
  // It is or was here.
  bool knows(const RandomId& comm_id) const { return comms_.count(comm_id) != 0; }
  // The key of the handshakes of the comm with this listen. nullptr: it is not here.
  HandshakeKeyRef find_key(const RandomId& listen_id) const;

 private:
  struct Opened {
    RandomId listen_id{};
    HandshakeKeyRef key;
    std::weak_ptr<StreamArrivals> arrivals;
  };
  std::map<RandomId, Opened> comms_;  // by comm id
};

}  // namespace bagua_net

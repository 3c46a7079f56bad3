// AcceptedComms: the comms that accept() has returned, and which further connections they may get: more streams,
// replacements of lost ones, and first streams that come again because the reply to them was lost. Not thread-safe: the
// connection service's mutex guards every call.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "crypto/cipher_state.h"
#include "transport/connect/established_connection.h"
#include "transport/connect/handshake_settings.h"
#include "transport/connect/stream_arrivals.h"
#include "wire/handshake_message.h"

namespace bagua_net {

// OpenedComms: the comms that connect() has returned, for peers that have lost all connections of one and ask whether
// it is still there. Not thread-safe: the connection service's mutex guards every call.
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

// The reply to a proven hello, and if it is accepted, where the socket goes once the reply is sent.
struct Admission {
  Reply reply;
  KeyedSocket* place = nullptr;              // in a connection that is being assembled
  std::shared_ptr<StreamArrivals> arrivals;  // of a comm in use
  Joining joining = Joining::kMore;
};

class AcceptedComms {
 public:
  explicit AcceptedComms(const HandshakeSettings& settings) : settings_(settings) {}

  // Remembers a comm, and forgets those that are gone. reply: to its first streams. serials: of the hellos of its
  // streams, of which there are as many as the reply says. arrivals: its own; expire with it.
  void add(const RandomId& comm_id, const RandomId& listen_id, HandshakeKeyRef key, const Reply& reply,
           std::vector<std::uint32_t> serials, const std::shared_ptr<StreamArrivals>& arrivals);

  // The key that the sender of this hello has to prove. nullptr: the hello names none of these comms.
  HandshakeKeyRef find_key(const Hello& hello) const;
  // The same for a sealed hello, of which only the listen id is known. Each listen has one comm.
  HandshakeKeyRef find_key_of_listen(const RandomId& listen_id) const;
  // The sender has proved it.
  HandshakeVerdict admit(const Hello& hello, Admission* admission);

 private:
  struct Accepted {
    HandshakeKeyRef key;
    RandomId comm_id{};
    Reply reply;
    std::vector<std::uint32_t> serials;  // of the last hellos of its first streams
    std::uint64_t returned = 0;          // a bit for each first stream that came again
    std::weak_ptr<StreamArrivals> arrivals;
  };

  const HandshakeSettings& settings_;
  // By listen id, which is this process's own random number. Its peer chooses the comm id: another comm may have it,
  // too.
  std::map<RandomId, Accepted> comms_;
};

}  // namespace bagua_net

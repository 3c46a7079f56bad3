// PeerProbe: asks a sender's process whether it still has a comm, when the receiver has no connection of that comm
// left. A process that has ended refuses the connection. If the network is down, there is no answer. Otherwise the
// process says whether it still has the comm. The question is the start of a handshake (kAskingStream), which the
// connection thread of that process answers. Owned by the receiving comm, and guarded by its mutex.
#pragma once

#include <cstdint>
#include <utility>

#include "os/socket_address.h"
#include "os/tcp_socket.h"
#include "transport/connect/connector_handshake.h"
#include "wire/handshake_key.h"
#include "wire/handshake_message.h"

namespace bagua_net {

// Whom to ask, and about which comm. Port 0: nobody listens there.
struct PeerContact {
  SocketAddress address;
  Hello hello;
  HandshakeKeyRef key;
};

enum class PeerAnswer {
  kNone,        // not yet
  kUnanswered,  // the network or the host is down, or the process is stopped
  kRefused,     // nobody listens there: the process has ended, or a device on the path refuses
  kGone,        // the process is alive, and its comm is closed or has failed
  kAlive,       // it has the comm
};

class PeerProbe {
 public:
  explicit PeerProbe(PeerContact contact) : contact_(std::move(contact)) {}

  bool can_ask() const { return contact_.address.port() != 0; }
  // The last answer; asks again when it is time. Never blocks.
  PeerAnswer ask(std::int64_t now_ms);
  // Discards the last answer.
  void forget();

 private:
  PeerAnswer look(std::int64_t now_ms);

  const PeerContact contact_;
  OwnedFd socket_;  // of the question that is under way
  bool is_connected_ = false;
  ConnectorHandshake handshake_;
  std::int64_t due_ms_ = 0;  // of the answer, or without a socket of the next question
  PeerAnswer last_ = PeerAnswer::kNone;
};

}  // namespace bagua_net

// PeerProbe: asks a sender's process whether it still has a comm, where the receiver has reason to doubt it. A process
// that has ended refuses the connection. If the network is down, there is no answer. Otherwise the process says whether
// it still has the comm. The question is the start of a handshake (kAskingStream), which the connection thread of that
// process answers. It is asked at every address from which the comm has had a connection: one of them may be dead.
// Owned by the receiving comm, and guarded by its mutex.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "os/socket_address.h"
#include "os/tcp_socket.h"
#include "transport/connect/handshake_ends.h"
#include "wire/handshake_message.h"

namespace bagua_net {

// Whom to ask, and about which comm.
struct PeerContact {
  std::vector<SocketAddress> addresses;  // one for each host address; none: nobody listens there
  Hello hello;
  HandshakeKeyRef key;

  // That of a connection, with the port of its hello; 0: nobody listens there.
  void add(const SocketAddress& address);
};

enum class PeerAnswer {
  kNone,        // not yet
  kUnanswered,  // the network or the host is down, or the process is stopped
  // Neither is proven: a device on the path may refuse, or whoever has the port now may answer. So both have to last.
  kRefused,  // nobody listens there: the process has ended
  kGone,     // the process is alive, and its comm is closed or has failed
  kAlive,    // it has the comm
};

class PeerProbe {
 public:
  explicit PeerProbe(PeerContact contact) : contact_(std::move(contact)) {}

  bool can_ask() const { return !contact_.addresses.empty(); }
  void add(const SocketAddress& address) { contact_.add(address); }
  // The last answers, of which that of the process counts most, then a refusal; asks again when it is time. Never
  // blocks.
  PeerAnswer ask(std::int64_t now_ms);
  // Discards the last answers.
  void forget() { questions_.clear(); }

 private:
  // At one address.
  struct Question {
    OwnedFd socket;  // of the question that is under way
    bool is_connected = false;
    ConnectorHandshake handshake;
    std::int64_t due_ms = 0;  // of the answer, or without a socket of the next question
    PeerAnswer last = PeerAnswer::kNone;
  };
  void ask_at(const SocketAddress& address, Question& question, std::int64_t now_ms);
  PeerAnswer look(Question& question, std::int64_t now_ms);

  PeerContact contact_;
  std::vector<Question> questions_;  // by address
};

}  // namespace bagua_net

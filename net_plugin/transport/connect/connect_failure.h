// ConnectFailure: why attempts to open a connection failed, for the error at their deadline. There is one text for each
// cause, and one rule for what is tried again, for a comm's first connection and for later ones.
#pragma once

#include <string>

#include "base/status.h"
#include "transport/connect/established_connection.h"

namespace bagua_net {

struct ConnectFailure {
  int error_number = 0;   // of the last attempt that failed
  bool answered = false;  // there was a TCP connection, but no complete handshake
  std::string refusal;    // the verdict of the peer, without a proof
};

// True for most errors of a connect: links and routes come back, firewalls are still being set up, and other processes
// release descriptors and ports.
bool may_pass(int error_number);

// The error at the deadline of a ticket, for the path of the last attempt: the cause, what to do, and the setting of
// the deadline.
Status deadline_error(const ConnectFailure& failure, const NicPath& path, int timeout_ms, const char* setting);

}  // namespace bagua_net

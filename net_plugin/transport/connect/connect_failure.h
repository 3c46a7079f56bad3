// ConnectFailure: what has become of the attempts to open a connection, as told when their time is over. One text for
// each cause, and one rule for what is tried again, whether it is a comm's first connection or a later one.
#pragma once

#include <string>

#include "os/network_interface.h"
#include "os/socket_address.h"

namespace bagua_net {

struct ConnectFailure {
  int error_number = 0;   // of the last attempt that failed
  bool answered = false;  // TCP's connection was there: the peer did not shake hands
  std::string refusal;    // what the peer said instead, without a proof
};

// Most of what a connect fails with may pass: links and routes come back, firewalls get their rules, and descriptors
// and ports are given back by others.
bool may_pass(int error_number);

// Two sentences: the cause, and what to do.
std::string cause_of(const ConnectFailure& failure, const SocketAddress& peer, const NetworkInterface& interface);

}  // namespace bagua_net

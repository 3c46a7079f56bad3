// EstablishedConnection: what a finished handshake hands to a comm.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "crypto/cipher_state.h"
#include "transport/connect/nic_paths.h"
#include "transport/connect/optional_connections.h"
#include "transport/connect/peer_probe.h"
#include "transport/connect/stream_arrivals.h"
#include "wire/handshake_message.h"

namespace bagua_net {

// What is needed to open a further connection of a comm.
struct JoinTicket {
  std::vector<NicPath> paths =
      std::vector<NicPath>(1);  // to the listener; several: connections share them, and are bound to theirs
  std::size_t first_path = 0;   // of a replacement: which is tried first
  Hello hello;                  // a nonce is put into it for each connection
  HandshakeKeyRef key;
  int timeout_ms = 0;  // for it to join; 0: as for a connection

  // What such a connection is to the comm.
  Joining joining() const {
    if (hello.stream_index == kReplacingFirstStream) return Joining::kReplacesFirst;
    return hello.stream_index == kReplacingStream ? Joining::kReplaces : Joining::kMore;
  }
};

struct EstablishedConnection {
  std::size_t turn = 0;  // of its connect, or of its listen, among all of this process: NCCL's order of channels
  std::vector<KeyedSocket> sockets;  // by stream index
  std::vector<std::size_t> paths;    // the connecting side: of each socket, in the ticket
  // The path that each should have, even if it could not connect: of the first the one for small messages.
  std::vector<std::size_t> own_paths;
  std::uint32_t max_chunk_bytes = 0;
  std::string peer;                 // "10.0.0.2:4711 (host node2, process 4242)"
  bool same_host = false;           // both ends know it
  bool acknowledges = false;        // the connecting side: the peer acknowledges chunks that ask for it
  bool recovers = false;            // both ends survive the loss of connections
  bool checksums = false;           // both ends use them
  bool tells_of_addresses = false;  // the listening side: its connector understands that one is lost

  // Connections that join later come in here; nullptr: none will.
  std::shared_ptr<StreamArrivals> arrivals;
  bool may_grow = false;  // the connecting side: more connections may help
  bool is_long = false;   // the connecting side: a round trip took milliseconds, so it began with fewer
  PeerContact contact;    // the listening side: where to ask for its connector
  // The connecting side only: what further connections show, and how many there may be in all.
  JoinTicket ticket;
  int most_streams = 0;
  std::shared_ptr<OptionalConnections::Share> optional;  // those of its streams that it could do without
};

}  // namespace bagua_net

// InboundHandshakes: the listening side. Owns the listening sockets, what is listened for (one key per listen comm),
// and the accepted sockets that have not proved yet that they belong to one.
//
//   accepted socket --hello that names a listen or comm of ours--> challenged --proof of its key-->
//      stream 0 of a listen    : the listen's comm is being assembled --all joined--> ready
//      stream i of that comm   : joins it, in place of the stream's former connection if there is one
//      of a comm in use        : handed to it
//   anything else: a verdict if it speaks our protocol, closed in any case
//
// Each unauthenticated peer costs one socket and about 400 bytes until the handshake deadline. There are at most
// kMaxUnauthenticated of them, or fewer if this process may open few files. If there is no room, the oldest one is
// closed; those that named a listen, whose id is known only to its peer and to those who can read the network, are
// closed last. Not thread-safe: the connection service's mutex guards every call.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "os/network_interface.h"
#include "os/tcp_socket.h"
#include "transport/connect/established_connection.h"
#include "transport/connect/handshake_ends.h"
#include "transport/connect/handshake_settings.h"
#include "transport/connect/known_comms.h"
#include "transport/connect/listening_sockets.h"
#include "transport/connect/outbound_handshakes.h"
#include "wire/handshake_message.h"

namespace bagua_net {

class InboundHandshakes {
 public:
  // outbound: the comms of this process that peers may ask for; nullptr: none.
  InboundHandshakes(const HandshakeSettings& settings, HandshakeLoop* loop,
                    const OutboundHandshakes* outbound = nullptr);

  // Opens the interfaces' listening sockets if this is their first listen; fills handle[kConnectHandleBytes]. Each of
  // them takes connections of the comm. One that cannot be listened on is left out.
  Status listen(const std::vector<NetworkInterface>& interfaces, std::uint8_t* handle, RandomId* id);
  // *ready = true: *connection holds the comm's sockets. There is no time limit for the peer to begin, because its rank
  // may be late. The deadline begins when a connection has proved that it is from the peer.
  Status accept(const RandomId& id, bool* ready, EstablishedConnection* connection);
  void stop_listening(const RandomId& id);
  // The port of this process on that interface; opened if necessary. 0: it cannot be opened, or is not needed.
  std::uint16_t listening_port(const NetworkInterface& interface);

  // Ignores ids of others.
  void handle_event(std::uint64_t id);
  void expire(std::int64_t now_ms);
  std::int64_t next_deadline_ms() const;  // INT64_MAX: none
  std::size_t listen_count() const { return listens_.size(); }
  // Only without listens. Also closes all unauthenticated peers.
  void close_listening_sockets();

 private:
  static constexpr std::size_t kMaxUnauthenticated = 1024;
  enum class ListenState {
    kWaiting,     // for stream 0
    kAssembling,  // stream 0 was accepted, others have not joined yet
    kReady,       // all streams have joined
  };
  struct Listen {
    const ListeningSocket* at = nullptr;
    ListenState state = ListenState::kWaiting;
    HandshakeKeyRef key;
    RandomId comm_id{};
    Reply reply;  // to its streams
    std::size_t joined = 0;
    EstablishedConnection connection;
    std::vector<std::uint32_t> serials;   // of the hellos of its sockets
    std::int64_t first_asked_ms = 0;      // accept was called; 0: not yet
    std::int64_t look_ms = 0;             // when to look again whether that takes long
    std::int64_t deadline_ms = 0;         // for all streams to join, once the first has
    std::int64_t rejoin_deadline_ms = 0;  // of a stream that was reset; 0: none was
  };
  void accept_peers(ListeningSocket& listening);
  void make_room();
  void handle_peer(std::uint64_t id);
  // False: the connection is to be closed.
  bool greet(UnauthenticatedPeer& peer);
  // To its whole hello. False: as greet().
  bool answer(UnauthenticatedPeer& peer);
  void finish(UnauthenticatedPeer& peer);
  // key: as for UnauthenticatedPeer::send_reply.
  void refuse(UnauthenticatedPeer& peer, const Hello& hello, HandshakeVerdict verdict,
              const HandshakeKey* key = nullptr);
  // The key that the sender of this hello has to prove. nullptr: the hello names no listen or comm of this process.
  HandshakeKeyRef find_key(const Hello& hello);
  // Of a listen, or of a comm that began with it, at either end.
  HandshakeKeyRef find_key_of_listen(const RandomId& listen_id) const;
  Admission admit(const UnauthenticatedPeer& peer, const Hello& hello);
  HandshakeVerdict admit_to_listen(const UnauthenticatedPeer& peer, const Hello& hello, Listen& listen,
                                   Admission* admission);
  // The index in the listen's connection. The number of its sockets: a further stream. -1: none.
  static int place_of(const Hello& hello, const Listen& listen);
  void log_refusal(const SocketAddress& peer, const Hello& hello, HandshakeVerdict verdict);
  void take_in(UnauthenticatedPeer& peer, const Admission& admission);
  Status check_assembling(Listen& listen);
  void tell_of_waiting(Listen& listen, std::int64_t now_ms);
  void log_stall(std::string line);
  void drop_unauthenticated(std::uint64_t id);

  const HandshakeSettings& settings_;
  HandshakeLoop* const loop_;
  const OutboundHandshakes* const outbound_;
  const std::size_t max_unauthenticated_;
  ListeningSockets sockets_;
  std::map<RandomId, Listen> listens_;
  std::size_t turns_ = 0;  // listens so far
  AcceptedComms accepted_;
  std::map<std::uint64_t, UnauthenticatedPeer> unauthenticated_;  // by poller id: the oldest first
};

}  // namespace bagua_net

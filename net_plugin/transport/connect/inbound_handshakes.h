// InboundHandshakes: the listening side. Owns the listening sockets, what is listened for (one token per listen comm),
// and the accepted sockets that have not proved yet that they belong to one.
//
//   accepted socket --hello that names a listen or comm of ours--> challenged --proof of its token-->
//      stream 0 of a listen    : the listen's comm is being assembled --all joined--> ready
//      stream i of that comm   : joins it, in place of the stream's former connection if there is one
//      of a comm in use        : handed to it
//   anything else: a verdict if it speaks our protocol, closed in any case
//
// Unauthenticated peers cost one socket and about 400 bytes each, until the handshake deadline, and at most
// kMaxUnauthenticated of them, fewer where this process may open few files. Where there is no room, the oldest goes;
// those that named a listen, of which only its peer and who reads the network know, go last. Not thread-safe: the
// connection service's mutex guards every call.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/rare_log.h"
#include "os/epoll_poller.h"
#include "os/network_interface.h"
#include "os/tcp_socket.h"
#include "transport/chunks/limits.h"
#include "transport/connect/established_connection.h"
#include "transport/connect/handshake_settings.h"
#include "transport/connect/listening_sockets.h"
#include "transport/connect/outbound_handshakes.h"
#include "transport/connect/unauthenticated_peer.h"
#include "wire/handshake_message.h"

namespace bagua_net {

class InboundHandshakes {
 public:
  // next_id: poller ids are handed out for both directions from one counter. log: written once the mutex is free.
  // outbound: the comms of this process that peers may ask for; nullptr: none.
  InboundHandshakes(const HandshakeSettings& settings, EpollPoller* poller, std::uint64_t* next_id, RareLog* log,
                    const OutboundHandshakes* outbound = nullptr);

  // Opens the interface's listening socket if this is its first listen; fills handle[kConnectHandleBytes].
  Status listen(const NetworkInterface& interface, std::uint8_t* handle, RandomId* id);
  // *ready = true: *connection holds the comm's sockets. Waits without a limit for a peer: a rank may be late, and
  // others wait for it meanwhile. The deadline begins when one has proved that it is the peer.
  Status accept(const RandomId& id, bool* ready, EstablishedConnection* connection);
  void stop_listening(const RandomId& id);
  // Where this process listens on that interface; opened if need be. 0: it cannot, or need not.
  std::uint16_t listening_port(const NetworkInterface& interface);

  // Ignored if it is of something else.
  void handle_event(std::uint64_t id);
  void expire(std::int64_t now_ms);
  std::int64_t next_deadline_ms() const;  // INT64_MAX: none
  std::size_t listen_count() const { return listens_.size(); }
  // Nothing may be listened for. Whoever is not authenticated yet is closed, too.
  void close_listening_sockets();

 private:
  static constexpr std::size_t kMaxUnauthenticated = 1024;
  enum class ListenState {
    kWaiting,     // for stream 0
    kAssembling,  // stream 0 was accepted, others are still to join
    kReady,       // every stream is here
  };
  struct Listen {
    const ListeningSocket* at = nullptr;
    ListenState state = ListenState::kWaiting;
    Token token{};
    RandomId comm_id{};
    Reply reply;  // that its streams get
    std::size_t joined = 0;
    EstablishedConnection connection;
    std::int64_t first_asked_ms = 0;      // accept was called; 0: not yet
    std::int64_t look_ms = 0;             // when to look again whether that takes long
    std::int64_t deadline_ms = 0;         // for all streams to join, once the first has
    std::int64_t rejoin_deadline_ms = 0;  // of a stream that was reset; 0: none was
  };
  // A comm that was handed out. Its record outlives it until the next comm is handed out.
  struct Accepted {
    Token token{};
    RandomId listen_id{};
    Reply reply;                             // that its first streams got
    std::uint64_t returned = 0;              // a bit for each of the first streams whose connection came again
    std::weak_ptr<StreamArrivals> arrivals;  // expires with the comm
  };
  void accept_peers(ListeningSocket& listening);
  void make_room();
  void handle_peer(std::uint64_t id);
  // False: the peer is to be let go of.
  bool greet(UnauthenticatedPeer& peer);
  void finish(UnauthenticatedPeer& peer);
  // token: as for UnauthenticatedPeer::send_reply.
  void refuse(const UnauthenticatedPeer& peer, const Hello& hello, HandshakeVerdict verdict,
              const Token* token = nullptr);
  // What this hello's sender has to know. nullptr: it names nothing of ours.
  const Token* find_token(const Hello& hello);
  // What a proven hello gets: the reply, and if it is accepted, where the socket goes once the reply is sent.
  struct Admission {
    Reply reply;
    OwnedFd* place = nullptr;                  // in a connection that is being assembled
    std::shared_ptr<StreamArrivals> arrivals;  // of a comm in use
    Joining joining = Joining::kMore;
  };
  Admission admit(const UnauthenticatedPeer& peer, const Hello& hello);
  HandshakeVerdict admit_to_listen(const UnauthenticatedPeer& peer, const Hello& hello, Listen& listen,
                                   Admission* admission);
  // In the listen's connection; its number of sockets: one more; -1: nowhere.
  static int place_of(const Hello& hello, const Listen& listen);
  HandshakeVerdict admit_to_accepted(const Hello& hello, Admission* admission);
  void log_refusal(const SocketAddress& peer, const Hello& hello, HandshakeVerdict verdict);
  void take_in(UnauthenticatedPeer& peer, const Admission& admission);
  Status check_assembling(Listen& listen, std::int64_t now_ms);
  void tell_of_waiting(Listen& listen, std::int64_t now_ms);
  void log_stall(std::string line);
  void remember_accepted(const RandomId& id, const Listen& listen);
  int most_streams() const { return settings_.streams.value_or(kMaxStreams); }
  void drop_unauthenticated(std::uint64_t id);

  const HandshakeSettings& settings_;
  EpollPoller* const poller_;
  std::uint64_t* const next_id_;
  RareLog* const log_;
  const OutboundHandshakes* const outbound_;
  const std::size_t max_unauthenticated_;
  ListeningSockets sockets_;
  std::map<RandomId, Listen> listens_;
  std::map<RandomId, Accepted> accepted_;                         // by comm id
  std::map<std::uint64_t, UnauthenticatedPeer> unauthenticated_;  // by poller id: the oldest first
};

}  // namespace bagua_net

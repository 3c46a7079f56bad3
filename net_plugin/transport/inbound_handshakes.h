// InboundHandshakes: the listening side. Owns the listening sockets (one per interface), what is listened for (one
// token per listen comm), and the accepted sockets that have not proved yet that they belong to one.
//
//   accepted socket --hello--> token known, stream 0   : the listen's comm is being assembled --all joined--> ready
//                              comm id known, stream i : joins it
//                              comm in use, "joining"  : handed to it
//                              anything else           : a verdict if it speaks our protocol, closed in any case
//
// Unauthenticated peers cost one socket and 112 bytes each, until the handshake deadline, and at most
// kMaxUnauthenticated of them, fewer where this process may open few files. Not thread-safe: the connection service's
// mutex guards every call.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "os/epoll_poller.h"
#include "os/network_interface.h"
#include "os/tcp_socket.h"
#include "transport/data_stream.h"
#include "transport/established_connection.h"
#include "transport/handshake_settings.h"
#include "transport/rare_log.h"
#include "wire/handshake_message.h"

namespace bagua_net {

class InboundHandshakes {
 public:
  // next_id: poller ids are handed out for both directions from one counter.
  InboundHandshakes(const HandshakeSettings& settings, EpollPoller* poller, std::uint64_t* next_id);

  // Opens the interface's listening socket if this is its first listen; fills handle[kConnectHandleBytes].
  Status listen(const NetworkInterface& interface, std::uint8_t* handle, Token* token);
  // *ready = true: *connection holds the comm's sockets. An error once the deadline, counted from the first call, is
  // over.
  Status accept(const Token& token, bool* ready, EstablishedConnection* connection);
  void stop_listening(const Token& token);

  bool owns(std::uint64_t id) const { return listening_ids_.count(id) != 0 || unauthenticated_.count(id) != 0; }
  void handle_event(std::uint64_t id);
  void expire(std::int64_t now_ms);
  std::int64_t next_deadline_ms() const;  // INT64_MAX: none
  std::size_t listen_count() const { return listens_.size(); }
  // What is to be logged, once the mutex is free.
  std::vector<RareLog::Line> take_log() { return log_.take(); }

 private:
  static constexpr std::size_t kMaxUnauthenticated = 1024;
  static constexpr std::int64_t kAcceptRetryMs = 100;

  struct ListeningSocket {
    OwnedFd socket;
    SocketAddress address;
    std::uint64_t id = 0;
    std::int64_t paused_until_ms = 0;  // out of descriptors: look again then; 0: not paused
  };
  enum class ListenState {
    kWaiting,     // for a hello with its token
    kAssembling,  // stream 0 was accepted, others are still to join
    kReady,       // every stream is here
  };
  struct Listen {
    ListenState state = ListenState::kWaiting;
    Token comm_id{};
    std::size_t joined = 0;
    EstablishedConnection connection;
    std::int64_t accept_deadline_ms = 0;  // 0: accept was not called yet
  };
  // A comm that was handed out. Its record outlives it until the next comm is handed out.
  struct Accepted {
    Token token{};
    int streams = 0;
    std::weak_ptr<StreamArrivals> arrivals;  // expires with the comm
  };
  struct UnauthenticatedPeer {
    OwnedFd socket;
    SocketAddress address;
    std::array<std::uint8_t, kHelloBytes> bytes;
    std::size_t received = 0;
    std::int64_t deadline_ms = 0;

    bool is_of_this_host() const { return local_address(socket.get()).same_host(address); }
  };

  Status open_listening_socket(const NetworkInterface& interface, ListeningSocket** listening);
  void accept_peers(ListeningSocket& listening);
  void read_hello(std::uint64_t id);
  // What a hello gets: the reply, and if it is accepted, where the socket goes once the reply is sent.
  struct Admission {
    Reply reply;
    OwnedFd* place = nullptr;                  // in a connection that is being assembled
    std::shared_ptr<StreamArrivals> arrivals;  // of a comm in use
    Joining joining = Joining::kMore;
  };
  Admission admit(const UnauthenticatedPeer& peer, const Hello& hello);
  HandshakeVerdict admit_to_listen(const UnauthenticatedPeer& peer, const Hello& hello, Admission* admission);
  HandshakeVerdict admit_to_accepted(const Hello& hello, Admission* admission);
  void log_refusal(const SocketAddress& peer, const Hello& hello, HandshakeVerdict verdict);
  void take_in(UnauthenticatedPeer& peer, const Admission& admission);
  void remember_accepted(const Token& token, const Listen& listen);
  int most_streams() const { return settings_.streams.value_or(kMaxStreams); }
  void drop_unauthenticated(std::uint64_t id);

  const HandshakeSettings& settings_;
  EpollPoller* const poller_;
  std::uint64_t* const next_id_;
  const std::size_t max_unauthenticated_;
  std::map<std::string, ListeningSocket> listening_;         // by interface name
  std::map<std::uint64_t, ListeningSocket*> listening_ids_;  // by poller id; map nodes do not move
  std::map<Token, Listen> listens_;
  std::map<Token, Accepted> accepted_;                            // by comm id
  std::map<std::uint64_t, UnauthenticatedPeer> unauthenticated_;  // by poller id: the oldest first
  RareLog log_;
};

}  // namespace bagua_net

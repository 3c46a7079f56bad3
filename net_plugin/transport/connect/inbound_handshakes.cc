#include "transport/connect/inbound_handshakes.h"

#include <poll.h>
#include <sys/resource.h>

#include <algorithm>

#include "base/monotonic_clock.h"
#include "os/random_bytes.h"
#include "transport/recovery/recovery_timing.h"

namespace bagua_net {
namespace {

// Per turn. Otherwise a flood of connections would delay every call from NCCL.
constexpr int kAcceptsPerTurn = 32;

// The part of the descriptor limit for unauthenticated peers. The rest is for comms and the application.
constexpr std::size_t kUnauthenticatedShare = 8;

std::size_t max_unauthenticated(std::size_t most) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return most;
  return std::clamp<std::size_t>(limit.rlim_cur / kUnauthenticatedShare, 1, most);
}

// Whether the other end of a connection is still there, which a look at the socket tells without reading.
enum class PeerClose { kNone, kReset, kClosed };

PeerClose peer_close(int socket) {
  pollfd state{socket, POLLRDHUP, 0};  // -1, no socket, is ignored
  if (::poll(&state, 1, 0) <= 0) return PeerClose::kNone;
  return (state.revents & POLLERR) != 0 ? PeerClose::kReset : PeerClose::kClosed;
}

}  // namespace

InboundHandshakes::InboundHandshakes(const HandshakeSettings& settings, HandshakeLoop* loop,
                                     const OutboundHandshakes* outbound)
    : settings_(settings),
      loop_(loop),
      outbound_(outbound),
      max_unauthenticated_(max_unauthenticated(kMaxUnauthenticated)),
      sockets_(loop),
      accepted_(settings) {}

Status InboundHandshakes::listen(const std::vector<NetworkInterface>& interfaces, std::uint8_t* handle, RandomId* id) {
  std::vector<const ListeningSocket*> sockets;
  BAGUA_NET_RETURN_IF_ERROR(sockets_.open_all(interfaces, &sockets));
  ConnectHandle encoded;
  encoded.protection = settings_.protection();
  encoded.has_aes = settings_.uses_aes;
  BAGUA_NET_RETURN_IF_ERROR(fill_random(encoded.token.data(), encoded.token.size()));
  BAGUA_NET_RETURN_IF_ERROR(fill_random(encoded.listen_id.data(), encoded.listen_id.size()));
  Listen& listen = listens_[encoded.listen_id];
  listen.at = sockets.front();
  listen.connection.turn = turns_++;
  listen.key = handshake_key(encoded.token, settings_.secret.get());
  *id = encoded.listen_id;
  listen.reply.addresses = put_addresses(sockets, &encoded);
  encoded.max_streams = static_cast<std::uint16_t>(settings_.most_streams());
  encode_connect_handle(encoded, handle);
  return Status::ok();
}

Status InboundHandshakes::accept(const RandomId& id, bool* ready, EstablishedConnection* connection) {
  *ready = false;
  const auto found = listens_.find(id);
  if (found == listens_.end()) {
    return Status::internal_error("accept on a listen comm that already gave its one connection");
  }
  Listen& listen = found->second;
  if (listen.state == ListenState::kReady) {
    listen.connection.arrivals = std::make_shared<StreamArrivals>();
    listen.connection.arrivals->set_streams(static_cast<int>(listen.connection.sockets.size()));
    accepted_.add(listen.comm_id, id, listen.key, listen.reply, std::move(listen.serials), listen.connection.arrivals);
    *connection = std::move(listen.connection);
    stop_listening(id);
    *ready = true;
    return Status::ok();
  }
  if (listen.state == ListenState::kWaiting) {
    tell_of_waiting(listen, monotonic_ms());
    return Status::ok();
  }
  BAGUA_NET_RETURN_IF_ERROR(check_assembling(listen));
  if (loop_->asked_ms < listen.deadline_ms) return Status::ok();
  return Status::remote_error(
      "only " + std::to_string(listen.joined) + " of " + std::to_string(listen.connection.sockets.size()) +
      " data streams of " + listen.connection.peer + " joined within " + std::to_string(settings_.connect_timeout_ms) +
      " ms: that rank has failed (see its log), or a firewall limits connections to this host. "
      "BAGUA_NET_CONNECT_TIMEOUT_MS sets the deadline");
}

void InboundHandshakes::tell_of_waiting(Listen& listen, std::int64_t now_ms) {
  if (settings_.stalls == nullptr) return;
  if (listen.first_asked_ms == 0) listen.first_asked_ms = now_ms;
  if (now_ms < listen.look_ms) return;
  listen.look_ms = now_ms + settings_.stalls->look_again_ms();
  const std::int64_t waited_ms = now_ms - listen.first_asked_ms;
  if (waited_ms < settings_.stalls->after_ms()) return;
  log_stall(settings_.stalls->waits(
      &listen,
      {listen.at->address.to_string() + " (" + listen.at->interface + ")", StallReport::Waits::kToBeConnected,
       waited_ms, "that rank is late or has failed, or a firewall blocks the way"},
      now_ms));
}

void InboundHandshakes::log_stall(std::string line) {
  if (line.empty()) return;
  loop_->log.add(LogLevel::kWarn, "stall", std::move(line));
  loop_->poller->wake();  // the service's thread writes it
}

Status InboundHandshakes::check_assembling(Listen& listen) {
  PeerClose closed = PeerClose::kNone;
  for (const KeyedSocket& socket : listen.connection.sockets) closed = std::max(closed, peer_close(socket.get()));
  if (closed == PeerClose::kNone) {
    listen.rejoin_deadline_ms = 0;
    return Status::ok();
  }
  // A connector closes a connection when its attempt has failed, and resets it when it tries again.
  if (closed == PeerClose::kReset) {
    if (listen.rejoin_deadline_ms == 0) listen.rejoin_deadline_ms = loop_->now_ms() + kRejoinMs;
    if (loop_->asked_ms < listen.rejoin_deadline_ms) return Status::ok();
  }
  return Status::remote_error(listen.connection.peer +
                              " closed the connection while its data streams were joining: that rank has failed; "
                              "see its log");
}

void InboundHandshakes::stop_listening(const RandomId& id) {
  const auto found = listens_.find(id);
  if (found == listens_.end()) return;
  if (settings_.stalls != nullptr) log_stall(settings_.stalls->goes_on(&found->second));
  listens_.erase(found);
}

std::uint16_t InboundHandshakes::listening_port(const NetworkInterface& interface) {
  if (settings_.recovery == Recovery::kOff) return 0;
  const ListeningSocket* listening = nullptr;
  return sockets_.open(interface, &listening).is_ok() ? listening->address.port() : 0;
}

void InboundHandshakes::close_listening_sockets() {
  unauthenticated_.clear();
  sockets_.close_all();
}

void InboundHandshakes::handle_event(std::uint64_t id) {
  if (ListeningSocket* const listening = sockets_.find(id)) {
    accept_peers(*listening);
  } else if (unauthenticated_.count(id) != 0) {
    handle_peer(id);
  }
}

void InboundHandshakes::accept_peers(ListeningSocket& listening) {
  // The listener is level-triggered: the remaining connections are accepted in the next turn.
  OwnedFd socket;
  SocketAddress from;
  for (int accepted = 0; accepted < kAcceptsPerTurn && sockets_.accept(listening, &socket, &from); ++accepted) {
    make_room();
    const std::uint64_t id = loop_->next_id++;
    if (!loop_->poller->add(socket.get(), id, EPOLLIN).is_ok()) continue;
    unauthenticated_.try_emplace(id, std::move(socket), from, loop_->now_ms() + settings_.handshake_timeout_ms);
    handle_peer(id);  // its hello is often there already
  }
}

void InboundHandshakes::make_room() {
  if (unauthenticated_.size() < max_unauthenticated_) return;
  auto victim = std::find_if(unauthenticated_.begin(), unauthenticated_.end(),
                             [](const auto& entry) { return !entry.second.is_challenged(); });
  if (victim == unauthenticated_.end()) victim = unauthenticated_.begin();
  drop_unauthenticated(victim->first);
}

void InboundHandshakes::handle_peer(std::uint64_t id) {
  UnauthenticatedPeer& peer = unauthenticated_.at(id);
  if (!peer.is_challenged() && !greet(peer)) {
    drop_unauthenticated(id);
    return;
  }
  if (!peer.is_challenged()) return;
  switch (peer.read_proof()) {
    case UnauthenticatedPeer::Step::kWaiting: return;
    case UnauthenticatedPeer::Step::kDone: finish(peer); break;
    default: break;
  }
  drop_unauthenticated(id);
}

bool InboundHandshakes::greet(UnauthenticatedPeer& peer) {
  switch (peer.read_hello()) {
    case UnauthenticatedPeer::Step::kWaiting: return true;
    case UnauthenticatedPeer::Step::kDone: break;
    case UnauthenticatedPeer::Step::kFailed: return false;
    case UnauthenticatedPeer::Step::kOtherProtocol: {
      loop_->log.add_if_due(LogLevel::kInfo, "other protocol", [&] {
        return "Bagua-Net: closed a connection from " + peer.address.to_string() + " that does not speak its protocol";
      });
      return false;
    }
    case UnauthenticatedPeer::Step::kOtherVersion: {
      Hello hello;
      hello.protocol_version = peer.other_version();
      refuse(peer, hello, HandshakeVerdict::kWrongVersion);
      return false;
    }
  }
  return answer(peer);
}

bool InboundHandshakes::answer(UnauthenticatedPeer& peer) {
  Hello hello = peer.hello();
  const HandshakeKeyRef listens_key = find_key_of_listen(hello.listen_id);
  const bool is_agreed = protection_mismatch(settings_.protection(), {hello.key_id, peer.is_sealed()}).empty();
  if (listens_key != nullptr && !is_agreed) {
    refuse(peer, hello, HandshakeVerdict::kOtherProtection);
    return false;
  }
  if (peer.is_sealed() && listens_key != nullptr) {
    // libsodium does not look whether the CPU has the instructions that it uses for AES.
    const bool is_opened = (settings_.uses_aes || hello.cipher != Cipher::kAes256Gcm) && peer.open_hello(*listens_key);
    hello = peer.hello();
    // Who has changed the handle cannot choose the cipher.
    if (!is_opened || hello.cipher != choose_cipher(settings_.uses_aes, (hello.features & kFeatureAes) != 0)) {
      refuse(peer, hello, HandshakeVerdict::kWrongProof);
      return false;
    }
  }
  const bool is_asking = hello.stream_index == kAskingStream;
  const bool is_known =
      is_asking ? outbound_ != nullptr && outbound_->has_comm(hello.comm_id) : find_key(hello) != nullptr;
  if (is_known && is_agreed && (!peer.is_sealed() || listens_key != nullptr)) return peer.send_challenge();
  refuse(peer, hello,
         hello.stream_index == kJoiningStream ? HandshakeVerdict::kUnknownStream : HandshakeVerdict::kUnknownListen);
  return false;
}

void InboundHandshakes::finish(UnauthenticatedPeer& peer) {
  const Hello hello = peer.hello();
  const HandshakeKeyRef key = find_key(hello);
  if (key == nullptr) {  // closed in the meantime
    refuse(peer, hello, HandshakeVerdict::kUnknownListen);
    return;
  }
  if (!peer.proves(*key)) {
    refuse(peer, hello, HandshakeVerdict::kWrongProof);
    return;
  }
  // Its connector has given it up before this process read the proof. One that is lost while a comm is being connected
  // is waited for (check_assembling).
  if (is_joining(hello.stream_index) && peer_close(peer.socket.get()) != PeerClose::kNone) return;
  const Admission admission = admit(peer, hello);
  if (admission.reply.verdict != HandshakeVerdict::kAccepted) {
    refuse(peer, hello, admission.reply.verdict, key.get());
    return;
  }
  peer.send_reply(admission.reply, key.get());
  take_in(peer, admission);
}

void InboundHandshakes::refuse(UnauthenticatedPeer& peer, const Hello& hello, HandshakeVerdict verdict,
                               const HandshakeKey* key) {
  Reply reply;
  reply.verdict = verdict;
  peer.send_reply(reply, key);
  log_refusal(peer.address, hello, verdict);
}

HandshakeKeyRef InboundHandshakes::find_key_of_listen(const RandomId& listen_id) const {
  const auto listen = listens_.find(listen_id);
  if (listen != listens_.end()) return listen->second.key;
  HandshakeKeyRef key = accepted_.find_key_of_listen(listen_id);
  return key == nullptr && outbound_ != nullptr ? outbound_->find_key(listen_id) : key;
}

HandshakeKeyRef InboundHandshakes::find_key(const Hello& hello) {
  const auto listen = listens_.find(hello.listen_id);
  if (listen != listens_.end()) return listen->second.key;
  return accepted_.find_key(hello);
}

void InboundHandshakes::log_refusal(const SocketAddress& peer, const Hello& hello, HandshakeVerdict verdict) {
  if (hello.stream_index == kAskingStream && hello.comm_id == RandomId{}) return;  // a path was tried
  // If a stream cannot join because its comm was closed in the meantime, the peer continues without it.
  // Nor is it more than that if its connector has opened another one meanwhile.
  const bool is_common = hello.stream_index >= kAskingStream || verdict == HandshakeVerdict::kNoPlace;
  const LogLevel level = is_common ? LogLevel::kInfo : LogLevel::kWarn;
  const std::string kind = handshake_verdict_name(verdict);
  loop_->log.add_if_due(level, kind, [&] {
    std::string line = "Bagua-Net: refused a connection from " + peer.to_string() + " (";
    // Otherwise it is of another version, or sealed with another key.
    if (!hello.host_name.empty())
      line += "host " + hello.host_name + ", process " + std::to_string(hello.process_id) + ", ";
    line += "protocol version " + std::to_string(hello.protocol_version) + ", ours " +
            std::to_string(kProtocolVersion) + "): ";
    if (verdict != HandshakeVerdict::kOtherProtection) return line + kind;
    return line + protection_mismatch(settings_.protection(), {hello.key_id, hello.cipher != Cipher::kNone});
  });
}

Admission InboundHandshakes::admit(const UnauthenticatedPeer& peer, const Hello& hello) {
  Admission admission;
  const auto listen = listens_.find(hello.listen_id);
  // A stream of a comm in use may also be one of its first ones, whose connection was lost before the reply arrived.
  const HandshakeVerdict verdict = listen == listens_.end() ? accepted_.admit(hello, &admission)
                                                            : admit_to_listen(peer, hello, listen->second, &admission);
  admission.reply.verdict = verdict;
  if (hello.stream_index != 0) admission.reply.addresses.clear();
  return admission;
}

HandshakeVerdict InboundHandshakes::admit_to_listen(const UnauthenticatedPeer& peer, const Hello& hello, Listen& listen,
                                                    Admission* admission) {
  EstablishedConnection& connection = listen.connection;
  if (hello.stream_index == 0 && listen.state == ListenState::kWaiting) {
    connection.sockets.resize(
        static_cast<std::size_t>(std::clamp<int>(hello.streams_wanted, 1, settings_.most_streams())));
    connection.max_chunk_bytes = std::max(1u, std::min(hello.max_chunk_bytes, settings_.max_chunk_bytes));
    connection.peer =
        peer.address.to_string() + " (host " + hello.host_name + ", process " + std::to_string(hello.process_id) + ")";
    connection.same_host = peer.is_of_this_host();
    connection.contact = {{}, hello, listen.key};
    connection.contact.hello.stream_index = kAskingStream;
    listen.comm_id = hello.comm_id;
    listen.reply.process_id = settings_.process_id;
    listen.reply.streams = static_cast<std::uint16_t>(connection.sockets.size());
    listen.reply.max_chunk_bytes = connection.max_chunk_bytes;
    listen.reply.features = hello.features & kFeatureAcknowledgements;
    connection.recovers = settings_.recovery != Recovery::kOff && (hello.features & kFeatureRecovery) != 0;
    if (connection.recovers) listen.reply.features |= kFeatureRecovery;
    // One end is enough to switch checksums on.
    connection.checksums = settings_.checksums || (hello.features & kFeatureChecksums) != 0;
    if (connection.checksums) listen.reply.features |= kFeatureChecksums;
    connection.tells_of_addresses = (hello.features & kFeatureLostAddresses) != 0;
    listen.state = ListenState::kAssembling;
    listen.deadline_ms = loop_->now_ms() + settings_.connect_timeout_ms;
  } else if (listen.state == ListenState::kWaiting || hello.comm_id != listen.comm_id) {
    return HandshakeVerdict::kUnknownStream;
  }
  const int index = place_of(hello, listen);
  if (index < 0 || index >= settings_.most_streams()) return HandshakeVerdict::kUnknownStream;
  if (index == static_cast<int>(connection.sockets.size())) connection.sockets.emplace_back();
  listen.serials.resize(connection.sockets.size());
  KeyedSocket& place = connection.sockets[static_cast<std::size_t>(index)];
  std::uint32_t& serial = listen.serials[static_cast<std::size_t>(index)];
  if (place.is_open() && !is_later(hello.serial, serial)) return HandshakeVerdict::kNoPlace;
  serial = hello.serial;
  // The connector tries a stream again if it did not get the reply.
  if (place.is_open()) {
    place.reset();
  } else if (++listen.joined == connection.sockets.size()) {
    listen.state = ListenState::kReady;
  }
  SocketAddress contact = peer.address;
  contact.set_port(hello.port);
  connection.contact.add(contact);
  admission->place = &place;
  admission->reply = listen.reply;
  if (is_joining(hello.stream_index)) admission->reply.streams = 1;
  return HandshakeVerdict::kAccepted;
}

int InboundHandshakes::place_of(const Hello& hello, const Listen& listen) {
  const std::vector<KeyedSocket>& sockets = listen.connection.sockets;
  if (!is_joining(hello.stream_index)) return hello.stream_index < sockets.size() ? hello.stream_index : -1;
  // The peer has finished connecting and uses the comm, but accept() has not returned it yet.
  if (listen.state != ListenState::kReady) return -1;
  if (hello.stream_index == kReplacingFirstStream) return 0;
  std::size_t index = sockets.size();
  if (hello.stream_index == kReplacingStream) {
    for (index = 1; index < sockets.size() && peer_close(sockets[index].get()) == PeerClose::kNone; ++index) {
    }
  }
  return static_cast<int>(index);
}

void InboundHandshakes::take_in(UnauthenticatedPeer& peer, const Admission& admission) {
  Status options = apply_tcp_options(peer.socket.get(), settings_.tcp, peer.is_of_this_host());
  if (options.is_ok() && settings_.tcp.keepalive_s > 0) {
    const bool recovers = (admission.reply.features & kFeatureRecovery) != 0;
    options = limit_unanswered_writes(peer.socket.get(), recovers ? receiver_silence_ms(settings_.tcp.keepalive_s)
                                                                  : settings_.tcp.keepalive_s * 1000);
  }
  if (!options.is_ok())
    loop_->log.add_if_due(LogLevel::kWarn, "options", [&] { return "Bagua-Net: " + options.message(); });
  loop_->poller->remove(peer.socket.get());
  if (admission.arrivals != nullptr) {
    SocketAddress contact = peer.address;
    contact.set_port(peer.hello().port);
    admission.arrivals->hand_in_announced(peer.take_socket(), admission.joining, 0, contact);
  } else {
    *admission.place = peer.take_socket();
  }
}

void InboundHandshakes::drop_unauthenticated(std::uint64_t id) {
  const auto found = unauthenticated_.find(id);
  if (found->second.socket.is_open()) loop_->poller->remove(found->second.socket.get());
  unauthenticated_.erase(found);
}

void InboundHandshakes::expire(std::int64_t now_ms) {
  for (auto peer = unauthenticated_.begin(); peer != unauthenticated_.end();) {
    const auto current = peer++;
    if (now_ms >= current->second.deadline_ms) drop_unauthenticated(current->first);
  }
  sockets_.expire(now_ms);
}

std::int64_t InboundHandshakes::next_deadline_ms() const {
  std::int64_t deadline_ms = sockets_.next_deadline_ms();
  // The time limit is the same for all unauthenticated peers, so the oldest one is due first.
  if (!unauthenticated_.empty()) deadline_ms = std::min(deadline_ms, unauthenticated_.begin()->second.deadline_ms);
  // What accept() judges, for which the sockets are to be asked.
  for (const auto& [id, listen] : listens_) {
    const bool is_open = listen.state == ListenState::kAssembling && loop_->asked_ms < listen.deadline_ms;
    if (is_open) deadline_ms = std::min(deadline_ms, listen.deadline_ms);
  }
  return deadline_ms;
}

}  // namespace bagua_net

#include "transport/inbound_handshakes.h"

#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>

#include "base/log_sink.h"
#include "base/monotonic_clock.h"
#include "os/random_bytes.h"

namespace bagua_net {
namespace {

void fill_handle_address(const SocketAddress& address, ConnectHandle* handle) {
  handle->port = address.port();
  if (address.is_ipv6()) {
    const auto* ipv6 = reinterpret_cast<const sockaddr_in6*>(address.data());
    handle->address_family = 6;
    std::memcpy(handle->address.data(), &ipv6->sin6_addr, sizeof ipv6->sin6_addr);
    handle->scope_id = ipv6->sin6_scope_id;
  } else {
    const auto* ipv4 = reinterpret_cast<const sockaddr_in*>(address.data());
    handle->address_family = 4;
    std::memcpy(handle->address.data(), &ipv4->sin_addr, sizeof ipv4->sin_addr);
  }
}

// In one turn: connections that come as fast as they are accepted would keep every call from NCCL waiting.
constexpr int kAcceptsPerTurn = 32;

bool has_left(const std::vector<OwnedFd>& sockets) {
  std::vector<pollfd> states;
  for (const OwnedFd& socket : sockets) states.push_back({socket.get(), POLLRDHUP, 0});  // -1 is passed over
  return ::poll(states.data(), states.size(), 0) > 0;
}

// Of what this process may open: the rest is for its comms and the application.
constexpr std::size_t kUnauthenticatedShare = 8;

std::size_t max_unauthenticated(std::size_t most) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return most;
  return std::clamp<std::size_t>(limit.rlim_cur / kUnauthenticatedShare, 1, most);
}

}  // namespace

InboundHandshakes::InboundHandshakes(const HandshakeSettings& settings, EpollPoller* poller, std::uint64_t* next_id)
    : settings_(settings),
      poller_(poller),
      next_id_(next_id),
      max_unauthenticated_(max_unauthenticated(kMaxUnauthenticated)) {}

Status InboundHandshakes::open_listening_socket(const NetworkInterface& interface, ListeningSocket** listening) {
  const auto found = listening_.find(interface.name);
  if (found != listening_.end()) {
    *listening = &found->second;
    return Status::ok();
  }
  ListeningSocket opened;
  opened.address = interface.address;
  opened.address.set_port(0);
  BAGUA_NET_RETURN_IF_ERROR(
      tcp_listen(&opened.address, &opened.socket).with_context("listening on interface " + interface.name));
  opened.id = (*next_id_)++;
  BAGUA_NET_RETURN_IF_ERROR(poller_->add(opened.socket.get(), opened.id, EPOLLIN));
  *listening = &listening_.emplace(interface.name, std::move(opened)).first->second;
  listening_ids_[(*listening)->id] = *listening;
  return Status::ok();
}

Status InboundHandshakes::listen(const NetworkInterface& interface, std::uint8_t* handle, Token* token) {
  ListeningSocket* listening = nullptr;
  BAGUA_NET_RETURN_IF_ERROR(open_listening_socket(interface, &listening));
  BAGUA_NET_RETURN_IF_ERROR(fill_random(token->data(), token->size()));
  listens_[*token];
  ConnectHandle encoded;
  fill_handle_address(listening->address, &encoded);
  encoded.max_streams = static_cast<std::uint16_t>(most_streams());
  encoded.token = *token;
  encode_connect_handle(encoded, handle);
  return Status::ok();
}

Status InboundHandshakes::accept(const Token& token, bool* ready, EstablishedConnection* connection) {
  *ready = false;
  const auto found = listens_.find(token);
  if (found == listens_.end()) {
    return Status::internal_error("accept on a listen comm that already gave its one connection");
  }
  Listen& listen = found->second;
  if (listen.state == ListenState::kReady) {
    listen.connection.arrivals = std::make_shared<StreamArrivals>();
    remember_accepted(token, listen);
    *connection = std::move(listen.connection);
    listens_.erase(found);
    *ready = true;
    return Status::ok();
  }
  const bool is_assembling = listen.state == ListenState::kAssembling;
  if (is_assembling && has_left(listen.connection.sockets)) {
    return Status::remote_error(listen.connection.peer +
                                " closed the connection while its data streams were joining: that rank has failed; "
                                "see its log");
  }
  const std::int64_t now_ms = monotonic_ms();
  if (listen.accept_deadline_ms == 0) listen.accept_deadline_ms = now_ms + settings_.connect_timeout_ms;
  if (now_ms < listen.accept_deadline_ms) return Status::ok();
  if (is_assembling) {
    return Status::remote_error(
        "only " + std::to_string(listen.joined) + " of " + std::to_string(listen.connection.sockets.size()) +
        " data streams of " + listen.connection.peer + " joined within " +
        std::to_string(settings_.connect_timeout_ms) +
        " ms: that rank has failed (see its log), or a firewall limits connections to this host. "
        "BAGUA_NET_CONNECT_TIMEOUT_MS sets the deadline");
  }
  return Status::remote_error(
      "no peer connected within " + std::to_string(settings_.connect_timeout_ms) +
      " ms: that rank has failed (see its log), does not use Bagua-Net, or a firewall blocks the way to this host. "
      "BAGUA_NET_CONNECT_TIMEOUT_MS sets the deadline");
}

void InboundHandshakes::stop_listening(const Token& token) { listens_.erase(token); }

void InboundHandshakes::handle_event(std::uint64_t id) {
  const auto listening = listening_ids_.find(id);
  if (listening != listening_ids_.end()) {
    accept_peers(*listening->second);
  } else if (unauthenticated_.count(id) != 0) {
    read_hello(id);
  }
}

void InboundHandshakes::accept_peers(ListeningSocket& listening) {
  // The listener is level-triggered: what is left comes with the next turn.
  for (int accepted = 0; accepted < kAcceptsPerTurn; ++accepted) {
    UnauthenticatedPeer peer;
    const Status status = tcp_accept(listening.socket.get(), &peer.socket, &peer.address);
    if (!status.is_ok()) {
      // Out of descriptors or memory: a level-triggered listener would spin. Pause it, and say so.
      constexpr char kKind[] = "accept";
      if (log_.is_due(LogLevel::kWarn, kKind, monotonic_ms())) {
        log_.add(LogLevel::kWarn, kKind,
                 "Bagua-Net: " + status.message() + " on " + listening.address.to_string() +
                     ": trying again; raise the limit of open files (ulimit -n) if this persists");
      }
      poller_->remove(listening.socket.get());
      listening.paused_until_ms = monotonic_ms() + kAcceptRetryMs;
      return;
    }
    if (!peer.socket.is_open()) return;
    if (unauthenticated_.size() >= max_unauthenticated_) drop_unauthenticated(unauthenticated_.begin()->first);
    peer.deadline_ms = monotonic_ms() + settings_.handshake_timeout_ms;
    const std::uint64_t id = (*next_id_)++;
    if (!poller_->add(peer.socket.get(), id, EPOLLIN).is_ok()) continue;
    unauthenticated_.emplace(id, std::move(peer));
    read_hello(id);  // often there already
  }
}

void InboundHandshakes::read_hello(std::uint64_t id) {
  UnauthenticatedPeer& peer = unauthenticated_.at(id);
  while (peer.received < peer.bytes.size()) {
    const ssize_t got =
        ::recv(peer.socket.get(), peer.bytes.data() + peer.received, peer.bytes.size() - peer.received, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (got <= 0) {
      drop_unauthenticated(id);
      return;
    }
    peer.received += static_cast<std::size_t>(got);
    if (!is_hello_prefix(peer.bytes.data(), peer.received)) {
      constexpr char kKind[] = "other protocol";
      if (log_.is_due(LogLevel::kInfo, kKind, monotonic_ms())) {
        log_.add(
            LogLevel::kInfo, kKind,
            "Bagua-Net: closed a connection from " + peer.address.to_string() + " that does not speak its protocol");
      }
      drop_unauthenticated(id);
      return;
    }
  }

  Hello hello;
  decode_hello(peer.bytes.data(), &hello);
  const Admission admission = admit(peer, hello);
  std::array<std::uint8_t, kReplyBytes> bytes;
  encode_reply(admission.reply, bytes.data());
  // An empty socket buffer always has room for 32 bytes; if the peer is gone already, its streams tell the comm.
  [[maybe_unused]] const auto ignored =
      ::send(peer.socket.get(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (admission.reply.verdict == HandshakeVerdict::kAccepted) {
    take_in(peer, admission);
  } else {
    log_refusal(peer.address, hello, admission.reply.verdict);
  }
  drop_unauthenticated(id);
}

void InboundHandshakes::log_refusal(const SocketAddress& peer, const Hello& hello, HandshakeVerdict verdict) {
  // The comm of a stream that would join was closed meanwhile; the peer goes on without.
  const LogLevel level = is_joining(hello.stream_index) ? LogLevel::kInfo : LogLevel::kWarn;
  const std::string kind = handshake_verdict_name(verdict);
  if (!log_.is_due(level, kind, monotonic_ms())) return;
  log_.add(level, kind,
           "Bagua-Net: refused a connection from " + peer.to_string() + " (host " + hello.host_name + ", process " +
               std::to_string(hello.process_id) + ", protocol version " + std::to_string(hello.protocol_version) +
               ", ours " + std::to_string(kProtocolVersion) + "): " + kind);
}

InboundHandshakes::Admission InboundHandshakes::admit(const UnauthenticatedPeer& peer, const Hello& hello) {
  Admission admission;
  admission.reply.process_id = settings_.process_id;
  if (hello.protocol_version != kProtocolVersion) {
    admission.reply.verdict = HandshakeVerdict::kWrongVersion;
  } else if (is_joining(hello.stream_index)) {
    admission.reply.verdict = admit_to_accepted(hello, &admission);
  } else {
    admission.reply.verdict = admit_to_listen(peer, hello, &admission);
  }
  return admission;
}

HandshakeVerdict InboundHandshakes::admit_to_listen(const UnauthenticatedPeer& peer, const Hello& hello,
                                                    Admission* admission) {
  const auto found = listens_.find(hello.token);
  if (found == listens_.end()) return HandshakeVerdict::kUnknownToken;
  Listen& listen = found->second;
  EstablishedConnection& connection = listen.connection;

  if (hello.stream_index == 0 && listen.state == ListenState::kWaiting) {
    connection.sockets.resize(static_cast<std::size_t>(std::clamp<int>(hello.streams_wanted, 1, most_streams())));
    connection.max_chunk_bytes = std::max(1u, std::min(hello.max_chunk_bytes, settings_.max_chunk_bytes));
    connection.peer =
        peer.address.to_string() + " (host " + hello.host_name + ", process " + std::to_string(hello.process_id) + ")";
    connection.same_host = peer.is_of_this_host();
    listen.comm_id = hello.comm_id;
    listen.state = ListenState::kAssembling;
  } else if (listen.state != ListenState::kAssembling || hello.comm_id != listen.comm_id ||
             hello.stream_index >= connection.sockets.size() || connection.sockets[hello.stream_index].is_open()) {
    return HandshakeVerdict::kUnknownStream;
  }
  if (++listen.joined == connection.sockets.size()) listen.state = ListenState::kReady;
  admission->place = &connection.sockets[hello.stream_index];
  admission->reply.streams = static_cast<std::uint16_t>(connection.sockets.size());
  admission->reply.max_chunk_bytes = connection.max_chunk_bytes;
  if (settings_.recovers && (hello.features & kFeatureRecovery) != 0) connection.recovers = true;
  admission->reply.features = hello.features & kFeatureAcknowledgements;
  if (connection.recovers) admission->reply.features |= kFeatureRecovery;
  // If either end asks for them: data that one rank wants to be checked is checked.
  if (settings_.checksums || (hello.features & kFeatureChecksums) != 0) connection.checksums = true;
  if (connection.checksums) admission->reply.features |= kFeatureChecksums;
  return HandshakeVerdict::kAccepted;
}

HandshakeVerdict InboundHandshakes::admit_to_accepted(const Hello& hello, Admission* admission) {
  const auto found = accepted_.find(hello.comm_id);
  if (found == accepted_.end() || found->second.token != hello.token) return HandshakeVerdict::kUnknownStream;
  Accepted& accepted = found->second;
  admission->arrivals = accepted.arrivals.lock();
  if (admission->arrivals == nullptr || admission->arrivals->is_closed()) return HandshakeVerdict::kUnknownStream;
  if (hello.stream_index == kJoiningStream) {
    if (accepted.streams >= most_streams()) return HandshakeVerdict::kUnknownStream;
    ++accepted.streams;
  } else {
    // It takes the place of another: the comm knows how many it has.
    if (!admission->arrivals->has_free_place()) return HandshakeVerdict::kNoPlace;
    admission->joining = hello.stream_index == kReplacingFirstStream ? Joining::kReplacesFirst : Joining::kReplaces;
  }
  admission->arrivals->announce();
  admission->reply.streams = 1;
  admission->reply.max_chunk_bytes = std::max(1u, std::min(hello.max_chunk_bytes, settings_.max_chunk_bytes));
  return HandshakeVerdict::kAccepted;
}

void InboundHandshakes::take_in(UnauthenticatedPeer& peer, const Admission& admission) {
  const Status options = apply_tcp_options(peer.socket.get(), settings_.tcp, peer.is_of_this_host());
  if (!options.is_ok()) BAGUA_NET_WARN("Bagua-Net: " + options.message());
  poller_->remove(peer.socket.get());
  if (admission.arrivals != nullptr) {
    admission.arrivals->hand_in_announced(std::move(peer.socket), admission.joining);
  } else {
    *admission.place = std::move(peer.socket);
  }
}

void InboundHandshakes::remember_accepted(const Token& token, const Listen& listen) {
  for (auto accepted = accepted_.begin(); accepted != accepted_.end();) {
    accepted = accepted->second.arrivals.expired() ? accepted_.erase(accepted) : std::next(accepted);
  }
  accepted_[listen.comm_id] = {token, static_cast<int>(listen.connection.sockets.size()), listen.connection.arrivals};
}

void InboundHandshakes::drop_unauthenticated(std::uint64_t id) {
  const auto found = unauthenticated_.find(id);
  if (found->second.socket.is_open()) poller_->remove(found->second.socket.get());
  unauthenticated_.erase(found);
}

void InboundHandshakes::expire(std::int64_t now_ms) {
  for (auto peer = unauthenticated_.begin(); peer != unauthenticated_.end();) {
    const auto current = peer++;
    if (now_ms >= current->second.deadline_ms) drop_unauthenticated(current->first);
  }
  for (auto& [name, listening] : listening_) {
    if (listening.paused_until_ms == 0 || now_ms < listening.paused_until_ms) continue;
    listening.paused_until_ms = 0;
    const Status status = poller_->add(listening.socket.get(), listening.id, EPOLLIN);
    if (!status.is_ok()) listening.paused_until_ms = now_ms + kAcceptRetryMs;
  }
}

std::int64_t InboundHandshakes::next_deadline_ms() const {
  std::int64_t deadline = std::numeric_limits<std::int64_t>::max();
  // All unauthenticated peers have the same time: the oldest is due first.
  if (!unauthenticated_.empty()) deadline = unauthenticated_.begin()->second.deadline_ms;
  for (const auto& [name, listening] : listening_) {
    if (listening.paused_until_ms != 0) deadline = std::min(deadline, listening.paused_until_ms);
  }
  return deadline;
}

}  // namespace bagua_net

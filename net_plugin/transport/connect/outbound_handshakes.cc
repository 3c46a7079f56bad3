#include "transport/connect/outbound_handshakes.h"

#include <net/if.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <limits>

#include "base/monotonic_clock.h"
#include "os/local_address.h"
#include "os/random_bytes.h"
#include "transport/connect/handshake_io.h"
#include "transport/recovery/recovery_timing.h"

namespace bagua_net {
namespace {

// A link-local address is valid on one link only. The handle has the listener's number of the link, which differs from
// host to host. On another host, the link is that of the device through which NCCL connects.
SocketAddress handle_address(const ConnectHandle& handle, const NetworkInterface& interface) {
  if (handle.address_family == 4) return {AF_INET, handle.address, handle.port, 0};
  const SocketAddress address(AF_INET6, handle.address, handle.port, handle.scope_id);
  if (!address.is_link_local() || is_of_this_host(address)) return address;
  const unsigned own_number = ::if_nametoindex(interface.name.c_str());
  return own_number == 0 ? address : SocketAddress(AF_INET6, handle.address, handle.port, own_number);
}

Joining joining_as(std::uint16_t stream_index) {
  if (stream_index == kReplacingFirstStream) return Joining::kReplacesFirst;
  return stream_index == kReplacingStream ? Joining::kReplaces : Joining::kMore;
}

}  // namespace

Status OutboundHandshakes::connect(const NetworkInterface& interface, std::uint16_t port, std::uint8_t* handle,
                                   bool* ready, EstablishedConnection* connection) {
  *ready = false;
  // Before the connect state is read: in a handle of another network plugin, these bytes have another meaning.
  ConnectHandle decoded;
  BAGUA_NET_RETURN_IF_ERROR(decode_connect_handle(handle, &decoded));
  const std::uint64_t number = load_connect_state(handle);
  if (number == 0) {
    Attempt attempt;
    attempt.ticket.address = handle_address(decoded, interface);
    attempt.ticket.interface = interface;
    attempt.ticket.token = decoded.token;
    attempt.ticket.timeout_ms = settings_.connect_timeout_ms;
    int wanted = settings_.streams.value_or(first_auto_streams(settings_.has_workers));
    if (!settings_.streams && settings_.optional != nullptr) {
      attempt.connection.optional = std::make_shared<OptionalConnections::Share>(settings_.optional);
      wanted = 1 + attempt.connection.optional->take(wanted - 1);
    }
    const int most = std::max<int>(decoded.max_streams, 1);
    Hello& hello = attempt.ticket.hello;
    hello.streams_wanted = static_cast<std::uint16_t>(std::clamp(wanted, 1, most));
    attempt.connection.most_streams = settings_.streams ? hello.streams_wanted : std::min(kMaxAutoStreams, most);
    hello.listen_id = decoded.listen_id;
    BAGUA_NET_RETURN_IF_ERROR(fill_random(hello.comm_id.data(), hello.comm_id.size()));
    hello.port = port;
    hello.process_id = settings_.process_id;
    hello.host_name = settings_.host_name;
    hello.max_chunk_bytes = settings_.max_chunk_bytes;
    hello.features = kFeatureAcknowledgements | (settings_.checksums ? kFeatureChecksums : 0);
    attempt.streams.resize(1);
    store_connect_state(handle, begin(std::move(attempt)));
    return Status::ok();
  }
  const auto found = attempts_.find(number);
  // The number is in the peer's handle, and may be that of another comm's attempt.
  if (found == attempts_.end() || found->second.is_join || found->second.ticket.hello.listen_id != decoded.listen_id) {
    return Status::internal_error("connect with a handle whose attempt is over: listen again for a new connection");
  }
  if (!found->second.over) return Status::ok();
  const Status failure = found->second.failure;
  *connection = std::move(found->second.connection);
  attempts_.erase(found);
  *ready = failure.is_ok();
  for (auto known = connected_.begin(); known != connected_.end();) {
    known = known->second.expired() ? connected_.erase(known) : std::next(known);
  }
  if (*ready && connection->recovers) connected_[connection->ticket.hello.comm_id] = connection->arrivals;
  return failure;
}

bool OutboundHandshakes::has_comm(const RandomId& comm_id) const {
  if (const auto found = connected_.find(comm_id); found != connected_.end()) {
    const std::shared_ptr<StreamArrivals> arrivals = found->second.lock();
    return arrivals != nullptr && !arrivals->is_closed();
  }
  // The peer may accept all connections and lose them before connect() has returned them here.
  return std::any_of(attempts_.begin(), attempts_.end(), [&](const auto& entry) {
    return !entry.second.is_join && entry.second.ticket.hello.comm_id == comm_id && entry.second.failure.is_ok();
  });
}

void OutboundHandshakes::join(const JoinTicket& ticket, int count, const std::shared_ptr<StreamArrivals>& arrivals) {
  Attempt attempt;
  attempt.is_join = true;
  attempt.ticket = ticket;
  attempt.arrivals = arrivals;
  if (!is_joining(ticket.hello.stream_index)) attempt.ticket.hello.stream_index = kJoiningStream;
  if (ticket.timeout_ms == 0) attempt.ticket.timeout_ms = settings_.connect_timeout_ms;
  attempt.streams.resize(static_cast<std::size_t>(count));
  begin(std::move(attempt));
}

std::uint64_t OutboundHandshakes::begin(Attempt attempt) {
  const std::uint64_t number = next_attempt_++;
  Attempt& begun = attempts_.emplace(number, std::move(attempt)).first->second;
  begun.deadline_ms = monotonic_ms() + begun.ticket.timeout_ms;
  for (std::size_t index = 0; index < begun.streams.size() && !begun.over; ++index) start(begun, number, index);
  return number;
}

std::size_t OutboundHandshakes::attempt_count() const {
  return static_cast<std::size_t>(
      std::count_if(attempts_.begin(), attempts_.end(), [](const auto& entry) { return !entry.second.is_join; }));
}

// [Note: connections bound to their interface]
// If two interfaces are in one subnet, the kernel sends everything over the first of them. A socket that is bound to
// the other interface sends over that one, but receives only what arrives there. The packets of the peer arrive at the
// interface that ARP named, which may be any (net.ipv4.conf.*.arp_ignore = 0, the default) and may change. So bound and
// unbound attempts take turns, with a short time limit. Replacements of lost connections are not bound, and without
// recovery no connection is. Once a peer could be reached only unbound, no connection of that interface is bound.
bool OutboundHandshakes::is_to_be_bound(const Attempt& attempt) const {
  if (settings_.recovery == Recovery::kOff || left_interfaces_.count(attempt.ticket.interface.name) != 0) return false;
  if (attempt.is_join && attempt.ticket.hello.stream_index != kJoiningStream) return false;
  return leaves_elsewhere(attempt.ticket.address, attempt.ticket.interface);
}

void OutboundHandshakes::start(Attempt& attempt, std::uint64_t number, std::size_t index) {
  Stream& stream = attempt.streams[index];
  const bool is_odd = ++stream.tries % 2 != 0;
  stream.state = JoinState::kConnecting;
  stream.received = 0;
  stream.due_ms = monotonic_ms() + (is_odd ? kConnectAnswerMs : kLongConnectAnswerMs);
  stream.is_bound = is_odd && is_to_be_bound(attempt);
  const Status status = tcp_connect(attempt.ticket.address, settings_.tcp,
                                    stream.is_bound ? &attempt.ticket.interface : nullptr, &stream.socket);
  if (!status.is_ok()) {
    retry_or_fail(attempt, index, status);
    return;
  }
  stream.id = (*next_id_)++;
  const Status added = poller_->add(stream.socket.get(), stream.id, EPOLLOUT);
  if (!added.is_ok()) {
    retry_or_fail(attempt, index, added);
    return;
  }
  stream_ids_[stream.id] = {number, index};
}

void OutboundHandshakes::handle_event(std::uint64_t id) {
  const auto found = stream_ids_.find(id);
  if (found == stream_ids_.end()) return;
  const StreamOf owner = found->second;
  Attempt& attempt = attempts_.at(owner.attempt);
  switch (attempt.streams[owner.index].state) {
    case JoinState::kConnecting: finish_connect(attempt, owner.index); break;
    case JoinState::kGreeting: read_challenge(attempt, owner.attempt, owner.index); break;
    case JoinState::kProving: read_reply(attempt, owner.attempt, owner.index); break;
    case JoinState::kJoined:
    case JoinState::kBackingOff: break;
  }
}

void OutboundHandshakes::finish_connect(Attempt& attempt, std::size_t index) {
  Stream& stream = attempt.streams[index];
  const int error_number = tcp_connect_result(stream.socket.get());
  if (error_number != 0) {
    retry_or_fail(attempt, index,
                  Status::system_error("connect to " + attempt.ticket.address.to_string(), error_number));
    return;
  }
  if (!stream.is_bound && stream.tries > 1 && is_to_be_bound(attempt)) tell_of_other_way(attempt);
  const SocketAddress own = local_address(stream.socket.get());
  if (own.same_host(attempt.ticket.address)) {
    // The peer is on the same host, whatever its address looks like.
    attempt.connection.same_host = true;
    const Status options = apply_tcp_options(stream.socket.get(), settings_.tcp, true);
    if (!options.is_ok()) {
      fail(attempt, options);
      return;
    }
  }
  // Connections within a host do not break, and acknowledging small messages costs a tenth of their rate.
  if (settings_.recovery == Recovery::kOn || (settings_.recovery == Recovery::kAuto && !attempt.connection.same_host)) {
    attempt.ticket.hello.features |= kFeatureRecovery;
  }
  Hello hello = attempt.ticket.hello;
  hello.stream_index = attempt.is_join ? attempt.ticket.hello.stream_index : static_cast<std::uint16_t>(index);
  // The peer probes the address from which the connection comes.
  if (!own.same_host(attempt.ticket.interface.address)) hello.port = 0;
  const Status random = fill_random(hello.nonce.data(), hello.nonce.size());
  if (!random.is_ok()) {
    fail(attempt, random);
    return;
  }
  encode_hello(hello, stream.hello.data());
  if (!send_or_retry(attempt, index, stream.hello.data(), stream.hello.size())) return;
  stream.state = JoinState::kGreeting;
  stream.due_ms =
      monotonic_ms() + (stream.is_bound ? std::min<std::int64_t>(kConnectAnswerMs, settings_.handshake_timeout_ms)
                                        : settings_.handshake_timeout_ms);
  const Status status = poller_->modify(stream.socket.get(), stream.id, EPOLLIN);
  if (!status.is_ok()) retry_or_fail(attempt, index, status);
}

bool OutboundHandshakes::send_or_retry(Attempt& attempt, std::size_t index, const std::uint8_t* bytes,
                                       std::size_t count) {
  const int error_number = write_handshake(attempt.streams[index].socket.get(), bytes, count);
  if (error_number != 0) retry(attempt, index, error_number);
  return error_number == 0;
}

std::string OutboundHandshakes::refusal_in(const Stream& stream) {
  Reply reply;
  if (stream.received < kReplyBytes || !decode_reply(stream.answer.data(), &reply).is_ok() ||
      reply.verdict == HandshakeVerdict::kAccepted) {
    return {};
  }
  std::string text = std::string("the listener refuses the connection: ") + handshake_verdict_name(reply.verdict);
  if (reply.verdict != HandshakeVerdict::kWrongVersion) return text;
  return text + " (it speaks version " + std::to_string(reply.protocol_version) + ", this rank speaks version " +
         std::to_string(kProtocolVersion) + ")";
}

bool OutboundHandshakes::read_answer(Attempt& attempt, std::size_t index, std::size_t bytes) {
  Stream& stream = attempt.streams[index];
  const HandshakeStep step = read_handshake(stream.socket.get(), stream.answer.data(), bytes, &stream.received);
  if (step == HandshakeStep::kFailed) {
    // A listener with too many connections that have not sent a hello yet closes the oldest one.
    stream.was_closed = true;
    retry(attempt, index, ECONNRESET, refusal_in(stream));
  }
  return step == HandshakeStep::kDone;
}

void OutboundHandshakes::read_challenge(Attempt& attempt, std::uint64_t number, std::size_t index) {
  if (!read_answer(attempt, index, kChallengeBytes)) return;
  Stream& stream = attempt.streams[index];
  Challenge challenge;
  if (!decode_challenge(stream.answer.data(), &challenge)) {
    read_reply(attempt, number, index);
    return;
  }
  std::copy_n(stream.answer.begin(), kChallengeBytes, stream.challenge.begin());
  const HandshakeProof proof = connector_proof(attempt.ticket.token, stream.hello.data(), stream.challenge.data());
  if (!send_or_retry(attempt, index, proof.data(), proof.size())) return;
  stream.state = JoinState::kProving;
  stream.received = 0;
}

void OutboundHandshakes::read_reply(Attempt& attempt, std::uint64_t number, std::size_t index) {
  if (!read_answer(attempt, index, kReplyBytes)) return;
  Stream& stream = attempt.streams[index];
  Reply reply;
  const Status status = decode_reply(stream.answer.data(), &reply);
  if (!status.is_ok()) {
    retry(attempt, index, ECONNRESET, status.message());
    return;
  }
  // Another process may answer in place of the listener, without a valid proof. A listener that does not have the token
  // sends no proof, and closes the connection instead.
  const bool is_proving = stream.state == JoinState::kProving;
  if (is_proving && !read_answer(attempt, index, kReplyBytes + kProofBytes)) return;
  const bool is_proven = is_proving && is_same_proof(listener_proof(attempt.ticket.token, stream.hello.data(),
                                                                    stream.challenge.data(), stream.answer.data()),
                                                     stream.answer.data() + kReplyBytes);
  if (reply.verdict == HandshakeVerdict::kAccepted) {
    if (is_proven) return take_reply(attempt, number, index, reply);
    retry(attempt, index, ECONNRESET, "the listener does not know the token of the connect handle");
  } else if (!is_proven || reply.verdict == HandshakeVerdict::kNoPlace) {
    retry(attempt, index, ECONNRESET, refusal_in(stream));
  } else {
    fail(attempt, Status::remote_error("connect to " + attempt.ticket.address.to_string() + ": " + refusal_in(stream)));
  }
}

void OutboundHandshakes::take_reply(Attempt& attempt, std::uint64_t number, std::size_t index, const Reply& reply) {
  if (reply.streams < 1 || reply.streams > attempt.ticket.hello.streams_wanted || reply.max_chunk_bytes < 1 ||
      reply.max_chunk_bytes > attempt.ticket.hello.max_chunk_bytes) {
    fail(attempt, Status::remote_error("the listener at " + attempt.ticket.address.to_string() + " granted " +
                                       std::to_string(reply.streams) + " streams and chunks of " +
                                       std::to_string(reply.max_chunk_bytes) + " bytes, more than asked for"));
    return;
  }
  Stream& stream = attempt.streams[index];
  poller_->remove(stream.socket.get());
  stream_ids_.erase(stream.id);
  stream.state = JoinState::kJoined;
  if (attempt.is_join) {
    if (const auto arrivals = attempt.arrivals.lock()) {
      arrivals->hand_in(std::move(stream.socket), joining_as(attempt.ticket.hello.stream_index));
    }
  } else if (index == 0) {
    attempt.connection.max_chunk_bytes = reply.max_chunk_bytes;
    attempt.connection.acknowledges = (reply.features & kFeatureAcknowledgements) != 0;
    attempt.connection.recovers = (reply.features & attempt.ticket.hello.features & kFeatureRecovery) != 0;
    attempt.connection.checksums = (reply.features & kFeatureChecksums) != 0;
    attempt.connection.peer =
        attempt.ticket.address.to_string() + " (process " + std::to_string(reply.process_id) + ")";
    attempt.streams.resize(reply.streams);
    for (std::size_t other = 1; other < attempt.streams.size() && !attempt.over; ++other) {
      start(attempt, number, other);
    }
  }
  if (!attempt.over) complete_if_joined(attempt);
}

void OutboundHandshakes::complete_if_joined(Attempt& attempt) {
  for (const Stream& stream : attempt.streams) {
    if (stream.state != JoinState::kJoined) return;
  }
  if (!attempt.is_join) {
    EstablishedConnection& connection = attempt.connection;
    for (Stream& stream : attempt.streams) connection.sockets.push_back(std::move(stream.socket));
    connection.ticket = attempt.ticket;
    connection.ticket.timeout_ms = 0;  // a joining connection has its own
    // Within a host no connection is limited.
    connection.may_grow =
        !connection.same_host && connection.most_streams > static_cast<int>(connection.sockets.size());
    if (connection.may_grow || connection.recovers) connection.arrivals = std::make_shared<StreamArrivals>();
  }
  attempt.streams.clear();
  attempt.over = true;
}

void OutboundHandshakes::retry_or_fail(Attempt& attempt, std::size_t index, const Status& status) {
  if (may_pass(status.error_number())) {
    retry(attempt, index, status.error_number());
  } else {
    fail(attempt, status);
  }
}

void OutboundHandshakes::retry(Attempt& attempt, std::size_t index, int error_number, std::string refusal) {
  Stream& stream = attempt.streams[index];
  const std::int64_t now_ms = monotonic_ms();
  const bool answered = stream.state == JoinState::kGreeting || stream.state == JoinState::kProving;
  const bool is_refused = error_number == ECONNREFUSED || !refusal.empty();
  release_for_retry(stream);
  attempt.trouble = {error_number, answered, std::move(refusal)};
  // The listening socket belongs to the process, and stays open as long as it has a listen or a comm.
  const bool has_answered = !attempt.is_join && attempt.streams[0].state == JoinState::kJoined;
  if (error_number == ECONNREFUSED && !attempt.is_join && (stream.was_closed || has_answered)) {
    fail(attempt, Status::remote_error("the listener at " + attempt.ticket.address.to_string() +
                                       (has_answered ? " accepted the first data stream" : " closed the connection") +
                                       " during the handshake, and is gone: that rank has failed; see its log"));
    return;
  }
  if (!is_refused || !attempt.is_join) {
    stream.refused_ms = 0;
  } else if (stream.refused_ms == 0) {
    stream.refused_ms = now_ms;
  } else if (now_ms - stream.refused_ms >= kRefusedMs) {
    fail(attempt, Status::remote_error(error_number == ECONNREFUSED
                                           ? "nobody listens at " + attempt.ticket.address.to_string() +
                                                 " any more: the peer's process has ended; see that rank's log"
                                           : "connect to " + attempt.ticket.address.to_string() + ": " +
                                                 attempt.trouble.refusal));
    return;
  }
  stream.state = JoinState::kBackingOff;
  stream.due_ms = now_ms + kConnectAgainMs;
}

// Once for each interface.
void OutboundHandshakes::tell_of_other_way(const Attempt& attempt) {
  const std::string& name = attempt.ticket.interface.name;
  if (!left_interfaces_.insert(name).second) return;
  log_->add(
      LogLevel::kWarn, name,
      "Bagua-Net: " + attempt.ticket.address.host() + " cannot be reached over " + name + " (" +
          attempt.ticket.interface.address.host() +
          "): the connection leaves by another interface, and shares its bandwidth. Give " + name +
          " a route to that network, or leave it out of NCCL_SOCKET_IFNAME. If both interfaces are in one subnet, "
          "set net.ipv4.conf.all.arp_ignore=1 and arp_announce=2 on every host");
}

void OutboundHandshakes::release_for_retry(Stream& stream) {
  // A reset and not a FIN, so that the listener waits for the stream to come again. SO_LINGER may fail on a broken
  // socket.
  const linger reset{1, 0};
  if (stream.socket.is_open()) ::setsockopt(stream.socket.get(), SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
  release(stream);
}

void OutboundHandshakes::release(Stream& stream) {
  if (!stream.socket.is_open()) return;
  if (stream_ids_.erase(stream.id) != 0) poller_->remove(stream.socket.get());
  stream.socket.reset();
}

void OutboundHandshakes::fail(Attempt& attempt, Status failure) {
  if (attempt.is_join && attempt.ticket.hello.stream_index != kJoiningStream) {
    if (const auto arrivals = attempt.arrivals.lock()) {
      arrivals->report({joining_as(attempt.ticket.hello.stream_index), failure.message()});
    }
  }
  for (Stream& stream : attempt.streams) release(stream);
  attempt.streams.clear();
  attempt.failure = std::move(failure);
  attempt.over = true;
}

void OutboundHandshakes::fail_all(const Status& failure) {
  for (auto& [number, attempt] : attempts_) {
    if (!attempt.over) fail(attempt, failure);
  }
}

void OutboundHandshakes::expire(std::int64_t now_ms) {
  for (auto entry = attempts_.begin(); entry != attempts_.end();) {
    const auto current = entry++;
    const std::uint64_t number = current->first;
    Attempt& attempt = current->second;
    if (attempt.is_join && (attempt.over || attempt.arrivals.expired())) {
      if (attempt.over && !attempt.failure.is_ok()) {
        constexpr char kKind[] = "join";
        if (log_->is_due(LogLevel::kInfo, kKind, now_ms)) {
          log_->add(LogLevel::kInfo, kKind,
                    "Bagua-Net: no further connection to " + attempt.ticket.address.to_string() +
                        ", going on without: " + attempt.failure.message());
        }
      }
      for (Stream& stream : attempt.streams) release(stream);
      attempts_.erase(current);
      continue;
    }
    if (attempt.over) {
      if (now_ms >= attempt.deadline_ms + settings_.connect_timeout_ms) attempts_.erase(current);
      continue;
    }
    if (now_ms >= attempt.deadline_ms) {
      fail(attempt, Status::remote_error(
                        "could not connect to " + attempt.ticket.address.to_string() + " within " +
                        std::to_string(attempt.ticket.timeout_ms) +
                        " ms: " + cause_of(attempt.trouble, attempt.ticket.address, attempt.ticket.interface) + ". " +
                        (attempt.ticket.timeout_ms == settings_.connect_timeout_ms ? "BAGUA_NET_CONNECT_TIMEOUT_MS"
                                                                                   : "BAGUA_NET_KEEPALIVE_S") +
                        " sets the deadline"));
      continue;
    }
    for (std::size_t index = 0; index < attempt.streams.size() && !attempt.over; ++index) {
      const Stream& stream = attempt.streams[index];
      if (stream.state == JoinState::kJoined || now_ms < stream.due_ms) continue;
      if (stream.state == JoinState::kBackingOff) {
        start(attempt, number, index);
      } else {
        retry(attempt, index, ETIMEDOUT);
      }
    }
  }
}

std::int64_t OutboundHandshakes::next_deadline_ms() const {
  std::int64_t deadline = std::numeric_limits<std::int64_t>::max();
  for (const auto& [number, attempt] : attempts_) {
    if (attempt.over) {
      deadline = std::min(deadline, attempt.deadline_ms + settings_.connect_timeout_ms);
      continue;
    }
    deadline = std::min(deadline, attempt.deadline_ms);
    for (const Stream& stream : attempt.streams) {
      if (stream.state != JoinState::kJoined) deadline = std::min(deadline, stream.due_ms);
    }
  }
  return deadline;
}

}  // namespace bagua_net

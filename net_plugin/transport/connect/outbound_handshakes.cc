#include "transport/connect/outbound_handshakes.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <limits>

#include "base/monotonic_clock.h"
#include "os/network_interface.h"
#include "os/random_bytes.h"
#include "transport/recovery/recovery_timing.h"
#include "transport/tuning/rate_estimator.h"
#include "wire/sealed_handshake.h"

namespace bagua_net {
namespace {

constexpr char kSeeItsLog[] = "See that rank's log";

std::string answered_cause(const ConnectFailure& failure) {
  if (!failure.refusal.empty()) {
    return failure.refusal +
           ", which nothing proves to come from that rank.\nIt may have ended, and another program "
           "have its port. " +
           kSeeItsLog;
  }
  if (failure.error_number == ETIMEDOUT) {
    return std::string(
               "it accepts connections, and says nothing on them.\nThat rank is stopped or overloaded, or "
               "another program has its port. ") +
           kSeeItsLog;
  }
  return std::string(
             "it closes connections during the handshake.\nThat rank may open too few files (ulimit -n), or "
             "another program has its port. ") +
         kSeeItsLog;
}

std::string error_cause(const ConnectFailure& failure, const std::string& from, const NetworkInterface& interface) {
  const int error = failure.error_number;
  switch (error) {
    case EMFILE:
    case ENFILE: return "this process has no free file descriptor.\nRaise the limit of open files (ulimit -n)";
    case ENOBUFS:
    case ENOMEM:
    case ENOSPC:
      return "this host has no memory for another socket.\nFree memory, or raise fs.epoll.max_user_watches and "
             "net.ipv4.tcp_mem";
    case EADDRINUSE:
    case EADDRNOTAVAIL:
      if (is_tentative(interface.address)) {
        return from + " is still being checked for duplicates.\nLook for another host with this address (ip -6 addr)";
      }
      return "no local port or address is left for it on " + from +
             ".\nWiden net.ipv4.ip_local_port_range, or use fewer connections (BAGUA_NET_NSTREAMS); check that the "
             "interface still has its address";
    case ENETUNREACH:
    case EHOSTUNREACH:
    case ENETDOWN:
    case ENODEV:
    case EINVAL:
      return "there is no way to it from " + from + " (" + Status::system_error("", error).message().substr(2) +
             ").\nThe two ranks use interfaces of different networks, or that host or the link to it is down: check "
             "NCCL_SOCKET_IFNAME on both, and the routes";
    case EACCES:
    case EPERM:
      return "a firewall or a route forbids it.\nAllow TCP between the hosts, to all ports of "
             "net.ipv4.ip_local_port_range";
    case ECONNREFUSED:
      return std::string("nobody listens there.\nThat rank has ended, or a firewall rejects the connection. ") +
             kSeeItsLog;
    case 0:
    case ETIMEDOUT:
      return "no answer to " + from +
             ".\nA firewall drops the packets, that host is down, or the two ranks use interfaces of different "
             "networks: check NCCL_SOCKET_IFNAME on both";
    default: return Status::system_error("from " + from, error).message() + ".\n" + kSeeItsLog;
  }
}

std::string cause_of(const ConnectFailure& failure, const SocketAddress& peer, const NetworkInterface& interface) {
  const std::string from = interface.name + " (" + interface.address.host() + ")";
  const bool is_shortage = failure.error_number == EMFILE || failure.error_number == ENFILE;
  const bool is_silent = failure.answered && failure.refusal.empty();
  // A process that listens at such an address is not necessarily that rank.
  if (is_of_this_host(peer) && !is_silent && !is_shortage) {
    return "that is an address of this host itself" + (failure.refusal.empty() ? "" : ", and " + failure.refusal) +
           ".\nIf that rank runs elsewhere, it uses an interface whose address "
           "every host has, such as lo or docker0: set NCCL_SOCKET_IFNAME there. Otherwise it has ended; see its log";
  }
  if (peer.family() != interface.address.family() && !failure.answered && !is_shortage) {
    const bool is_ipv6 = peer.is_ipv6();
    return std::string("that rank uses ") + (is_ipv6 ? "IPv6" : "IPv4") + ", this one " + (is_ipv6 ? "IPv4" : "IPv6") +
           " on " + from + ".\nSet NCCL_SOCKET_FAMILY alike on every rank (AF_INET or AF_INET6)";
  }
  return failure.answered ? answered_cause(failure) : error_cause(failure, from, interface);
}

}  // namespace

bool may_pass(int error_number) {
  switch (error_number) {
    case EAFNOSUPPORT:  // no such family in this kernel
    case EPROTONOSUPPORT:
    case EBADF:
    case EFAULT:
    case ENOTSOCK: return false;
    default: return error_number != 0;
  }
}

Status deadline_error(const ConnectFailure& failure, const NicPath& path, int timeout_ms, const char* setting) {
  return Status::remote_error("could not connect to " + path.address.to_string() + " within " +
                              std::to_string(timeout_ms) + " ms: " + cause_of(failure, path.address, path.interface) +
                              ". " + setting + " sets the deadline");
}

namespace {

// Of a connection that is to go over a certain path: there is always one more, for a packet that was lost.
constexpr int kTriesOfAPath = 2;

// This host is short of something, and other paths need it as well.
bool is_shortage(int error_number) {
  switch (error_number) {
    case EMFILE:
    case ENFILE:
    case ENOBUFS:
    case ENOMEM:
    case ENOSPC: return true;
    default: return false;
  }
}

}  // namespace

Status OutboundHandshakes::connect(const std::vector<NetworkInterface>& interfaces,
                                   const std::vector<std::uint16_t>& ports, std::uint8_t* handle, bool* ready,
                                   EstablishedConnection* connection) {
  *ready = false;
  // Before the connect state is read: in a handle of another network plugin, these bytes have another meaning.
  ConnectHandle decoded;
  BAGUA_NET_RETURN_IF_ERROR(decode_connect_handle(handle, &decoded));
  const std::uint64_t number = load_connect_state(handle);
  if (number == 0) {
    Attempt attempt;
    attempt.connection.turn = turns_++;
    attempt.ticket.paths = find_paths(interfaces, ports, decoded);
    attempt.ticket.key = handshake_key(decoded.token, settings_.secret.get());
    attempt.mismatch = protection_mismatch(settings_.protection(), decoded.protection);
    attempt.ticket.timeout_ms = settings_.connect_timeout_ms;
    int wanted = settings_.streams.value_or(
        first_auto_streams(settings_.has_workers, expected_paths(attempt.ticket.paths, interfaces, decoded)));
    if (!settings_.streams && settings_.optional != nullptr) {
      attempt.connection.optional = std::make_shared<OptionalConnections::Share>(settings_.optional);
      wanted = 1 + attempt.connection.optional->take(wanted - 1);
    }
    const int most = std::max<int>(decoded.max_streams, 1);
    Hello& hello = attempt.ticket.hello;
    hello.streams_wanted = static_cast<std::uint16_t>(std::clamp(wanted, 1, most));
    attempt.connection.most_streams = settings_.streams ? hello.streams_wanted : std::min(kMaxAutoStreams, most);
    BAGUA_NET_RETURN_IF_ERROR(fill_first_hello(settings_, decoded, &hello));
    attempt.streams.resize(1);
    attempt.handle = decoded;
    attempt.handle.token = {};
    attempt.interfaces = interfaces;
    attempt.ports = ports;
    if (decoded.unnamed == 0) log_mismatch(attempt);
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
  if (*ready && connection->recovers) opened_.add(connection->ticket, connection->arrivals);
  return failure;
}

bool OutboundHandshakes::has_comm(const RandomId& comm_id) const {
  if (opened_.knows(comm_id)) return opened_.has(comm_id);
  // The peer may accept all connections and lose them before connect() has returned them here.
  return std::any_of(attempts_.begin(), attempts_.end(), [&](const auto& entry) {
    return !entry.second.is_join && entry.second.ticket.hello.comm_id == comm_id && entry.second.failure.is_ok();
  });
}

HandshakeKeyRef OutboundHandshakes::find_key(const RandomId& listen_id) const {
  for (const auto& [number, attempt] : attempts_) {
    if (!attempt.is_join && attempt.ticket.hello.listen_id == listen_id) return attempt.ticket.key;
  }
  return opened_.find_key(listen_id);
}

OutboundHandshakes::Attempt OutboundHandshakes::make_join(const JoinTicket& ticket, int count,
                                                          const std::shared_ptr<StreamArrivals>& arrivals) {
  Attempt attempt;
  attempt.is_join = true;
  attempt.ticket = ticket;
  attempt.arrivals = arrivals;
  if (!is_joining(ticket.hello.stream_index)) attempt.ticket.hello.stream_index = kJoiningStream;
  attempt.streams.resize(static_cast<std::size_t>(count));
  return attempt;
}

void OutboundHandshakes::join(const JoinTicket& ticket, int count, const std::shared_ptr<StreamArrivals>& arrivals) {
  const int timeout_ms = ticket.timeout_ms == 0 ? settings_.connect_timeout_ms : ticket.timeout_ms;
  for (auto& [number, attempt] : attempts_) {
    if (!attempt.prepared_for || attempt.over || !attempt.is_for(ticket, arrivals)) continue;
    if (attempt.streams[0].state != JoinState::kPrepared) continue;
    attempt.prepared_for.reset();
    attempt.ticket.timeout_ms = timeout_ms;
    attempt.deadline_ms = loop_->now_ms() + timeout_ms;
    prove(attempt, 0);
    return;
  }
  Attempt attempt = make_join(ticket, count, arrivals);
  attempt.ticket.timeout_ms = timeout_ms;
  begin(std::move(attempt));
}

Prepared OutboundHandshakes::prepare(const JoinTicket& ticket, std::size_t place,
                                     const std::shared_ptr<StreamArrivals>& arrivals) {
  const auto found = std::find_if(attempts_.begin(), attempts_.end(), [&](const auto& entry) {
    return entry.second.prepared_for == place && entry.second.is_for(ticket, arrivals);
  });
  if (found != attempts_.end() && found->second.over) {
    log_failed_join(found->second);
    attempts_.erase(found);
    return Prepared::kFailed;
  }
  if (found != attempts_.end()) {
    return found->second.streams[0].state == JoinState::kPrepared ? Prepared::kReady : Prepared::kWaiting;
  }
  Attempt attempt = make_join(ticket, 1, arrivals);
  attempt.ticket.timeout_ms = settings_.handshake_timeout_ms;  // the listener's is probably the same
  attempt.prepared_for = place;
  begin(std::move(attempt));
  return Prepared::kWaiting;
}

std::uint64_t OutboundHandshakes::begin(Attempt attempt) {
  const std::uint64_t number = next_attempt_++;
  Attempt& begun = attempts_.emplace(number, std::move(attempt)).first->second;
  const std::int64_t now_ms = monotonic_ms();
  begun.deadline_ms = loop_->now_ms() + begun.ticket.timeout_ms;
  const std::vector<std::size_t> usable = settings_.paths->usable(begun.ticket.paths, now_ms);
  for (std::size_t index = 0; index < begun.streams.size(); ++index) {
    begun.streams[index].path = usable[index % usable.size()];
  }
  if (begun.is_join && begun.ticket.joining() != Joining::kMore) begun.streams[0].path = begun.ticket.first_path;
  if (!begun.is_join && begun.has_choice()) {
    begun.streams[0].path = settings_.paths->begin_comm(begun.ticket.paths, now_ms);
  }
  for (std::size_t index = 0; index < begun.streams.size() && !begun.over; ++index) start(begun, number, index);
  return number;
}

std::size_t OutboundHandshakes::attempt_count() const {
  return static_cast<std::size_t>(
      std::count_if(attempts_.begin(), attempts_.end(), [](const auto& entry) { return !entry.second.is_join; }));
}

void OutboundHandshakes::start(Attempt& attempt, std::uint64_t number, std::size_t index) {
  Stream& stream = attempt.streams[index];
  const bool is_odd = ++stream.tries % 2 != 0;
  stream.state = JoinState::kConnecting;
  stream.due_ms = loop_->now_ms() + (is_odd ? kConnectAnswerMs : kLongConnectAnswerMs);
  const NicPath& path = attempt.path_of(stream);
  stream.is_bound = attempt.has_choice() || (is_odd && binding_.is_to_be_bound(attempt.ticket, path));
  const Status status =
      tcp_connect(path.address, settings_.tcp, stream.is_bound ? &path.interface : nullptr, &stream.socket);
  if (!status.is_ok()) {
    retry_or_fail(attempt, index, status);
    return;
  }
  stream.id = loop_->next_id++;
  const Status added = loop_->poller->add(stream.socket.get(), stream.id, EPOLLOUT);
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
    case JoinState::kHandshaking: read_answer(attempt, owner.attempt, owner.index); break;
    case JoinState::kPrepared: retry(attempt, owner.index, ECONNRESET); break;  // the listener waits for the proof
    case JoinState::kJoined:
    case JoinState::kBackingOff: break;
  }
}

void OutboundHandshakes::finish_connect(Attempt& attempt, std::size_t index) {
  Stream& stream = attempt.streams[index];
  const NicPath& path = attempt.path_of(stream);
  const int error_number = tcp_connect_result(stream.socket.get());
  if (error_number != 0) {
    retry_or_fail(attempt, index, Status::system_error("connect to " + path.address.to_string(), error_number));
    return;
  }
  if (!stream.is_bound && stream.tries > 1 && binding_.is_to_be_bound(attempt.ticket, path)) binding_.on_unbound(path);
  const SocketAddress own = local_address(stream.socket.get());
  if (own.same_host(path.address)) {
    // The peer is on the same host, whatever its address looks like.
    attempt.connection.same_host = true;
    const Status options = apply_tcp_options(stream.socket.get(), settings_.tcp, true);
    if (!options.is_ok()) {
      fail(attempt, options);
      return;
    }
  }
  if (!attempt.is_join && index == 0 && !settings_.streams) begin_with_fewer_if_long(attempt);
  // Connections within a host do not break, and acknowledging small messages costs a tenth of their rate.
  if (settings_.recovery == Recovery::kOn || (settings_.recovery == Recovery::kAuto && !attempt.connection.same_host)) {
    attempt.ticket.hello.features |= kFeatureRecovery;
  }
  Hello hello = attempt.ticket.hello;
  hello.stream_index = attempt.is_join ? attempt.ticket.hello.stream_index : static_cast<std::uint16_t>(index);
  // The peer probes the address from which the connection comes.
  hello.port = own.same_host(path.interface.address) ? path.port : std::uint16_t{0};
  if (++last_serial_ == 0) ++last_serial_;  // 0: none
  hello.serial = last_serial_;
  const Status random = fill_random(hello.nonce.data(), hello.nonce.size());
  if (!random.is_ok()) {
    fail(attempt, random);
    return;
  }
  const std::size_t addresses = !attempt.is_join && index == 0 ? attempt.handle.unnamed : 0;
  const int hello_error = stream.handshake.send_hello(stream.socket.get(), hello, attempt.ticket.key, addresses);
  if (hello_error != 0) {
    retry(attempt, index, hello_error);
    return;
  }
  await_answer(attempt, stream);
  const Status status = loop_->poller->modify(stream.socket.get(), stream.id, EPOLLIN);
  if (!status.is_ok()) retry_or_fail(attempt, index, status);
}

void OutboundHandshakes::await_answer(const Attempt& attempt, Stream& stream) const {
  stream.state = JoinState::kHandshaking;
  stream.asked_ms = loop_->now_ms();
  // Another path may do, if this one turns out to be silent.
  stream.due_ms = stream.asked_ms + (stream.is_bound || attempt.has_choice()
                                         ? std::min<std::int64_t>(kConnectAnswerMs, settings_.handshake_timeout_ms)
                                         : settings_.handshake_timeout_ms);
}

void OutboundHandshakes::begin_with_fewer_if_long(Attempt& attempt) {
  EstablishedConnection& connection = attempt.connection;
  // Of the packets that opened the connection, which the kernels answer.
  connection.is_long = 1e3 * static_cast<double>(tcp_round_trip_us(attempt.streams[0].socket.get())) >= kLongPathNs;
  if (!connection.is_long) return;
  std::uint16_t& wanted = attempt.ticket.hello.streams_wanted;
  const std::size_t paths = expected_paths(attempt.ticket.paths, attempt.interfaces, attempt.handle);
  wanted = std::min(wanted, static_cast<std::uint16_t>(first_auto_streams(settings_.has_workers, paths, true)));
  if (connection.optional != nullptr) connection.optional->keep(wanted - 1);
}

void OutboundHandshakes::read_answer(Attempt& attempt, std::uint64_t number, std::size_t index) {
  Stream& stream = attempt.streams[index];
  switch (stream.handshake.read(stream.socket.get())) {
    case ConnectorHandshake::Answer::kWaiting: return;
    case ConnectorHandshake::Answer::kClosed:
      // A listener with too many connections that have not sent a hello yet closes the oldest one.
      stream.was_closed = true;
      retry(attempt, index, ECONNRESET, stream.handshake.refusal());
      return;
    case ConnectorHandshake::Answer::kChallenge:
      if (!attempt.prepared_for) return prove(attempt, index);
      stream.state = JoinState::kPrepared;
      stream.due_ms = attempt.deadline_ms;
      if (const auto arrivals = attempt.arrivals.lock()) arrivals->tell_of_prepared();
      return;
    case ConnectorHandshake::Answer::kReply: judge_reply(attempt, number, index);
  }
}

void OutboundHandshakes::prove(Attempt& attempt, std::size_t index) {
  Stream& stream = attempt.streams[index];
  // The time of its own. If the peer answers late and the rest of the hello's time counted, another connection would be
  // opened while the proof is under way.
  await_answer(attempt, stream);
  const int error_number = stream.handshake.send_proof(stream.socket.get());
  if (error_number != 0) retry(attempt, index, error_number);
}

void OutboundHandshakes::judge_reply(Attempt& attempt, std::uint64_t number, std::size_t index) {
  const ConnectorHandshake& handshake = attempt.streams[index].handshake;
  Reply reply;
  const Status status = handshake.reply(&reply);
  if (!status.is_ok()) {
    retry(attempt, index, ECONNRESET, status.message());
    return;
  }
  // Another process may answer in place of the listener, without a valid proof.
  const bool is_proven = handshake.is_proven();
  if (reply.verdict == HandshakeVerdict::kAccepted) {
    if (is_proven) return take_reply(attempt, number, index, reply);
    retry(attempt, index, ECONNRESET, "the listener does not know the token of the connect handle");
  } else if (!is_proven || reply.verdict == HandshakeVerdict::kNoPlace) {
    retry(attempt, index, ECONNRESET, handshake.refusal());
  } else {
    fail(attempt, Status::remote_error("connect to " + attempt.path_of(attempt.streams[index]).address.to_string() +
                                       ": " + handshake.refusal()));
  }
}

void OutboundHandshakes::take_reply(Attempt& attempt, std::uint64_t number, std::size_t index, const Reply& reply) {
  if (reply.streams < 1 || reply.streams > attempt.ticket.hello.streams_wanted || reply.max_chunk_bytes < 1 ||
      reply.max_chunk_bytes > attempt.ticket.hello.max_chunk_bytes) {
    fail(attempt,
         Status::remote_error("the listener at " + attempt.path_of(attempt.streams[index]).address.to_string() +
                              " granted " + std::to_string(reply.streams) + " streams and chunks of " +
                              std::to_string(reply.max_chunk_bytes) + " bytes, more than asked for"));
    return;
  }
  Stream& stream = attempt.streams[index];
  if (attempt.has_choice()) {
    settings_.paths->on_connected(attempt.path_of(stream), tcp_round_trip_us(stream.socket.get()), monotonic_ms());
  }
  loop_->poller->remove(stream.socket.get());
  stream_ids_.erase(stream.id);
  stream.state = JoinState::kJoined;
  stream.socket.keys = stream.handshake.take_keys();
  if (attempt.is_join) {
    if (const auto arrivals = attempt.arrivals.lock()) {
      arrivals->hand_in(std::move(stream.socket), attempt.ticket.joining(), stream.path);
    }
  } else if (index == 0) {
    attempt.connection.max_chunk_bytes = reply.max_chunk_bytes;
    attempt.connection.acknowledges = (reply.features & kFeatureAcknowledgements) != 0;
    attempt.connection.recovers = (reply.features & attempt.ticket.hello.features & kFeatureRecovery) != 0;
    attempt.connection.checksums = (reply.features & kFeatureChecksums) != 0;
    // Its first address, whichever this stream goes to: the comms to one peer have one name.
    attempt.connection.peer =
        address_in(attempt.handle, attempt.path_of(attempt.streams[index]).interface).to_string() + " (process " +
        std::to_string(reply.process_id) + ")";
    attempt.streams.resize(reply.streams);
    if (attempt.handle.unnamed > 0) take_addresses(attempt, attempt.streams[0].handshake.addresses());
    attempt.connection.own_paths =
        share_paths(reply.streams, attempt.ticket.paths.size(), attempt.streams[0].path, settings_.has_workers);
    const std::int64_t now_ms = monotonic_ms();
    const std::vector<std::size_t> usable = settings_.paths->usable(attempt.ticket.paths, now_ms);
    for (std::size_t other = 1; other < attempt.streams.size(); ++other) {
      const std::size_t own = attempt.connection.own_paths[other];
      const bool is_left_out = settings_.paths->is_left_out(attempt.ticket.paths[own], now_ms);
      attempt.streams[other].path = is_left_out ? usable[own % usable.size()] : own;
    }
    for (std::size_t other = 1; other < attempt.streams.size() && !attempt.over; ++other) {
      start(attempt, number, other);
    }
  }
  if (!attempt.over) complete_if_joined(attempt);
}

void OutboundHandshakes::take_addresses(Attempt& attempt, const std::vector<HandleAddress>& addresses) {
  ConnectHandle& handle = attempt.handle;
  handle.further.insert(handle.further.end(), addresses.begin(), addresses.end());
  handle.unnamed = 0;
  const NicPath in_use = attempt.path_of(attempt.streams[0]);
  attempt.ticket.paths = find_paths(attempt.interfaces, attempt.ports, handle, &in_use);
  attempt.streams[0].path = attempt.trouble_path = 0;
  log_mismatch(attempt);
}

void OutboundHandshakes::log_mismatch(const Attempt& attempt) {
  const RareLog::Line line = describe_mismatch(attempt.interfaces, attempt.handle, attempt.ticket.paths);
  if (line.text.empty()) return;
  loop_->log.add_if_due(line.level, line.kind, [&] { return line.text; });
}

void OutboundHandshakes::complete_if_joined(Attempt& attempt) {
  for (const Stream& stream : attempt.streams) {
    if (stream.state != JoinState::kJoined) return;
  }
  if (!attempt.is_join) {
    EstablishedConnection& connection = attempt.connection;
    for (Stream& stream : attempt.streams) {
      connection.sockets.push_back(std::move(stream.socket));
      connection.paths.push_back(stream.path);
    }
    const std::size_t first = connection.own_paths[0];
    const std::size_t nearest = settings_.paths->nearest(attempt.ticket.paths, first, monotonic_ms());
    if (nearest != first) {
      // Without workers, the first one carries its share of large messages: another stream takes its place there.
      const auto other = std::find(connection.own_paths.begin() + 1, connection.own_paths.end(), nearest);
      if (!settings_.has_workers && other != connection.own_paths.end()) *other = first;
      connection.own_paths[0] = nearest;
    }
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

void OutboundHandshakes::change_path(Attempt& attempt, std::size_t index, int error_number, bool answered) {
  Stream& stream = attempt.streams[index];
  const NicPath& path = attempt.path_of(stream);
  const std::int64_t now_ms = monotonic_ms();
  // A process that is stopped or overloaded answers late over every path.
  if (!is_shortage(error_number) && !(answered && error_number == ETIMEDOUT)) {
    const RareLog::Line line = settings_.paths->on_failed(path, Status::system_error("connect", error_number), now_ms);
    if (!line.text.empty()) loop_->log.add_if_due(line.level, line.kind, [&line] { return line.text; });
  }
  // The first stream decides whether there is a connection, and a comm waits for a replacement.
  const bool is_urgent = attempt.is_join ? attempt.ticket.joining() != Joining::kMore : index == 0;
  if (!is_urgent && stream.tries % kTriesOfAPath != 0 && !settings_.paths->is_left_out(path, now_ms)) return;
  const std::vector<std::size_t> usable = settings_.paths->usable(attempt.ticket.paths, now_ms);
  const auto next = std::upper_bound(usable.begin(), usable.end(), stream.path);
  stream.path = next == usable.end() ? usable.front() : *next;
}

bool OutboundHandshakes::may_be_answered(const Attempt& attempt, Stream& stream, std::int64_t now_ms) const {
  if (!attempt.has_choice() || tcp_undelivered_bytes(stream.socket.get()) > 0) return false;
  // The path may have failed with the answer on its way. A process that takes longer gets twice the time each time.
  const std::int64_t limit_ms = std::min<std::int64_t>(
      std::int64_t{kLongConnectAnswerMs} << std::min(stream.unanswered_hellos, 10), settings_.handshake_timeout_ms);
  stream.due_ms = std::min(now_ms + kConnectAnswerMs, stream.asked_ms + limit_ms);
  if (now_ms < stream.due_ms) return true;
  ++stream.unanswered_hellos;
  return false;
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
  const std::string address = attempt.path_of(stream).address.to_string();
  // The listener has been told, so that its log says it, too.
  if (!attempt.mismatch.empty()) {
    fail(attempt, Status::invalid_usage("connect to " + address + ": " + attempt.mismatch));
    return;
  }
  if (attempt.prepared_for) {
    fail(attempt, refusal.empty() ? Status::system_error("connect to " + address, error_number)
                                  : Status::remote_error("connect to " + address + ": " + refusal));
    return;
  }
  const std::int64_t now_ms = loop_->now_ms();
  const bool answered = stream.state == JoinState::kHandshaking;
  // Over a path that has never worked, a firewall may refuse.
  const bool is_refused = (error_number == ECONNREFUSED || !refusal.empty()) &&
                          (!attempt.has_choice() || settings_.paths->has_worked(attempt.path_of(stream)));
  release_for_retry(stream);
  attempt.trouble = {error_number, answered, std::move(refusal)};
  attempt.trouble_path = stream.path;
  // The listening socket belongs to the process, and stays open as long as it has a listen or a comm.
  // At another address, another process may refuse.
  const bool has_answered =
      !attempt.is_join && attempt.streams[0].state == JoinState::kJoined && attempt.streams[0].path == stream.path;
  if (error_number == ECONNREFUSED && !attempt.is_join && (stream.was_closed || has_answered)) {
    fail(attempt, Status::remote_error("the listener at " + address +
                                       (has_answered ? " accepted the first data stream" : " closed the connection") +
                                       " during the handshake, and is gone: that rank has failed; see its log"));
    return;
  }
  if (!is_refused || !attempt.is_join) {
    // Another path may be silent while the host refuses over this one.
    if (stream.path == stream.refused_path) stream.refused_ms = 0;
  } else if (stream.refused_ms == 0) {
    stream.refused_ms = now_ms;
    stream.refused_path = stream.path;
  } else if (now_ms - stream.refused_ms >= kRefusedMs) {
    fail(attempt, Status::remote_error(error_number == ECONNREFUSED
                                           ? "nobody listens at " + address +
                                                 " any more: the peer's process has ended; see that rank's log"
                                           : "connect to " + address + ": " + attempt.trouble.refusal));
    return;
  }
  if (attempt.has_choice()) change_path(attempt, index, error_number, answered);
  stream.state = JoinState::kBackingOff;
  stream.due_ms = now_ms + kConnectAgainMs;
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
  if (stream_ids_.erase(stream.id) != 0) loop_->poller->remove(stream.socket.get());
  stream.socket.reset();
}

void OutboundHandshakes::fail(Attempt& attempt, Status failure) {
  if (attempt.is_join && attempt.ticket.hello.stream_index != kJoiningStream && !attempt.prepared_for) {
    if (const auto arrivals = attempt.arrivals.lock()) {
      arrivals->report({attempt.ticket.joining(), failure.message()});
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
    // Of one that failed before its stream has ended, the comm asks.
    const bool is_over = attempt.prepared_for ? now_ms >= attempt.deadline_ms : attempt.over;
    if (attempt.is_join && (is_over || attempt.arrivals.expired())) {
      if (attempt.over) log_failed_join(attempt);
      for (Stream& stream : attempt.streams) release(stream);
      attempts_.erase(current);
      continue;
    }
    if (attempt.over) {
      if (now_ms >= attempt.deadline_ms + settings_.connect_timeout_ms) attempts_.erase(current);
      continue;
    }
    if (now_ms >= attempt.deadline_ms) {
      const bool is_of_connecting = attempt.ticket.timeout_ms == settings_.connect_timeout_ms;
      fail(attempt,
           deadline_error(attempt.trouble, attempt.ticket.paths[attempt.trouble_path], attempt.ticket.timeout_ms,
                          is_of_connecting ? "BAGUA_NET_CONNECT_TIMEOUT_MS" : "BAGUA_NET_KEEPALIVE_S"));
      continue;
    }
    for (std::size_t index = 0; index < attempt.streams.size() && !attempt.over; ++index) {
      Stream& stream = attempt.streams[index];
      if (stream.state == JoinState::kJoined || now_ms < stream.due_ms) continue;
      if (stream.state == JoinState::kHandshaking && may_be_answered(attempt, stream, now_ms)) continue;
      if (stream.state == JoinState::kBackingOff) {
        start(attempt, number, index);
      } else {
        retry(attempt, index, ETIMEDOUT);
      }
    }
  }
}

void OutboundHandshakes::log_failed_join(const Attempt& attempt) {
  if (attempt.failure.is_ok()) return;
  loop_->log.add_if_due(LogLevel::kInfo, "join", [&attempt] {
    return "Bagua-Net: no further connection to " + attempt.ticket.paths[0].address.to_string() +
           ", going on without: " + attempt.failure.message();
  });
}

std::int64_t OutboundHandshakes::next_deadline_ms() const {
  std::int64_t deadline = std::numeric_limits<std::int64_t>::max();
  for (const auto& [number, attempt] : attempts_) {
    if (attempt.over && !attempt.prepared_for) {
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

Status fill_first_hello(const HandshakeSettings& settings, const ConnectHandle& handle, Hello* hello) {
  hello->listen_id = handle.listen_id;
  hello->key_id = settings.protection().key_id;
  if (settings.encrypts) hello->cipher = choose_cipher(settings.uses_aes, handle.has_aes);
  hello->process_id = settings.process_id;
  hello->host_name = settings.host_name;
  hello->max_chunk_bytes = settings.max_chunk_bytes;
  hello->features = kFeatureAcknowledgements | kFeatureLostAddresses | (settings.checksums ? kFeatureChecksums : 0) |
                    (settings.uses_aes ? kFeatureAes : 0);
  return fill_random(hello->comm_id.data(), hello->comm_id.size());
}

bool InterfaceBinding::is_to_be_bound(const JoinTicket& ticket, const NicPath& path) const {
  if (settings_.recovery == Recovery::kOff || left_.count(path.interface.name) != 0) return false;
  if (is_joining(ticket.hello.stream_index) && ticket.hello.stream_index != kJoiningStream) return false;
  return leaves_elsewhere(path.address, path.interface);
}

void InterfaceBinding::on_unbound(const NicPath& path) {
  const std::string& name = path.interface.name;
  if (!left_.insert(name).second) return;
  log_->add(LogLevel::kWarn, name,
            "Bagua-Net: " + path.address.host() + " cannot be reached over " + name + " (" +
                path.interface.address.host() +
                "): the connection leaves by another interface, and shares its bandwidth. Give " + name +
                " a route to that network, or leave it out of NCCL_SOCKET_IFNAME. If both interfaces are in one "
                "subnet, set net.ipv4.conf.all.arp_ignore=1 and arp_announce=2 on every host");
}

}  // namespace bagua_net

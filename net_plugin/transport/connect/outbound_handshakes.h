// OutboundHandshakes: the connecting side. Each connect() is one attempt. It opens stream 0 first, whose reply says how
// many streams there are, and then the others at the same time. A later join() is an attempt of its own, whose streams
// go to the comm one by one. If it fails, the comm continues with the streams that it has. prepare() begins a join
// before the stream has ended whose place it is to take: the peer's comm learns of it by the proof only.
//
// Each stream:  kConnecting --writable--> kHandshaking (transport/connect/handshake_ends.h)
//               kHandshaking --the reply accepts, with the listener's proof--> kJoined
//               kHandshaking --of prepare(): challenged--> kPrepared --join(): sends the proof--> kHandshaking
//               kConnecting --any error that may pass, no answer within 0.9 or 1.9 s--> kBackingOff
//               kHandshaking --closed, refused without a proof, no answer in time--> kBackingOff
//               kBackingOff --100 ms--> kConnecting, with a new socket
//               nobody listens after the listener closed the stream, or answered stream 0: the attempt has failed
//               refused with a proof, or a join that is refused for kRefusedMs: the attempt has failed
//               before join(), any error, no answer in time: the attempt has failed, and the comm asks for that
//               anything else, or the attempt's deadline: the whole attempt has failed
//
// Not thread-safe: the connection service's mutex guards every call.
//
// ConnectFailure: why attempts to open a connection failed, for the error at their deadline. There is one text for each
// cause, and one rule for what is tried again, for a comm's first connection and for later ones.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/status.h"
#include "os/network_interface.h"
#include "os/tcp_socket.h"
#include "transport/connect/established_connection.h"
#include "transport/connect/handshake_ends.h"
#include "transport/connect/handshake_settings.h"
#include "transport/connect/known_comms.h"
#include "transport/connect/nic_paths.h"
#include "wire/connect_handle.h"
#include "wire/handshake_message.h"

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

// InterfaceBinding: which connections are bound to the network interface of their device. Not thread-safe: the
// connection service's mutex guards every call.
//
// [Note: connections bound to their interface]
// If two interfaces are in one subnet, the kernel sends everything over the first of them. A socket that is bound to
// the other interface sends over that one, but receives only what arrives there. The packets of the peer arrive at the
// interface that ARP named, which may be any (net.ipv4.conf.*.arp_ignore = 0, the default) and may change. So bound and
// unbound attempts take turns, with a short time limit. Replacements of lost connections are not bound, and without
// recovery no connection is, unless the device has joined several interfaces ([Note: pairs of interfaces]): then each
// connection is bound, in every attempt. Once a peer could be reached only unbound, no connection of that interface is
// bound.
class InterfaceBinding {
 public:
  InterfaceBinding(const HandshakeSettings& settings, RareLog* log) : settings_(settings), log_(log) {}

  // For every second attempt of a connection.
  bool is_to_be_bound(const JoinTicket& ticket, const NicPath& path) const;
  // A bound attempt failed, and an unbound one is connected: logged once for each interface.
  void on_unbound(const NicPath& path);

 private:
  const HandshakeSettings& settings_;
  RareLog* const log_;
  std::set<std::string> left_;  // interfaces that the kernel replaced by another one
};

// The first hello of a comm, of which those of its further connections are copies: all but the number of streams and
// the port. handle: of the listener.
Status fill_first_hello(const HandshakeSettings& settings, const ConnectHandle& handle, Hello* hello);

class OutboundHandshakes {
 public:
  OutboundHandshakes(const HandshakeSettings& settings, HandshakeLoop* loop)
      : settings_(settings), loop_(loop), binding_(settings, &loop->log) {}

  // Starts or polls the attempt whose number is kept in handle[kConnectHandleBytes]. *ready = true, or an error: the
  // attempt is over. interfaces: through which the connections leave, if the peer can be reached there. ports: at the
  // addresses of these interfaces, where the peer may probe for the comm; 0 or empty: none.
  Status connect(const std::vector<NetworkInterface>& interfaces, const std::vector<std::uint16_t>& ports,
                 std::uint8_t* handle, bool* ready, EstablishedConnection* connection);

  // Opens `count` more streams of an established connection, or, with that stream index in the ticket's hello, one in
  // place of a stream that was lost; then a failure is reported to the arrivals.
  void join(const JoinTicket& ticket, int count, const std::shared_ptr<StreamArrivals>& arrivals);

  // Opens a connection over the ticket's first path in place of a stream that is still there, up to the proof, which
  // join() sends once that stream has ended. Says how far it is: to be called again until then. It is not tried again
  // or over another path, and is given up after the time limit of a handshake.
  Prepared prepare(const JoinTicket& ticket, std::size_t place, const std::shared_ptr<StreamArrivals>& arrivals);

  // For a peer that probes: the comm was opened here or is being opened, and is neither closed nor failed.
  bool has_comm(const RandomId& comm_id) const;
  // The same for a sealed hello, of which only the listen id is known: the key that it is sealed with. nullptr: no
  // comm.
  HandshakeKeyRef find_key(const RandomId& listen_id) const;

  // Ignores ids of others.
  void handle_event(std::uint64_t id);
  void expire(std::int64_t now_ms);
  std::int64_t next_deadline_ms() const;  // INT64_MAX: none
  // Connects that are in progress or not fetched yet. NCCL does not say when it drops an attempt because it aborts, so
  // an attempt that nobody fetches is deleted a second deadline later. Joins do not count: they end with their comm.
  std::size_t attempt_count() const;
  // All attempts fail. Comms that wait for joins get a failure.
  void fail_all(const Status& failure);

 private:
  enum class JoinState { kConnecting, kHandshaking, kPrepared, kJoined, kBackingOff };
  struct Stream {
    JoinState state = JoinState::kConnecting;
    KeyedSocket socket;
    std::uint64_t id = 0;
    ConnectorHandshake handshake;
    std::int64_t due_ms = 0;  // kBackingOff: the next attempt; otherwise the deadline
    int tries = 0;
    std::int64_t asked_ms = 0;    // when the last hello or proof was sent
    int unanswered_hellos = 0;    // or proofs, that the peer's kernel had, and its process did not answer in time
    std::size_t path = 0;         // in the ticket
    bool is_bound = false;        // to its interface
    bool was_closed = false;      // by the listener, before it replied
    std::int64_t refused_ms = 0;  // of a join, over a path that has worked: since when; 0: it is not
    std::size_t refused_path = 0;
  };
  struct Attempt {
    JoinTicket ticket;
    std::vector<Stream> streams;
    ConnectFailure trouble;  // the last one
    std::size_t trouble_path = 0;
    std::string mismatch;  // with what the peer protects its connections: it refuses every one. Empty: with the same
    std::int64_t deadline_ms = 0;
    bool is_join = false;
    std::optional<std::size_t> prepared_for;  // of a join: the place of the stream that has not ended
    // Of a connect: what its paths are found with. The handle is without its token.
    ConnectHandle handle;
    std::vector<NetworkInterface> interfaces;
    std::vector<std::uint16_t> ports;
    std::weak_ptr<StreamArrivals> arrivals;  // of a join: expires with the comm
    bool over = false;
    Status failure;
    EstablishedConnection connection;

    const NicPath& path_of(const Stream& stream) const { return ticket.paths[stream.path]; }
    bool has_choice() const { return ticket.paths.size() > 1; }
    bool is_for(const JoinTicket& other, const std::shared_ptr<StreamArrivals>& comm) const {
      return ticket.joining() == other.joining() && ticket.first_path == other.first_path && arrivals.lock() == comm;
    }
  };

  static Attempt make_join(const JoinTicket& ticket, int count, const std::shared_ptr<StreamArrivals>& arrivals);
  // A new attempt whose first stream is being connected, or all streams of a join.
  std::uint64_t begin(Attempt attempt);
  void start(Attempt& attempt, std::uint64_t number, std::size_t index);
  void finish_connect(Attempt& attempt, std::size_t index);
  // It sends the hello or the proof.
  void await_answer(const Attempt& attempt, Stream& stream) const;
  // Its first connection is opened, and no hello was sent.
  void begin_with_fewer_if_long(Attempt& attempt);
  void read_answer(Attempt& attempt, std::uint64_t number, std::size_t index);
  void prove(Attempt& attempt, std::size_t index);
  void judge_reply(Attempt& attempt, std::uint64_t number, std::size_t index);
  void take_reply(Attempt& attempt, std::uint64_t number, std::size_t index, const Reply& reply);
  // What the handle had no room for. Stream 0 keeps its path.
  void take_addresses(Attempt& attempt, const std::vector<HandleAddress>& addresses);
  void log_mismatch(const Attempt& attempt);
  // The stream is tried again if the error may pass; otherwise the attempt fails.
  void retry_or_fail(Attempt& attempt, std::size_t index, const Status& status);
  // refusal: the verdict of the peer, if there was one.
  void retry(Attempt& attempt, std::size_t index, int error_number, std::string refusal = {});
  // The answer may still come: the peer's kernel has all that was sent, and its process may just be busy.
  bool may_be_answered(const Attempt& attempt, Stream& stream, std::int64_t now_ms) const;
  // Of a stream that failed, the path of its next attempt.
  void change_path(Attempt& attempt, std::size_t index, int error_number, bool answered);
  void release(Stream& stream);
  void release_for_retry(Stream& stream);
  void fail(Attempt& attempt, Status failure);
  void log_failed_join(const Attempt& attempt);
  void complete_if_joined(Attempt& attempt);

  const HandshakeSettings& settings_;
  HandshakeLoop* const loop_;
  InterfaceBinding binding_;
  std::map<std::uint64_t, Attempt> attempts_;
  std::size_t turns_ = 0;  // connects so far, without joins
  struct StreamOf {
    std::uint64_t attempt;
    std::size_t index;
  };
  std::map<std::uint64_t, StreamOf> stream_ids_;  // by poller id
  std::uint64_t next_attempt_ = 1;                // 0 in a handle: no attempt yet
  std::uint32_t last_serial_ = 0;                 // of a hello
  OpenedComms opened_;
};

}  // namespace bagua_net

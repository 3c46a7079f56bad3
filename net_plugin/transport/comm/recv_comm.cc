#include "transport/comm/recv_comm.h"

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <tuple>
#include <utility>

#include "base/monotonic_clock.h"
#include "os/tcp_socket.h"
#include "transport/recovery/recovery_timing.h"
#include "transport/stream/recv_stream.h"
#include "transport/tuning/thread_load.h"

namespace bagua_net {
namespace {

// One probe may be lost. The kernel closes the connection after the third.
constexpr int kUnansweredProbes = 2;
// After this many damaged chunks in a row the comm fails. With so many attempts, a chunk of 1 MiB arrives even if one
// byte in a million is damaged.
constexpr std::size_t kMaxDamagesInARow = 32;
// More than the last frame of a stream.
constexpr std::size_t kEndBytes = 4096;

}  // namespace

Status RecvComm::create(EstablishedConnection connection, RecvPolicy policy, WorkerPool* pool,
                        std::unique_ptr<RecvComm>* comm, CommStats stats) {
  std::vector<std::unique_ptr<ByteStream>> streams;
  for (KeyedSocket& socket : connection.sockets) streams.push_back(make_byte_stream(std::move(socket), policy.faults));
  policy.turn = connection.turn;
  policy.location = connection.same_host ? PeerLocation::kWithinHost : PeerLocation::kBetweenHosts;
  policy.recovers = connection.recovers;
  policy.checksums = connection.checksums;
  policy.tells_of_addresses = connection.tells_of_addresses;
  policy.contact = connection.contact;
  return create(std::move(streams), std::move(connection.peer), std::move(connection.arrivals), pool, comm,
                std::move(policy), std::move(stats));
}

Status RecvComm::create(std::vector<std::unique_ptr<ByteStream>> streams, std::string peer,
                        std::shared_ptr<StreamArrivals> arrivals, WorkerPool* pool, std::unique_ptr<RecvComm>* comm,
                        RecvPolicy policy, CommStats stats) {
  std::unique_ptr<RecvComm> created(
      new RecvComm(std::move(peer), std::move(arrivals), std::move(policy), pool, std::move(stats)));
  BAGUA_NET_RETURN_IF_ERROR(created->start_streams(std::move(streams)));
  created->publish();
  *comm = std::move(created);
  return Status::ok();
}

RecvComm::~RecvComm() {
  stop_recovering();
  const MutexLock lock(mutex_);
  stop();
}

std::unique_ptr<DataStream> RecvComm::make_stream(std::unique_ptr<ByteStream> bytes, int index) {
  return std::make_unique<RecvStream>(std::move(bytes), this, index, &table_, is_whole(), recovers_, policy_.checksums);
}

Status RecvComm::irecv(void* data, std::size_t bytes, MemoryRegistration* registration, Request** request) {
  *request = nullptr;
  const MutexLock lock(mutex_);
  if (has_failed()) return stop_failed();
  Request* posted = free_request();
  if (posted == nullptr) return Status::ok();
  stats_.posted(next_number_, CommTrace::MessagePath::kNotKnown);  // before a worker can move its data
  std::uint64_t parked = table_.post(posted, this, next_number_++, data, bytes, registration);
  for (int index = 0; parked != 0; ++index, parked >>= 1) {
    if ((parked & 1) != 0) kick(index);
  }
  // The comm's own streams are driven by the next test, so that posting is cheap.
  *request = posted;
  return Status::ok();
}

void RecvComm::on_links_changed() {
  const MutexLock lock(mutex_);
  assert(is_whole());
  if (has_stopped() || has_failed() || !recovers_) return;
  struct Lost {
    std::size_t index;
    std::uint16_t port;
    std::string why;
  };
  std::vector<Lost> lost;
  std::vector<std::size_t> others;
  for (std::size_t index = 0; index < streams_.size(); ++index) {
    const DataStream* const stream = streams_[index].stream.get();
    if (stream == nullptr || stream->is_over()) continue;
    const SocketAddress own = local_address(stream->fd());
    std::string why = policy_.path_states->why_gone(own);
    why.empty() ? others.push_back(index) : lost.push_back({index, own.port(), std::move(why)});
  }
  // Without another one, it is waited for as in any outage.
  if (lost.empty() || others.empty()) return;
  for (const std::size_t index : others) {
    if (!policy_.tells_of_addresses) break;
    for (const Lost& one : lost) static_cast<RecvStream*>(streams_[index].stream.get())->tell_lost_port(one.port);
    kick(static_cast<int>(index));
  }
  drive_own_streams();
  for (const Lost& one : lost) {
    if (streams_[one.index].stream->is_over()) continue;
    told_ |= std::uint64_t{1} << one.index;
    detach(one.index);
    streams_[one.index].stream->lose(Status::remote_error(one.why));
  }
}

StreamPhase RecvComm::on_lost(DataStream& stream) {
  some_have_left_ = true;
  const std::uint64_t bit = std::uint64_t{1} << stream.index();
  const bool is_told = (std::exchange(told_, told_ & ~bit) & bit) != 0;
  const int error_number = stream.loss().error_number();
  last_loss_was_silent_ = error_number == ETIMEDOUT || error_number == EHOSTUNREACH || error_number == ENETUNREACH;
  last_loss_ = "data stream " + std::to_string(stream.index()) + ": " + stream.loss().message();
  const bool is_damaged = stream.loss().code() == StatusCode::kDamagedData;
  if (is_damaged) count_damage(stream.loss());
  // For example, a connection that was about to join when its sender stopped needing it.
  if (!is_damaged && static_cast<RecvStream&>(stream).is_unused()) return StreamPhase::kFree;
  ++losses_;
  stats_->streams_lost.add(1);
  stream.count_loss();
  if (!is_told && !is_damaged && !last_loss_was_silent_) doubt_ms_ = clock_.look(monotonic_ms());
  log("Bagua-Net: a connection from " + peer_ + " was lost (" + last_loss_ + "): waiting for another one; " +
      std::to_string(losses_) + " lost on this communicator" +
      (damages_ > 0 ? ", " + std::to_string(damages_) + " of them for damaged data" : ""));
  return StreamPhase::kFree;
}

StreamPhase RecvComm::on_given_back(std::size_t index) {
  some_have_left_ = true;
  last_loss_ = "data stream " + std::to_string(index) + ": the peer has ended it";
  return StreamPhase::kFree;
}

void RecvComm::count_damage(const Status& damage) {
  ++damages_;
  const std::uint64_t intact = table_.finished_chunks();
  damages_in_a_row_ = intact == intact_chunks_ ? damages_in_a_row_ + 1 : 1;
  intact_chunks_ = intact;
  if (damages_in_a_row_ < kMaxDamagesInARow) return;
  fail(Status::damaged_data(
      damage.message() + ", and so did every other one: " + std::to_string(damages_in_a_row_) +
      " in a row, on as many connections. A host's memory, a network interface or a device on the path is faulty, or "
      "the application changes memory while it is being sent. Compare the error counters of `ethtool -S` and test the "
      "memory of both hosts"));
}

void RecvComm::on_joined(std::size_t index, const StreamArrivals::Arrival& arrival) {
  joined_ns_[index] = monotonic_ns();
  doubt_ms_ = refused_ms_ = 0;
  probe_.forget();
  probe_.add(arrival.contact);
}

int RecvComm::most_silent(const SocketAddress& from) {
  int chosen = -1;
  // It comes from another address; for how long it has sent nothing, in the kernel's ticks; and when it joined.
  std::tuple<bool, std::int64_t, std::int64_t> most;
  for (std::size_t index = 1; index < streams_.size(); ++index) {
    const DataStream* const stream = streams_[index].stream.get();
    PeerLiveness liveness;
    if (stream == nullptr || stream->is_over() || !stream->peer_liveness(&liveness)) continue;
    const std::tuple its(!remote_address(stream->fd()).same_host(from), liveness.data_ms, -joined_ns_[index]);
    if (chosen >= 0 && its <= most) continue;
    chosen = static_cast<int>(index);
    most = its;
  }
  return chosen;
}

int RecvComm::place_of(const StreamArrivals::Arrival& arrival) {
  // Place 0 is reserved for a replacement of stream 0.
  if (arrival.joining != Joining::kReplacesFirst) {
    const int free = streams_.first_in(StreamPhase::kFree, 1);
    if (free >= 0) return free;
    // Without recovery, a stream that was given back looks like the end of the comm, and its place is not free.
    const int ended = streams_.first_in(StreamPhase::kEnded, 1);
    if (ended >= 0) remove(static_cast<std::size_t>(ended), StreamPhase::kFree);
    if (ended >= 0 || arrival.joining != Joining::kReplaces) return ended;
    // The sender knows of a loss that this end has not noticed.
    const int silent = most_silent(arrival.contact);
    if (silent < 0) return -1;
    DataStream& replaced = *streams_[static_cast<std::size_t>(silent)].stream;
    detach(static_cast<std::size_t>(silent));
    replaced.lose(Status::remote_error("the peer has replaced it"));
    told_ |= std::uint64_t{1} << silent;
    remove(static_cast<std::size_t>(silent), on_lost(replaced));
    return silent;
  }
  // The sender knows that the old stream is lost, and sends again what was not acknowledged.
  if (DataStream* const lost = streams_[0].stream.get(); lost != nullptr) {
    detach(0);
    lost->progress(kEndBytes);  // it may have ended in order, and nobody has read that yet
    // If the end is still on its way, over a longer path than the replacement's, the stream only looks idle. So may
    // one that only the sender has lost, which it logs.
    if (lost->is_given_back() || static_cast<RecvStream*>(lost)->is_idle()) {
      remove(0, on_given_back(0));
      return 0;
    }
    lost->lose(Status::remote_error("the peer has replaced it"));
    remove(0, on_lost(*lost));
  }
  return 0;
}

bool RecvComm::has_replayed(const DataStream& stream) const {
  // After a new chunk, a stream resends nothing.
  return static_cast<const RecvStream&>(stream).has_new_chunks();
}

std::string RecvComm::stall_reason() {
  const Unfinished receives = unfinished();
  std::string text = std::to_string(receives.requests) +
                     (receives.requests == 1 ? " receive that is" : " receives that are") + " unfinished, for which ";
  text +=
      receives.moved_bytes == 0 ? "nothing has arrived" : std::to_string(receives.moved_bytes) + " bytes have arrived";
  std::size_t live = 0;
  std::int64_t quiet_ms = -1;
  int probes = 0;
  for (std::size_t index = 0; index < streams_.size(); ++index) {
    const DataStream* stream = streams_[index].stream.get();
    if (stream == nullptr || stream->is_over()) continue;
    ++live;
    PeerLiveness liveness;
    if (!stream->peer_liveness(&liveness)) continue;
    if (quiet_ms < 0 || liveness.data_ms < quiet_ms) quiet_ms = liveness.data_ms;
    probes = std::max(probes, liveness.transmissions);
  }
  if (live == 0) return text + "; all connections are lost, and the peer has opened no other yet";
  if (quiet_ms >= 0) text += "; the last data came " + std::to_string(quiet_ms / 1000) + " s ago";
  if (probes >= kUnansweredProbes) {
    text += ", and its host has not answered " + std::to_string(probes) + " probes: the host or the network is down";
  }
  return text;
}

Status RecvComm::check_progress_possible() {
  if (streams_.size() != 0 && !has_changes() && streams_.count(StreamPhase::kEnded) == 0 && !some_have_left_) {
    return Status::ok();
  }
  // The states of the streams do not say this: a receive may just have been posted, and their drivers not know it yet.
  const std::uint64_t parked = table_.parked_streams();
  bool has_ended = false;
  std::optional<std::uint64_t> sent;
  for (std::size_t index = 0; index < streams_.size(); ++index) {
    const DataStream* stream = streams_[index].stream.get();
    if (stream == nullptr) continue;
    if (stream->state() == StreamState::kEnded && !stream->is_given_back()) {
      has_ended = true;
      if (const auto said = static_cast<const RecvStream*>(stream)->sent_messages()) sent = said;
    }
    // A parked stream cannot read on before later receives are posted, which may in turn wait for this one.
    if (!stream->is_over() && (parked >> index & 1) == 0) {
      none_left_ms_ = 0;
      const std::string why = why_nothing_will_come();
      return why.empty() ? Status::ok() : fail_waiting(why + " (" + last_loss_ + ")");
    }
  }
  // A connection that has just joined may bring the missing data. The next test adopts it.
  if (has_arrivals()) return Status::ok();
  if (!recovers_ || has_ended) return fail_waiting("the peer closed the connection", sent);
  const std::string why = why_none_will_come();
  return why.empty() ? Status::ok() : fail_waiting(why + " (" + last_loss_ + ")");
}

std::string RecvComm::why_none_will_come() {
  const std::int64_t now_ms = clock_.look(monotonic_ms());
  if (none_left_ms_ == 0) {
    none_left_ms_ = answered_ms_ = now_ms;
    if (doubt_ms_ == 0) {
      refused_ms_ = 0;
      probe_.forget();
    }
  }
  const std::string since = " for " + std::to_string(now_ms - none_left_ms_) + " ms since the last connection was lost";
  // The sender may have begun to send only now. It needs time to notice that it is not answered.
  const int share = last_loss_was_silent_ ? kSilentShare : 1;
  if (!probe_.can_ask()) {
    const int notices_ms = last_loss_was_silent_ ? policy_.max_silence_s * 1000 / kSilentShare : 0;
    if (now_ms - none_left_ms_ < notices_ms + kGraceMs) return {};
    return "the peer has opened no connection" + since;
  }
  PeerAnswer answer = PeerAnswer::kNone;
  const std::string_view why = why_sender_is_gone(now_ms, &answer);
  if (!why.empty()) return std::string(why) + since;
  if (answer == PeerAnswer::kAlive) answered_ms_ = now_ms;
  if (answer != PeerAnswer::kUnanswered || policy_.max_silence_s == 0 ||
      now_ms - answered_ms_ < policy_.max_silence_s * 1000 / share + kGraceMs) {
    return {};
  }
  return "the peer has not answered" + since;
}

std::string RecvComm::why_nothing_will_come() {
  if (doubt_ms_ == 0 || !recovers_ || !probe_.can_ask()) return {};
  PeerAnswer answer = PeerAnswer::kNone;
  const std::string_view why = why_sender_is_gone(clock_.look(monotonic_ms()), &answer);
  if (answer == PeerAnswer::kAlive) {
    doubt_ms_ = 0;
    probe_.forget();
  }
  return why.empty() ? "" : std::string(why) + " since it closed a connection";
}

std::string_view RecvComm::why_sender_is_gone(std::int64_t now_ms, PeerAnswer* answer) {
  *answer = probe_.ask(now_ms);
  if (*answer != PeerAnswer::kRefused && *answer != PeerAnswer::kGone) {
    refused_ms_ = 0;
    return {};
  }
  if (refused_ms_ == 0) refused_ms_ = now_ms;
  if (now_ms - refused_ms_ < kRefusedMs) return {};
  return *answer == PeerAnswer::kGone ? "the peer has closed its communicator, and opened no connection"
                                      : "the peer's port refuses connections, and it has opened none";
}

Status RecvComm::fail_waiting(const std::string& why, std::optional<std::uint64_t> sent) {
  // Requests that are done have just not been tested yet. All others will never complete.
  const Unfinished receives = unfinished();
  if (receives.requests == 0) return Status::ok();
  std::string cause = ": its process ended or aborted; see that rank's log";
  // Nobody has refused a connection: its process may be well.
  if (none_left_ms_ != 0 && refused_ms_ == 0) {
    cause = ": its host, the network between, or this host's own address is gone; see the logs of both ranks";
  }
  if (sent && receives.first_message < *sent) {
    cause = ", which it has sent and which was lost with a connection: it closed its communicator too soon after that";
  } else if (sent) {
    cause = ", and it has sent " + std::to_string(*sent) +
            ": the ranks call different collectives, or it aborted; see that rank's log";
  }
  fail(Status::remote_error(why + " while this rank waits for message " + std::to_string(receives.first_message) +
                            (receives.requests > 1 ? " and " + std::to_string(receives.requests - 1) + " more" : "") +
                            cause));
  return failure();
}

void RecvComm::on_finished(const Request& request) {
  // The sender is about to wake its workers by the same rule.
  const std::size_t bytes = request.message_bytes_;
  stats_.add_received(bytes);
  const std::size_t large = policy_.inline_bytes;
  if (bytes > large || (bytes > large / kAwakeShare && ThreadLoad::of_this_thread().is_busy())) {
    rouse_workers((bytes + large - 1) / std::max<std::size_t>(large, 1));
  }
}

std::size_t RecvComm::message_bytes(const Request& request) const { return request.message_bytes_; }

}  // namespace bagua_net

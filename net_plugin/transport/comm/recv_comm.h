// RecvComm: the receiving end of a comm. A chunk that arrives on any of its streams is read directly into the memory of
// its receive.
//
// With recovery, it waits for the sender to replace lost connections. If none is left, it asks the sender's process
// whether that still has the comm. The times are in transport/recovery/recovery_timing.h.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/monotonic_clock.h"
#include "transport/chunks/receive_table.h"
#include "transport/comm/comm.h"
#include "transport/comm/send_comm.h"
#include "transport/connect/established_connection.h"
#include "transport/connect/peer_probe.h"

namespace bagua_net {

struct RecvPolicy {
  std::size_t turn = 0;  // of its listen, see WorkerPool::open_lane
  PeerLocation location = PeerLocation::kWithinHost;
  bool recovers = false;
  bool checksums = false;           // both ends use them
  bool tells_of_addresses = false;  // the sender understands that one of this host is lost
  int max_silence_s = 0;            // after which a host that does not answer is gone; 0: never
  std::size_t inline_bytes = SendPolicy{}.inline_bytes;
  PeerContact contact;                                                       // the sender's process
  std::shared_ptr<PathStates> path_states = std::make_shared<PathStates>();  // of the process
  FaultInjector* faults = nullptr;
  StallReport* stalls = nullptr;  // outlives the comm; nullptr: nothing is reported
};

class RecvComm final : public Comm {
 public:
  static Status create(EstablishedConnection connection, RecvPolicy policy, WorkerPool* pool,
                       std::unique_ptr<RecvComm>* comm, CommStats stats = {});
  // The same over any byte streams: what create() does with sockets, and the tests with fakes.
  static Status create(std::vector<std::unique_ptr<ByteStream>> streams, std::string peer,
                       std::shared_ptr<StreamArrivals> arrivals, WorkerPool* pool, std::unique_ptr<RecvComm>* comm,
                       RecvPolicy policy = {}, CommStats stats = {});
  ~RecvComm() override;

  // Connections to an address of this host that is lost are left, and their sender is told over the others: its kernel,
  // and this one, would find out by silence only.
  void on_links_changed() override;

  // *request == nullptr: no room now, call again.
  Status irecv(void* data, std::size_t bytes, MemoryRegistration* registration, Request** request);

 private:
  RecvComm(std::string peer, std::shared_ptr<StreamArrivals> arrivals, RecvPolicy policy, WorkerPool* pool,
           CommStats stats)
      : Comm(std::move(peer), Direction::kReceive, policy.location, policy.turn, pool, std::move(arrivals),
             policy.recovers, policy.faults, policy.stalls, std::move(stats)),
        policy_(std::move(policy)),
        table_(policy_.recovers),
        probe_(policy_.contact) {}

  std::unique_ptr<DataStream> make_stream(std::unique_ptr<ByteStream> bytes, int index) REQUIRES(mutex_) override;
  StreamPhase on_lost(DataStream& stream) REQUIRES(mutex_) override;
  StreamPhase on_given_back(std::size_t index) REQUIRES(mutex_) override;
  int place_of(const StreamArrivals::Arrival& arrival) REQUIRES(mutex_) override;
  void on_joined(std::size_t index, const StreamArrivals::Arrival& arrival) REQUIRES(mutex_) override;
  bool has_replayed(const DataStream& stream) const REQUIRES(mutex_) override;
  Status check_progress_possible() REQUIRES(mutex_) override;
  std::string stall_reason() REQUIRES(mutex_) override;
  bool has_own_work(const Request&) const override { return true; }  // any message may come on stream 0
  std::size_t message_bytes(const Request& request) const override;
  void on_finished(const Request& request) REQUIRES(mutex_) override;
  // A stream was lost because of damaged data. The comm fails after too many in a row.
  void count_damage(const Status& damage) REQUIRES(mutex_);
  // All places are taken: that of the stream which a connection from there most probably replaces. -1: none.
  int most_silent(const SocketAddress& from) REQUIRES(mutex_);
  // Asks the sender's process. Returns why the comm cannot go on; empty: it may, or that is not known yet.
  std::string_view why_sender_is_gone(std::int64_t now_ms, PeerAnswer* answer) REQUIRES(mutex_);
  // No connection is left. Returns why none will join any more; empty: one may join.
  std::string why_none_will_come() REQUIRES(mutex_);
  // The peer ended some connections without a word, and the others are quiet: they may go over a dead path. Returns why
  // nothing will come over them; empty: something may.
  std::string why_nothing_will_come() REQUIRES(mutex_);
  // Fails the comm if a receive waits. sent: the number of messages that the sender has sent, if it said so.
  Status fail_waiting(const std::string& why, std::optional<std::uint64_t> sent = {}) REQUIRES(mutex_);

  const RecvPolicy policy_;
  ReceiveTable table_;

  bool some_have_left_ GUARDED_BY(mutex_) = false;  // streams that were lost, or ended before the comm
  std::size_t losses_ GUARDED_BY(mutex_) = 0;
  std::size_t damages_ GUARDED_BY(mutex_) = 0;           // of them, for damaged data
  std::size_t damages_in_a_row_ GUARDED_BY(mutex_) = 0;  // with no chunk in between that arrived intact
  std::uint64_t intact_chunks_ GUARDED_BY(mutex_) = 0;   // when the last of them was seen
  bool last_loss_was_silent_ GUARDED_BY(mutex_) =
      false;  // no answer, rather than a word of the peer's host or the network
  std::string last_loss_ GUARDED_BY(mutex_);
  std::array<std::int64_t, kMaxStreams> joined_ns_ GUARDED_BY(mutex_){};  // by place; 0: the comm began with it
  std::uint64_t told_ GUARDED_BY(mutex_) = 0;  // places of streams that were left because their path is gone
  // Of the questions to the sender's process, and of what the next four say.
  ActiveClock clock_ GUARDED_BY(mutex_){200};
  std::int64_t doubt_ms_ GUARDED_BY(mutex_) = 0;      // since when the sender's process may have ended; 0: it lives
  std::int64_t none_left_ms_ GUARDED_BY(mutex_) = 0;  // since when no stream is left; 0: there are some
  PeerProbe probe_ GUARDED_BY(mutex_);
  std::int64_t answered_ms_ GUARDED_BY(mutex_) = 0;  // when the sender's process answered last since then
  std::int64_t refused_ms_ GUARDED_BY(mutex_) = 0;   // since when it refuses; 0: it does not
};

}  // namespace bagua_net

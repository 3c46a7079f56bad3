// SendComm: the sending end of a comm. A small message is written to stream 0 by the thread that posts it; so are all
// messages if there is one stream. A large message is striped: split into chunks, which the other streams pull. If the
// user has not set the number of streams, StreamGrowth chooses it.
//
// With recovery, it opens another connection for each lost one, and sends again there what was not acknowledged.
#pragma once

#include "base/monotonic_clock.h"
#include "transport/chunks/replay_queue.h"
#include "transport/comm/comm.h"
#include "transport/comm/comm_growth.h"
#include "transport/comm/send_paths.h"
#include "transport/comm/send_policy.h"
#include "transport/connect/established_connection.h"
#include "transport/stream/send_stream.h"

namespace bagua_net {

class SendComm final : public Comm {
 public:
  static Status create(EstablishedConnection connection, SendPolicy policy, WorkerPool* pool,
                       std::unique_ptr<SendComm>* comm, CommStats stats = {});
  // The same over any byte streams: what create() does with sockets, and the tests with fakes.
  static Status create(std::vector<std::unique_ptr<ByteStream>> streams, std::string peer,
                       std::shared_ptr<StreamArrivals> arrivals, SendPolicy policy, WorkerPool* pool,
                       std::unique_ptr<SendComm>* comm, CommStats stats = {});
  ~SendComm() override;

  // Data of requests that are done may not have arrived yet: closing waits a short time for it.
  bool is_closed(std::int64_t now_ms) override;
  void on_links_changed() override;
  void on_peer_address_lost(std::uint16_t port) override;
  bool looks_again() override;

  // *request == nullptr: no room now, call again.
  Status isend(const void* data, std::size_t bytes, MemoryRegistration* registration, Request** request);

 private:
  SendComm(std::string peer, std::shared_ptr<StreamArrivals> arrivals, SendPolicy policy, WorkerPool* pool,
           std::size_t streams, CommStats stats);

  std::unique_ptr<DataStream> make_stream(std::unique_ptr<ByteStream> bytes, int index) REQUIRES(mutex_) override;
  StreamPhase on_lost(DataStream& stream) REQUIRES(mutex_) override;
  StreamPhase on_given_back(std::size_t index) REQUIRES(mutex_) override;
  int place_of(const StreamArrivals::Arrival& arrival) REQUIRES(mutex_) override;
  void on_joined(std::size_t index, const StreamArrivals::Arrival& arrival) REQUIRES(mutex_) override;
  bool has_replayed(const DataStream& stream) const REQUIRES(mutex_) override;
  void on_join_failure(const StreamArrivals::Failure& failure) REQUIRES(mutex_) override;
  void on_change() REQUIRES(mutex_) override;
  void ask_for_streams() REQUIRES(mutex_) override;
  void tick() REQUIRES(mutex_) override;
  std::string stall_reason() REQUIRES(mutex_) override;
  bool has_own_work(const Request& request) const override;
  std::size_t message_bytes(const Request& request) const override;
  void on_finished(const Request& request) REQUIRES(mutex_) override;
  Status check_progress_possible() REQUIRES(mutex_) override;
  void check_liveness() REQUIRES(mutex_);
  // What SendPaths says of the streams: some are taken away from their connections, some move back to their own path.
  void lose_streams(const std::vector<SendPaths::Loss>& lost) REQUIRES(mutex_);
  void leave_gone_paths() REQUIRES(mutex_);
  void return_streams() REQUIRES(mutex_);
  Prepared prepare(std::size_t place, std::size_t path) REQUIRES(mutex_);
  bool should_stripe(std::size_t bytes) const REQUIRES(mutex_);
  // The calling thread moves this message, and wakes workers for the next one.
  bool wants_workers(std::size_t bytes) const;
  void kick_streams(std::size_t waiting_bytes, std::int64_t now_ns) REQUIRES(mutex_);
  // Streams over the paths in the bit mask; returns how many it kicked.
  std::size_t kick_some(std::size_t most, std::uint64_t paths) REQUIRES(mutex_);
  // The network limits single connections: the comm has grown.
  bool flows_are_limited() const REQUIRES(mutex_) { return in_use_ > first_streams_; }
  std::size_t min_chunk_bytes() const REQUIRES(mutex_);

  // The first stream for large messages: 1 if workers drive the streams from 1 on, otherwise 0.
  std::size_t first_wide_stream() const { return workers_own_stripes_ ? 1 : 0; }
  ChunkScheduler& wide_chunks() { return workers_own_stripes_ ? striped_chunks_ : own_chunks_; }
  // Reports a large message to StreamGrowth, and adapts the number of streams to its target.
  void watch_growth(std::size_t bytes) REQUIRES(mutex_);
  bool all_streams_are_full() const REQUIRES(mutex_);
  // Gives back the streams of a trial without a gain, once the peer has acknowledged what they carried.
  void give_back_streams() REQUIRES(mutex_);
  // Lets this many streams take new chunks. Also after streams were lost or have joined.
  void use_streams(std::size_t in_use) REQUIRES(mutex_);

  bool is_striped(std::size_t index) const { return workers_own_stripes_ && index > 0; }
  ReplayQueue& replay_of(std::size_t index) { return is_striped(index) ? striped_replay_ : own_replay_; }
  const ReplayQueue& replay_of(std::size_t index) const { return is_striped(index) ? striped_replay_ : own_replay_; }
  // The stream at that place; nullptr: none.
  SendStream* stream(std::size_t index) const REQUIRES(mutex_) {
    return static_cast<SendStream*>(streams_[index].stream.get());
  }
  std::uint64_t live_streams() const REQUIRES(mutex_) {
    return streams_.places_in(StreamPhase::kLive) | streams_.places_in(StreamPhase::kReplaying);
  }
  std::uint64_t missing_streams() const REQUIRES(mutex_) {
    return streams_.places_in(StreamPhase::kLost) | streams_.places_in(StreamPhase::kAsked);
  }
  // There is a chunk to be sent that none of the remaining streams may take.
  bool depends_on_missing_streams() REQUIRES(mutex_);
  // What is outstanding, for the end of an error message.
  std::string outstanding() REQUIRES(mutex_);

  const SendPolicy policy_;
  const std::size_t first_streams_;  // that the comm began with
  const bool workers_own_stripes_;   // workers drive the streams from 1 on
  ChunkScheduler own_chunks_;        // pulled by the calling thread's streams
  ChunkScheduler striped_chunks_;
  // Of lost streams, by the scheduler that their chunks came from: message numbers rise within each.
  ReplayQueue own_replay_;
  ReplayQueue striped_replay_;

  std::size_t in_use_ GUARDED_BY(mutex_) = 0;       // streams that take new chunks, from the first on
  std::size_t next_kicked_ GUARDED_BY(mutex_) = 0;  // of the wide streams, where each flow is limited
  std::size_t striped_under_way_ GUARDED_BY(mutex_) = 0;
  CommGrowth growth_ GUARDED_BY(mutex_);
  SendPaths paths_ GUARDED_BY(mutex_);

  // When to request replacements of the streams in kLost, unless something depends on them earlier.
  std::int64_t ask_lost_ms_ GUARDED_BY(mutex_) = 0;
  std::int64_t lost_ms_ GUARDED_BY(mutex_) = 0;  // when the last stream was lost
  std::size_t losses_ GUARDED_BY(mutex_) = 0;
  std::string last_loss_ GUARDED_BY(mutex_);
  ActiveClock closing_clock_ GUARDED_BY(mutex_){100};
  std::int64_t close_by_ms_ GUARDED_BY(mutex_) = 0;   // 0: nobody closes the comm
  std::int64_t delivered_ms_ GUARDED_BY(mutex_) = 0;  // since when the peer's kernel has everything
};

}  // namespace bagua_net

// SendComm: the sending end of a connection. A message goes one of two ways: on stream 0, written at once by the
// thread that posts it (small messages, and everything when there is one stream); or striped, cut into chunks which
// the other streams pull. Where the number of streams is ours to choose, it follows StreamGrowth.
//
// With recovery it opens another connection for each that is lost, and sends again on it what was not acknowledged.
#pragma once

#include <functional>

#include "transport/chunks/replay_queue.h"
#include "transport/comm/comm.h"
#include "transport/connect/established_connection.h"
#include "transport/stream/send_stream.h"
#include "transport/tuning/stream_growth.h"

namespace bagua_net {

struct SendPolicy {
  // Up to this size a message goes on stream 0 when workers drive the others; a quarter of it when the calling thread
  // has no time left.
  std::size_t inline_bytes = 65536;
  std::size_t min_chunk_bytes = 65536;
  std::size_t max_chunk_bytes = 524288;
  bool measures_rates = false;  // the streams may differ in speed: there is a network between the ends
  bool zero_copy = false;       // workers send large chunks by reference, and the peer acknowledges them
  int max_silence_s = 0;        // after which a host that does not answer is an error; 0: never

  StreamGrowth* growth = nullptr;  // of the interface, outlives the comm; nullptr: the number of streams is fixed
  // Asks for so many more streams, which come in as arrivals, or never if the peer refuses.
  std::function<void(int count)> open_streams;
  int most_streams = 1;
  std::shared_ptr<OptionalConnections::Share> optional;  // bounds them; nullptr: nothing does

  // Recovery: asks for a stream in place of one that was lost. It comes in as an arrival, or a failure is reported
  // there. Empty: no recovery.
  std::function<void(Joining joining)> replace_stream;

  bool checksums = false;           // both ends use them
  FaultInjector* faults = nullptr;  // outlives the comm; nullptr: nothing damages its connections
  StallReport* stalls = nullptr;    // outlives the comm; nullptr: nothing is reported
};

// Handing a message to a worker that is awake takes as long as copying 16 KiB: the part of SendPolicy::inline_bytes up
// to which they do not get it. A receiver rouses its workers for the same messages.
constexpr std::size_t kAwakeShare = 4;

// Where more connections were found to be faster, each of them is slow: so small a part of the usual chunk is worth a
// stream of its own.
constexpr std::size_t kLimitedFlowShare = 4;

class SendComm final : public Comm {
 public:
  static Status create(EstablishedConnection connection, SendPolicy policy, WorkerPool* pool,
                       std::unique_ptr<SendComm>* comm, CommStats stats = {});
  // The same over any byte streams: what create() does with sockets, and the tests with fakes.
  static Status create(std::vector<std::unique_ptr<ByteStream>> streams, std::string peer,
                       std::shared_ptr<StreamArrivals> arrivals, SendPolicy policy, WorkerPool* pool,
                       std::unique_ptr<SendComm>* comm, CommStats stats = {});
  ~SendComm() override;

  // Bytes of requests that are done may not have arrived: closing waits for that, a short time at most.
  bool is_closed(std::int64_t now_ms) override;

  // *request == nullptr: no room now, call again.
  Status isend(const void* data, std::size_t bytes, MemoryRegistration* registration, Request** request);

 private:
  SendComm(std::string peer, std::shared_ptr<StreamArrivals> arrivals, SendPolicy policy, WorkerPool* pool,
           std::size_t streams, CommStats stats);

  std::unique_ptr<DataStream> make_stream(std::unique_ptr<ByteStream> bytes, int index) REQUIRES(mutex_) override;
  StreamPhase on_lost(DataStream& stream) REQUIRES(mutex_) override;
  int place_of(Joining joining) REQUIRES(mutex_) override;
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
  bool should_stripe(std::size_t bytes) const REQUIRES(mutex_);
  // The calling thread moves a message of this size, and would rather not have to move the next.
  bool wants_workers(std::size_t bytes) const;
  void kick_streams(std::size_t waiting_bytes) REQUIRES(mutex_);
  // The network is known to limit single connections: the comm grew.
  bool flows_are_limited() const REQUIRES(mutex_) { return in_use_ > first_streams_; }
  std::size_t min_chunk_bytes() const REQUIRES(mutex_);
  std::size_t chunks_in(std::size_t bytes) const REQUIRES(mutex_);

  // The streams that large messages may take: all, or from 1 on where workers drive those.
  std::size_t first_wide_stream() const { return workers_own_stripes_ ? 1 : 0; }
  ChunkScheduler& wide_chunks() { return workers_own_stripes_ ? striped_chunks_ : own_chunks_; }
  // Large enough for more than one chunk where each flow is limited.
  bool is_large(std::size_t bytes) const { return bytes > policy_.min_chunk_bytes / kLimitedFlowShare; }
  // Growth: tells of a large message, and brings the streams in use to the number that StreamGrowth names.
  void watch_growth(std::size_t bytes) REQUIRES(mutex_);
  bool all_streams_are_full() const REQUIRES(mutex_);
  void follow_target(std::size_t target, std::int64_t now_ns) REQUIRES(mutex_);
  // Closes a stream that a trial has opened for nothing, once the peer has all of it.
  void give_back_streams(std::size_t kept, std::int64_t now_ns) REQUIRES(mutex_);
  // Which streams take new chunks, after the number in use or the streams themselves have changed.
  void use_streams(std::size_t in_use) REQUIRES(mutex_);

  bool is_striped(std::size_t index) const { return workers_own_stripes_ && index > 0; }
  ReplayQueue& replay_of(std::size_t index) { return is_striped(index) ? striped_replay_ : own_replay_; }
  const ReplayQueue& replay_of(std::size_t index) const { return is_striped(index) ? striped_replay_ : own_replay_; }
  // What stands there, as what it is; nullptr: nothing.
  SendStream* stream(std::size_t index) const REQUIRES(mutex_) {
    return static_cast<SendStream*>(streams_[index].stream.get());
  }
  std::uint64_t missing_streams() const REQUIRES(mutex_) {
    return streams_.places_in(StreamPhase::kLost) | streams_.places_in(StreamPhase::kAsked);
  }
  // Something is to be sent that no stream which is left would take.
  bool depends_on_missing_streams() REQUIRES(mutex_);
  // What is under way, and for how long nothing has happened, as the end of an error.
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
  std::size_t large_under_way_ GUARDED_BY(mutex_) = 0;
  std::size_t striped_under_way_ GUARDED_BY(mutex_) = 0;
  std::size_t asked_for_ GUARDED_BY(mutex_) = 0;      // streams in all, those that are here included
  std::int64_t ask_again_ns_ GUARDED_BY(mutex_) = 0;  // when to give up on those that did not come
  std::int64_t give_back_ns_ GUARDED_BY(mutex_) = 0;  // when to look for streams to close; 0: there are none
  std::int64_t check_liveness_ms_ GUARDED_BY(mutex_) = 0;
  std::array<std::int64_t, kMaxStreams> answered_ms_
      GUARDED_BY(mutex_){};  // when all that it sent was answered, as far as was looked

  std::int64_t ask_lost_ms_ GUARDED_BY(mutex_) =
      0;  // when to ask for the streams in kLost, unless something depends on them
  std::int64_t silent_since_ms_ GUARDED_BY(mutex_) =
      0;  // streams were given up for silence, and nothing was acknowledged since; 0: not
  std::int64_t lost_ms_ GUARDED_BY(mutex_) = 0;  // when the last stream was lost
  std::size_t losses_ GUARDED_BY(mutex_) = 0;
  std::string last_loss_ GUARDED_BY(mutex_);
  std::int64_t close_by_ms_ GUARDED_BY(mutex_) = 0;   // 0: nobody closes the comm
  std::int64_t delivered_ms_ GUARDED_BY(mutex_) = 0;  // since when the peer's kernel has everything
};

}  // namespace bagua_net

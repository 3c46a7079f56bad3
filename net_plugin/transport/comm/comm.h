// Comm: what a send comm and a receive comm share: the data streams and who drives them, the ring of requests, the
// sticky first error, registered memory, and the promise that no thread of ours touches a buffer once its
// deregistration returned.
//
// Stream 0 is the comm's own: small messages go there, with no other thread than the calling one involved. The other
// streams are driven by workers, or, where the process has none, are the comm's own as well. Streams may join while the
// comm lives; the table of them is in transport/comm/stream_table.h.
//
// Own streams have no worker: a thread that holds the comm's mutex drives them. That is the calling thread, and with
// recovery also the recovery thread, while something is to be sent again: the application may not call the comm before
// the peer has what was lost.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "stats/comm_stats.h"
#include "stats/stall_report.h"
#include "transport/chunks/chunk_scheduler.h"
#include "transport/chunks/request.h"
#include "transport/comm/stream_table.h"
#include "transport/connect/stream_arrivals.h"
#include "transport/faults/fault_injector.h"
#include "transport/recovery/recovery_thread.h"
#include "transport/stream/data_stream.h"
#include "transport/stream/event_loop_worker.h"
#include "transport/stream/worker_pool.h"

namespace bagua_net {

struct MemoryRegistration {
  void* data;
  std::size_t bytes;
};

class Comm : public FailureSink, public Recoverable {
 public:
  ~Comm() override;

  Status register_memory(void* data, std::size_t bytes, MemoryRegistration** registration);
  // If requests on that memory are unfinished, the comm is aborted: its I/O has stopped for good when this returns,
  // its requests fail, the peer sees a closed connection. Never waits for the peer.
  Status deregister_memory(MemoryRegistration* registration);

  // For the trace. By the thread that posted the request.
  bool is_traced() const { return stats_.trace() != nullptr; }
  void trace_origin(const Request& request, const MessageOrigin& origin) {
    stats_.trace()->set_origin(request.number_, origin);
  }

  const std::string& peer() const { return peer_; }  // "10.0.0.2:4711 (host node2, process 4242) over eth0"

  // Any thread. The first failure sticks, and every stream is shut down so that the peer learns of it.
  void fail(Status status) noexcept override;
  void on_stream_over(int index, StreamState state) override;
  std::vector<RareLog::Line> recover() override;

 protected:
  friend class Request;

  // arrivals: where streams that join later come in; nullptr: none will. faults: what damages its connections, or
  // nullptr. stalls: where a long wait is reported, or nullptr.
  Comm(std::string peer, Direction direction, PeerLocation location, std::size_t turn, WorkerPool* pool,
       std::shared_ptr<StreamArrivals> arrivals, bool recovers, FaultInjector* faults, StallReport* stalls,
       CommStats stats)
      : stats_(std::move(stats)),
        peer_(std::move(peer)),
        recovers_(recovers),
        direction_(direction),
        pool_(pool),
        lane_(pool->open_lane(direction, location, turn)),
        arrivals_(std::move(arrivals)),
        faults_(faults),
        stalls_(stalls) {}

  // create() builds a comm in three steps: its constructor, the streams that it begins with, and when nothing is
  // missing any more, publish(). Before that, the recovery thread does not know of it.
  Status start_streams(std::vector<std::unique_ptr<ByteStream>> streams);
  void publish();
  bool is_whole() const REQUIRES(mutex_) { return is_whole_; }
  bool has_arrivals() const { return arrivals_ != nullptr && arrivals_->any(); }
  bool has_changes() const REQUIRES(mutex_) {
    return has_arrivals() || some_are_over_.load(std::memory_order_relaxed) ||
           streams_.count(StreamPhase::kReplaying) + streams_.count(StreamPhase::kLost) != 0;
  }
  // Takes away the streams that were lost and takes in those that have joined meanwhile. The comm may fail.
  void adopt_changes() REQUIRES(mutex_);
  virtual std::unique_ptr<DataStream> make_stream(std::unique_ptr<ByteStream> bytes, int index) REQUIRES(mutex_) = 0;
  // The stream was lost; nobody drives it, and it goes when this returns. Returns the phase of its place then.
  virtual StreamPhase on_lost(DataStream& stream) REQUIRES(mutex_) = 0;
  // The stream was ended in order, by its sender, and goes when this returns. Returns the phase of its place then.
  virtual StreamPhase on_given_back(std::size_t index) REQUIRES(mutex_) = 0;
  // Where a stream that joins is to go; -1: nowhere.
  virtual int place_of(const StreamArrivals::Arrival& arrival) REQUIRES(mutex_) = 0;
  // It has gone there; its socket has been taken.
  virtual void on_joined(std::size_t /*index*/, const StreamArrivals::Arrival& /*arrival*/) REQUIRES(mutex_) {}
  // A stream in kReplaying has finished with the chunks that were sent before.
  virtual bool has_replayed(const DataStream& stream) const REQUIRES(mutex_) = 0;
  virtual void on_join_failure(const StreamArrivals::Failure& /*failure*/) REQUIRES(mutex_) {}
  // Streams were lost or have joined.
  virtual void on_change() REQUIRES(mutex_) {}
  // Requests connections for the places in kLost, if it is time.
  virtual void ask_for_streams() REQUIRES(mutex_) {}
  // Called once a second for senders: checks streams that no request waits for.
  virtual void tick() REQUIRES(mutex_) {}

  // Takes every stream away from its driver, for good. Derived destructors call it before their members go.
  void stop() REQUIRES(mutex_);
  // Ends recovery of this comm. Derived destructors begin with it.
  void stop_recovering() EXCLUDES(mutex_);
  // Every stream is the comm's own from now on, also those that join.
  void drive_alone() REQUIRES(mutex_);
  // Stops a comm that has failed, and says why it has: from then on the caller's memory is its own again.
  Status stop_failed() REQUIRES(mutex_);

  // The next free request of the ring; nullptr when the oldest is not finished: "later".
  Request* free_request() REQUIRES(mutex_);
  // Drives the comm's own streams for one turn; true: they have more to do at once.
  bool drive_own_streams() REQUIRES(mutex_);
  void kick(int stream_index);  // any thread
  // The first stream that is not the comm's own has a worker, and that one does not sleep.
  bool has_awake_worker() const REQUIRES(mutex_);
  // Wakes the workers of the first so many of those streams.
  void rouse_workers(std::size_t streams) REQUIRES(mutex_);
  Status failure() EXCLUDES(failure_mutex_);
  bool has_failed() const { return failed_.load(); }
  bool has_stopped() const REQUIRES(mutex_) { return stopped_; }
  struct Unfinished {
    std::size_t requests = 0;
    std::size_t capacity_bytes = 0;  // of sends: their messages
    std::size_t moved_bytes = 0;
    std::uint64_t first_message = ~std::uint64_t{0};
  };
  // The requests that are posted and not done.
  Unfinished unfinished() const REQUIRES(mutex_);
  // The recovery thread is to call recover(). Any thread.
  void ask_for_recovery() {
    if (recovery_ != nullptr) recovery_->notify(recovery_id_);
  }
  // A line that the recovery thread writes to the log, unless one of its kind was written recently.
  void log(std::string line, LogLevel level = LogLevel::kWarn, std::string kind = {}) REQUIRES(mutex_) {
    if (recovery_ != nullptr) log_.push_back({level, std::move(line), std::move(kind)});
  }
  // The reason, beyond a failure, why an unfinished request can never complete; ok: it can.
  virtual Status check_progress_possible() REQUIRES(mutex_) { return Status::ok(); }
  // What an unfinished request waits for.
  virtual std::string stall_reason() REQUIRES(mutex_) = 0;
  virtual bool has_own_work(const Request& request) const = 0;
  virtual std::size_t message_bytes(const Request& request) const = 0;
  // The request is done and about to be given back.
  virtual void on_finished(const Request&) REQUIRES(mutex_) {}

  CommStats stats_;  // before the streams: they count in it

  bool is_own(std::size_t index) const REQUIRES(mutex_) { return alone_ || index == 0 || pool_->size() == 0; }
  // Gives the stream to its worker, unless it is the comm's own.
  Status drive(std::size_t index) REQUIRES(mutex_);
  // Takes it from its worker, if it has one.
  void detach(std::size_t index) REQUIRES(mutex_);
  // Takes a stream away, for good.
  void remove(std::size_t index, StreamPhase to) REQUIRES(mutex_);
  // All changes of phases go through this function.
  void move(std::size_t index, StreamPhase to) REQUIRES(mutex_);

  // NCCL calls a comm from one thread at a time, but tears it down from another than the one that moved its data.
  Mutex mutex_;
  StreamTable streams_ GUARDED_BY(mutex_);
  std::array<Request, kMaxRequestsPerComm> requests_ GUARDED_BY(mutex_);
  std::uint64_t next_number_ GUARDED_BY(mutex_) = 0;
  const std::string peer_;
  const bool recovers_;
  bool first_is_nearest_ GUARDED_BY(mutex_) = false;  // the path of the first stream was chosen for small messages

 private:
  Status add_stream(std::unique_ptr<DataStream> stream, StreamPhase phase) REQUIRES(mutex_);
  // True: there were some.
  bool adopt_arrivals() REQUIRES(mutex_);
  bool take_away_streams() REQUIRES(mutex_);
  void end_replaying() REQUIRES(mutex_);
  // Streams from the first on that are the comm's own.
  std::size_t own_streams() const REQUIRES(mutex_) { return alone_ || pool_->size() == 0 ? streams_.size() : 1; }
  // Lets the recovery thread know what becomes of one of the comm's own streams.
  void watch(const StreamTable::Place& place) REQUIRES(mutex_);
  // What may be looked at without mutex_: by kick() the atomics, and by fail(), with failure_mutex_, the streams.
  StreamTable& shared_streams() NO_THREAD_SAFETY_ANALYSIS { return streams_; }
  Status test(Request* request, bool* done, std::size_t* bytes);
  Status test_locked(Request* request, bool* done, std::size_t* bytes, std::string* line) REQUIRES(mutex_);
  // Looks once a second whether requests wait too long.
  std::string look_for_stall() REQUIRES(mutex_);

  const Direction direction_;
  WorkerPool* const pool_;
  const WorkerPool::Lane lane_;
  const std::shared_ptr<StreamArrivals> arrivals_;
  FaultInjector* const faults_;
  StallReport* const stalls_;
  bool is_whole_ GUARDED_BY(mutex_) = false;     // publish() was called
  std::int64_t look_ms_ GUARDED_BY(mutex_) = 0;  // when to look for a stall again
  bool is_stalled_ GUARDED_BY(mutex_) = false;   // it was reported
  bool stopped_ GUARDED_BY(mutex_) = false;      // no stream is driven any more
  bool alone_ GUARDED_BY(mutex_) = false;        // drive_alone()
  std::size_t next_own_ GUARDED_BY(mutex_) = 0;  // of the own streams, which begins
  std::vector<RareLog::Line> log_ GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<MemoryRegistration>> registrations_ GUARDED_BY(mutex_);
  RecoveryThread* recovery_ = nullptr;  // nullptr: no recovery, or none any more
  std::uint64_t recovery_id_ = 0;
  std::atomic<bool> some_are_over_{false};  // streams whose phase does not say so yet
  Mutex failure_mutex_;                     // held also to put a stream into its place or take it away
  Status failure_ GUARDED_BY(failure_mutex_);
  std::atomic<bool> failed_{false};  // set after failure_ was written
};

}  // namespace bagua_net

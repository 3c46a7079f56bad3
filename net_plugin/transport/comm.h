// Comm: what a send comm and a receive comm share: the data streams and who drives them, the ring of requests, the
// sticky first error, registered memory, and the promise that no thread of ours touches a buffer once its
// deregistration returned.
//
// Stream 0 is always driven by the thread that calls the comm: small messages go there, with no other thread involved.
// The other streams are driven by workers, or, where the process has none, by the calling thread as well. Streams may
// join while the comm lives; none ever leaves.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/status.h"
#include "stats/comm_stats.h"
#include "transport/chunk_scheduler.h"
#include "transport/data_stream.h"
#include "transport/event_loop_worker.h"
#include "transport/request.h"
#include "transport/stream_arrivals.h"
#include "transport/worker_pool.h"

namespace bagua_net {

struct MemoryRegistration {
  void* data;
  std::size_t bytes;
};

class Comm : public FailureSink {
 public:
  ~Comm() override;

  Status register_memory(void* data, std::size_t bytes, MemoryRegistration** registration);
  // If requests on that memory are unfinished, the comm is aborted: its I/O has stopped for good when this returns,
  // its requests fail, the peer sees a closed connection. Never waits for the peer.
  Status deregister_memory(MemoryRegistration* registration);

  const std::string& peer() const { return peer_; }  // "10.0.0.2:4711 (host node2, process 4242)"

  // Any thread. The first failure sticks, and every stream is shut down so that the peer learns of it.
  void fail(Status status) override;

 protected:
  friend class Request;

  // arrivals: where streams that join later come in; nullptr: none will.
  Comm(std::string peer, Direction direction, Path path, WorkerPool* pool, std::shared_ptr<StreamArrivals> arrivals,
       CommStats stats)
      : stats_(std::move(stats)),
        peer_(std::move(peer)),
        pool_(pool),
        lane_(pool->open_lane(direction, path)),
        arrivals_(std::move(arrivals)) {
    streams_.reserve(arrivals_ == nullptr ? 1 : kMaxStreams);
  }

  // Called once by the constructor's owner.
  Status start_streams(std::vector<std::unique_ptr<ByteStream>> streams);
  bool has_arrivals() const { return arrivals_ != nullptr && arrivals_->any(); }
  // Takes in the streams that have joined meanwhile. With mutex_ held.
  Status adopt_arrivals();
  virtual std::unique_ptr<DataStream> make_stream(std::unique_ptr<ByteStream> bytes, int index) = 0;
  // Takes every stream away from its driver, for good. Derived destructors call it before their members go.
  void stop_streams();
  void stop_driving();  // the same, with mutex_ held
  // What a caller is told of a failed comm: from then on its memory is its own again. With mutex_ held.
  Status give_up();

  // The next free request of the ring; nullptr when the oldest is not finished: "later".
  Request* free_request();
  // Hands the calling thread's streams some time. With mutex_ held.
  void drive_own_streams();
  void kick(int stream_index);  // any thread
  // The first stream that is not the calling thread's has a worker, and that one does not sleep. With mutex_ held.
  bool has_awake_worker() const;
  // Wakes the workers of the first so many of those streams. With mutex_ held.
  void rouse_workers(std::size_t streams);
  Status failure();
  bool has_failed() const { return failed_.load(); }
  // Anything that makes an unfinished request hopeless, beyond a failure. With mutex_ held.
  virtual Status check_progress_possible() { return Status::ok(); }
  virtual bool has_own_work(const Request& request) const = 0;
  virtual std::size_t message_bytes(const Request& request) const = 0;
  // The request is done and about to be given back. With mutex_ held.
  virtual void on_finished(const Request&) {}

  CommStats stats_;  // before the streams: they count in it

  struct DrivenStream {
    std::unique_ptr<DataStream> stream;
    // Never change once the stream may be kicked. nullptr: the calling thread drives it.
    EventLoopWorker* worker = nullptr;
    std::uint64_t worker_stream_id = 0;
  };

  // Guards the calling thread's streams, the ring and the registrations. NCCL calls a comm from one thread at a time,
  // but tears it down from another than the one that moved its data.
  std::mutex mutex_;
  // Grows under mutex_, within its capacity: elements stay where they are, so fail() may walk the first
  // `stream_count_` from any thread.
  std::vector<DrivenStream> streams_;
  std::atomic<std::size_t> stream_count_{0};
  std::vector<DataStream*> own_streams_;
  std::array<Request, kMaxRequestsPerComm> requests_;
  std::uint64_t next_number_ = 0;

 private:
  Status add_stream(std::unique_ptr<DataStream> stream);
  Status test(Request* request, bool* done, std::size_t* bytes);

  const std::string peer_;
  WorkerPool* const pool_;
  const WorkerPool::Lane lane_;
  const std::shared_ptr<StreamArrivals> arrivals_;
  bool stopped_ = false;  // guarded by mutex_: no stream is driven any more
  std::vector<std::unique_ptr<MemoryRegistration>> registrations_;
  std::mutex failure_mutex_;
  Status failure_;                   // guarded by failure_mutex_
  std::atomic<bool> failed_{false};  // set after failure_ was written
};

}  // namespace bagua_net

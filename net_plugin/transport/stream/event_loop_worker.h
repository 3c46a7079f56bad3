// EventLoopWorker: one I/O thread of the pool. It drives the data streams attached to it: spins while traffic flows,
// a short time if all of it goes to other hosts, then sleeps in epoll until a socket is ready or somebody kicks a
// stream. An idle worker never wakes.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "os/epoll_poller.h"
#include "transport/stream/data_stream.h"
#include "transport/tuning/thread_load.h"

namespace bagua_net {

// What lies between the two ends of a connection.
enum class PeerLocation { kWithinHost, kBetweenHosts };

class EventLoopWorker {
 public:
  // affinity: the CPUs to run on. The caller's own mask would be that of NCCL's proxy thread: the CPUs near one GPU.
  EventLoopWorker(int spin_us, const cpu_set_t& affinity) : spin_us_(spin_us), affinity_(affinity) {}
  ~EventLoopWorker();  // joins; every stream must be detached

  Status start(int number);

  // The stream is driven by this worker until detach() returned.
  Status attach(DataStream* stream, std::uint64_t* stream_id, PeerLocation location = PeerLocation::kWithinHost);
  // Waits until the worker is outside the stream; it never enters it again. Bounded: a worker never blocks in I/O.
  void detach(DataStream* stream, std::uint64_t stream_id);
  // The stream has something to do. Any thread.
  void kick(std::uint64_t stream_id);
  // Wakes a sleeping worker, because there will be work soon. It busy-polls as after work. Any thread.
  void rouse();
  // A kick takes effect at once. If it is false, a kick first has to wake the thread. Any thread.
  bool is_awake() const { return awake_.load(std::memory_order_relaxed); }

 private:
  struct Attached {
    DataStream* stream;
    PeerLocation location;
    bool runnable = false;  // in runnable_
  };

  void run();
  void fail(const Status& failure);
  void take_event(const EpollPoller::Event& event) REQUIRES(streams_mutex_);
  void make_runnable(std::uint64_t stream_id) REQUIRES(streams_mutex_);
  bool run_streams() REQUIRES(streams_mutex_);  // true: some stream wants to go on at once
  void collect_kicks() REQUIRES(streams_mutex_);
  bool prepare_to_sleep();
  void forget(std::uint64_t stream_id) REQUIRES(streams_mutex_);
  int spin_us_now() const REQUIRES(streams_mutex_);

  const int spin_us_;
  const cpu_set_t affinity_;
  EpollPoller poller_;
  std::thread thread_;

  LoopMutex streams_mutex_;  // held by the thread while it drives streams, so that detach() only has to take it
  std::unordered_map<std::uint64_t, Attached> streams_ GUARDED_BY(streams_mutex_);
  std::vector<std::uint64_t> runnable_ GUARDED_BY(streams_mutex_);
  std::vector<std::uint64_t> next_runnable_ GUARDED_BY(streams_mutex_);
  std::uint64_t next_id_ GUARDED_BY(streams_mutex_) = 0;
  std::size_t within_host_ GUARDED_BY(streams_mutex_) = 0;  // of streams_
  PollingTime polling_time_ GUARDED_BY(streams_mutex_);     // if all streams go to other hosts
  Status failure_ GUARDED_BY(streams_mutex_);               // the thread has ended with it

  Mutex kick_mutex_;
  std::vector<std::uint64_t> kicked_ GUARDED_BY(kick_mutex_);
  bool sleeping_ GUARDED_BY(kick_mutex_) = false;  // a kick must wake the thread
  bool stopping_ GUARDED_BY(kick_mutex_) = false;
  std::atomic<bool> has_kicks_{false};  // hint that kicked_ is not empty, saves the lock while spinning
  std::atomic<bool> awake_{false};      // written by the thread alone: one that was only told to wake is not awake yet
};

}  // namespace bagua_net

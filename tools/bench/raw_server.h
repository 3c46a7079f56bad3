// RawServer: the receiving end of raw mode. Counts what arrives on all connections together; when the run's bytes are
// there it acknowledges with one byte on connection 0. Its seconds begin with the first bytes that arrive.
#pragma once

#include <atomic>

#include "bench/raw_end.h"

namespace bagua_net::bench {

class RawServer final : public RawEnd {
 public:
  using RawEnd::RawEnd;
  ~RawServer() override { stop_threads(); }

  Status connect() override;
  Status run(std::int64_t bytes, std::size_t memory_bytes) override;

 private:
  Status accept_stream(std::int64_t deadline, std::size_t* accepted);
  void receive_blocks(std::size_t stream);

  OwnedFd listener_;
  // Sequentially consistent: a stream thread adds to arrived_ and then looks at run_end_, the main thread sets run_end_
  // and then looks at arrived_. One of the two has to see the other.
  std::atomic<std::int64_t> arrived_{0};    // bytes of all runs on all streams
  std::atomic<std::int64_t> run_end_{0};    // value of arrived_ at which the run ends
  std::atomic<std::int64_t> run_begin_{0};  // and at which it begins; equal to run_end_ between runs
  std::atomic<double> first_arrival_{0};    // when the run's first bytes had been received
  // Of each stream. What comes before our own command, or in a recv that waited for it, still goes through the region
  // of the run before: the client's time must not depend on when the command reached us. Relaxed: nothing else follows.
  std::atomic<std::size_t> run_region_bytes_{0};
  ResourceUsage idle_usage_;  // at the end of the run before: a client may start earlier than we do
};

}  // namespace bagua_net::bench

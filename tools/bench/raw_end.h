// RawEnd: what the two ends of raw mode share: the connections with a thread for each, the memory, and the first
// failure of any thread. The main thread owns it and calls it; the stream threads only use their own socket and their
// own part of the memory. The memory stays where it is until they have ended: between runs a server's thread waits in
// recv.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/owned_fd.h"
#include "base/status.h"
#include "bench/page_buffer.h"
#include "bench/raw_region.h"
#include "bench/resource_meter.h"
#include "os/socket_address.h"

namespace bagua_net::bench {

struct RawOptions {
  bool is_server = false;
  SocketAddress address;  // to listen on or to connect to
  std::size_t streams = 1;
  std::size_t write_bytes = std::size_t{1} << 20;   // at most, in one call
  std::size_t memory_bytes = std::size_t{1} << 20;  // of all streams, for the largest run
  std::int64_t timeout_ms = 60000;
};

class RawEnd {
 public:
  explicit RawEnd(const RawOptions& options) : options_(options), sockets_(options.streams) {}
  virtual ~RawEnd() = default;
  RawEnd(const RawEnd&) = delete;
  RawEnd& operator=(const RawEnd&) = delete;

  virtual Status connect() = 0;
  // Moves that many bytes from client to server, through `memory_bytes` (at most those of the options) of memory on
  // each end; called on both ends.
  virtual Status run(std::int64_t bytes, std::size_t memory_bytes) = 0;

 protected:
  Status allocate_memory();
  // Of one stream in a run of that memory; rounded up, so that each has some.
  std::size_t region_bytes(std::size_t memory_bytes) const {
    return (memory_bytes + options_.streams - 1) / options_.streams;
  }
  RawRegion region(std::size_t stream, std::size_t bytes) const {
    return {memory_.data() + stream * region_stride_, bytes, options_.write_bytes};
  }

  template <typename Function>
  void start_threads(Function function) {
    for (std::size_t stream = 0; stream < options_.streams; ++stream) threads_.emplace_back(function, stream);
  }

  // Derived destructors call it first: the threads use their members.
  void stop_threads();

  // Wakes the main thread; the first failure is the one that counts.
  void fail(Status status);

  static void report(std::int64_t bytes, double seconds, const ResourceUsage& used);

  const RawOptions options_;
  std::vector<OwnedFd> sockets_;
  PageBuffer memory_;
  std::size_t region_stride_ = 0;  // whole pages: no two regions share a cache line
  std::vector<std::thread> threads_;

  std::mutex mutex_;  // guards failure_, is_stopping_ and what derived classes say; changed_ goes with it
  std::condition_variable changed_;
  Status failure_;
  bool is_stopping_ = false;
};

}  // namespace bagua_net::bench

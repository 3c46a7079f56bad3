// RawEnd: what the two ends of raw mode share: the connections, a buffer and a thread for each, and the first failure
// of any thread. The main thread owns it and calls it; the stream threads only use their own socket and buffer.
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
#include "bench/resource_meter.h"
#include "os/socket_address.h"

namespace bagua_net::bench {

struct RawOptions {
  bool is_server = false;
  SocketAddress address;  // to listen on or to connect to
  std::size_t streams = 1;
  std::size_t write_bytes = std::size_t{1} << 20;
  std::int64_t timeout_ms = 60000;
};

class RawEnd {
 public:
  explicit RawEnd(const RawOptions& options)
      : options_(options), sockets_(options.streams), buffers_(options.streams) {}
  virtual ~RawEnd() = default;
  RawEnd(const RawEnd&) = delete;
  RawEnd& operator=(const RawEnd&) = delete;

  virtual Status connect() = 0;
  // Moves that many bytes from client to server; called on both ends.
  virtual Status run(std::int64_t bytes) = 0;

 protected:
  Status allocate_buffers();

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
  std::vector<PageBuffer> buffers_;
  std::vector<std::thread> threads_;

  std::mutex mutex_;  // guards failure_, is_stopping_ and what derived classes say; changed_ goes with it
  std::condition_variable changed_;
  Status failure_;
  bool is_stopping_ = false;
};

}  // namespace bagua_net::bench

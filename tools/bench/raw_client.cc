#include "bench/raw_client.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <string>

#include "base/monotonic_clock.h"
#include "bench/endpoint.h"
#include "bench/raw_socket.h"
#include "os/tcp_socket.h"

namespace bagua_net::bench {

Status RawClient::connect() {
  BAGUA_NET_RETURN_IF_ERROR(allocate_memory());
  const std::int64_t deadline = monotonic_ms() + options_.timeout_ms;
  for (std::size_t stream = 0; stream < options_.streams; ++stream) {
    BAGUA_NET_RETURN_IF_ERROR(connect_stream(stream, deadline));
  }
  BAGUA_NET_RETURN_IF_ERROR(receive_answer(kAllConnected));
  start_threads([this](std::size_t stream) { send_blocks(stream); });
  return Status::ok();
}

Status RawClient::connect_stream(std::size_t stream, std::int64_t deadline) {
  const std::string server = options_.address.to_string();
  OwnedFd socket(::socket(options_.address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket.is_open()) return Status::system_error("socket for " + server, errno);
  // The plugin's own options, so that the limit is that of the same TCP: within a host the system's congestion control
  // may cost half of the rate.
  BAGUA_NET_RETURN_IF_ERROR(apply_tcp_options(socket.get(), TcpOptions{}, options_.address.is_loopback()));
  if (::connect(socket.get(), options_.address.data(), options_.address.length()) != 0 && errno != EINPROGRESS) {
    return Status::system_error("connect to " + server, errno);
  }
  pollfd writable{socket.get(), POLLOUT, 0};
  const auto left_ms = static_cast<int>(std::max<std::int64_t>(0, deadline - monotonic_ms()));
  if (poll(&writable, 1, left_ms) <= 0) {
    return Status::remote_error("connect to " + server + ": no answer within " + std::to_string(options_.timeout_ms) +
                                " ms: can the host and the port be reached?");
  }
  int error = 0;
  socklen_t length = sizeof error;
  getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  if (error != 0) {
    return Status::remote_error(Status::system_error("connect to " + server, error).message() +
                                ": does the server run, and is this the address that it printed?");
  }
  fcntl(socket.get(), F_SETFL, fcntl(socket.get(), F_GETFL) & ~O_NONBLOCK);
  set_call_deadline(socket.get(), SO_SNDTIMEO, options_.timeout_ms);
  set_call_deadline(socket.get(), SO_RCVTIMEO, options_.timeout_ms);
  const RawHello::Bytes hello = RawHello{stream, options_.streams}.encode();
  BAGUA_NET_RETURN_IF_ERROR(send_exactly(socket.get(), stream, options_.timeout_ms, hello.data(), hello.size()));
  sockets_[stream] = std::move(socket);
  return Status::ok();
}

Status RawClient::receive_answer(std::uint8_t expected) {
  std::uint8_t answer = 0;
  BAGUA_NET_RETURN_IF_ERROR(receive_exactly(sockets_[0].get(), 0, options_.timeout_ms, &answer, 1));
  if (answer == expected) return Status::ok();
  return Status::remote_error("the server at " + options_.address.to_string() + " answered with byte " +
                              std::to_string(answer) + " instead of " + std::to_string(expected) +
                              ": it is not a bagua-net-driver of this version");
}

void RawClient::send_blocks(std::size_t stream) {
  for (std::int64_t seen_run = 0;;) {
    std::int64_t total = 0;
    std::size_t bytes_of_region = 0;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return is_stopping_ || run_number_ > seen_run; });
      if (is_stopping_) return;
      seen_run = run_number_;
      total = run_bytes_;
      bytes_of_region = run_region_bytes_;
    }
    RawRegion memory = region(stream, bytes_of_region);
    while (true) {
      const auto block = static_cast<std::int64_t>(memory.block());
      const std::int64_t begin = next_byte_.fetch_add(block, std::memory_order_relaxed);
      if (begin >= total) break;
      const auto bytes = static_cast<std::size_t>(std::min(block, total - begin));
      Status status = send_exactly(sockets_[stream].get(), stream, options_.timeout_ms, memory.data(), bytes);
      if (!status.is_ok()) {
        fail(std::move(status));
        return;
      }
      memory.advance(bytes);
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--sending_threads_ == 0) changed_.notify_all();
  }
}

Status RawClient::run(std::int64_t bytes, std::size_t memory_bytes) {
  const ResourceUsage before = ResourceUsage::now();
  const double began = monotonic_seconds();
  {
    std::unique_lock<std::mutex> lock(mutex_);
    next_byte_.store(0, std::memory_order_relaxed);
    run_bytes_ = bytes;
    run_region_bytes_ = region_bytes(memory_bytes);
    sending_threads_ = options_.streams;
    ++run_number_;
    changed_.notify_all();
    // No deadline here: a thread whose send moves nothing for timeout_ms fails, which ends this wait.
    changed_.wait(lock, [&] { return sending_threads_ == 0 || !failure_.is_ok(); });
    if (!failure_.is_ok()) return failure_;
  }
  BAGUA_NET_RETURN_IF_ERROR(receive_answer(kRunReceived));
  const double seconds = monotonic_seconds() - began;
  report(bytes, seconds, ResourceUsage::now().since(before));
  return Status::ok();
}

}  // namespace bagua_net::bench

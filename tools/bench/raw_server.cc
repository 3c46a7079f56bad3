#include "bench/raw_server.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <string>

#include "base/monotonic_clock.h"
#include "bench/driver_protocol.h"
#include "bench/endpoint.h"
#include "bench/raw_socket.h"

namespace bagua_net::bench {
namespace {

// Longer than a live client needs for the bytes that it sends right after connecting.
constexpr std::int64_t kHelloDeadlineMs = 2000;

}  // namespace

Status RawServer::connect() {
  SocketAddress bound;
  BAGUA_NET_RETURN_IF_ERROR(listen_on(options_.address, &listener_, &bound));
  BAGUA_NET_RETURN_IF_ERROR(allocate_memory());
  write_event(JsonLine("listening").add("address", bound.to_string()));

  const std::int64_t deadline = monotonic_ms() + options_.timeout_ms;
  for (std::size_t accepted = 0; accepted < options_.streams;) {
    BAGUA_NET_RETURN_IF_ERROR(accept_stream(deadline, &accepted));
  }
  listener_.reset();
  idle_usage_ = ResourceUsage::now();
  run_region_bytes_.store(region_bytes(options_.memory_bytes), std::memory_order_relaxed);
  start_threads([this](std::size_t stream) { receive_blocks(stream); });
  return send_exactly(sockets_[0].get(), 0, options_.timeout_ms, &kAllConnected, 1);
}

// Accepts one connection; one that is not a client's is dropped.
Status RawServer::accept_stream(std::int64_t deadline, std::size_t* accepted) {
  const std::int64_t left = deadline - monotonic_ms();
  if (left <= 0) {
    return Status::remote_error("only " + std::to_string(*accepted) + " of " + std::to_string(options_.streams) +
                                " streams were connected within " + std::to_string(options_.timeout_ms) +
                                " ms: does the client run with the same --streams?");
  }
  pollfd readable{listener_.get(), POLLIN, 0};
  if (poll(&readable, 1, static_cast<int>(left)) <= 0) return Status::ok();
  OwnedFd socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!socket.is_open()) {
    return errno == EAGAIN || errno == EINTR || errno == ECONNABORTED ? Status::ok()
                                                                      : Status::system_error("accept", errno);
  }
  set_call_deadline(socket.get(), SO_RCVTIMEO, std::min(left, kHelloDeadlineMs));
  RawHello::Bytes bytes{};
  RawHello hello;
  if (!receive_exactly(socket.get(), *accepted, left, bytes.data(), bytes.size()).is_ok()) return Status::ok();
  if (!RawHello::decode(bytes, &hello)) return Status::ok();
  if (hello.streams != options_.streams) {
    return Status::invalid_usage("the client has --streams " + std::to_string(hello.streams) + ", this server has " +
                                 std::to_string(options_.streams) + ": give both the same");
  }
  if (hello.stream >= hello.streams || sockets_[hello.stream].is_open()) return Status::ok();
  set_call_deadline(socket.get(), SO_RCVTIMEO, 0);  // between runs a thread waits as long as the client likes
  set_call_deadline(socket.get(), SO_SNDTIMEO, options_.timeout_ms);
  BAGUA_NET_RETURN_IF_ERROR(set_no_delay(socket.get()));
  sockets_[hello.stream] = std::move(socket);
  ++*accepted;
  return Status::ok();
}

void RawServer::receive_blocks(std::size_t stream) {
  RawRegion memory = region(stream, run_region_bytes_.load(std::memory_order_relaxed));
  while (true) {
    const ssize_t received = recv(sockets_[stream].get(), memory.data(), memory.block(), 0);
    if (received < 0 && errno == EINTR) continue;
    if (received <= 0) {
      fail(stream_failure("recv", stream, received, errno, options_.timeout_ms));
      return;
    }
    memory.advance(static_cast<std::size_t>(received));
    memory.resize(run_region_bytes_.load(std::memory_order_relaxed));
    const std::int64_t before = arrived_.fetch_add(received);
    if (before == run_begin_.load()) {
      first_arrival_.store(monotonic_seconds());
    }
    const std::int64_t end = run_end_.load();
    if (before < end && before + received >= end) {
      // Under the mutex, so that the main thread is either before its look at arrived_ or asleep.
      const std::lock_guard<std::mutex> lock(mutex_);
      changed_.notify_all();
    }
  }
}

Status RawServer::run(std::int64_t bytes, std::size_t memory_bytes) {
  run_region_bytes_.store(region_bytes(memory_bytes), std::memory_order_relaxed);
  std::int64_t seen = arrived_.load();
  const std::int64_t end = run_begin_.load() + bytes;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    run_end_.store(end);
    const auto is_over = [&] { return arrived_.load() >= end || !failure_.is_ok(); };
    while (!changed_.wait_for(lock, std::chrono::milliseconds(options_.timeout_ms), is_over)) {
      const std::int64_t arrived = arrived_.load();
      if (arrived == seen) {
        return Status::remote_error("nothing arrived for " + std::to_string(options_.timeout_ms) + " ms; " +
                                    std::to_string(arrived - end + bytes) + " of " + std::to_string(bytes) +
                                    " bytes did: does the client run the same size?");
      }
      seen = arrived;
    }
    const std::int64_t arrived = arrived_.load();
    if (arrived < end) {
      return failure_.with_context(std::to_string(arrived - end + bytes) + " of " + std::to_string(bytes) +
                                   " bytes arrived");
    }
    if (arrived > end) {
      return Status::invalid_usage("the client sent more than the " + std::to_string(bytes) +
                                   " bytes of this run: give both ends the same size");
    }
  }
  const double seconds = monotonic_seconds() - first_arrival_.load();
  const ResourceUsage usage = ResourceUsage::now();
  run_begin_.store(end);  // before the acknowledgement: then the next run may begin
  BAGUA_NET_RETURN_IF_ERROR(send_exactly(sockets_[0].get(), 0, options_.timeout_ms, &kRunReceived, 1));
  report(bytes, seconds, usage.since(idle_usage_));
  idle_usage_ = usage;
  return Status::ok();
}

}  // namespace bagua_net::bench

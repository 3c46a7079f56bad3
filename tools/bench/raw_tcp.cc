#include "bench/raw_tcp.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>

#include "bench/command_line.h"
#include "bench/driver_protocol.h"
#include "bench/endpoint.h"
#include "bench/page_buffer.h"
#include "bench/resource_meter.h"

namespace bagua_net::bench {
namespace {

constexpr std::int64_t kMaxStreams = 256;
constexpr std::int64_t kMaxRunBytes = std::int64_t{1} << 50;
constexpr double kHelloDeadlineSeconds = 2.0;
constexpr std::uint8_t kAllConnected = 'C';
constexpr std::uint8_t kRunReceived = 'R';

// The first bytes of every connection, client to server.
//   0  8  "BAGUARAW"
//   8  2  index of this connection, big-endian
//  10  2  number of connections, big-endian
constexpr char kHelloMagic[] = "BAGUARAW";
using Hello = std::array<std::uint8_t, 12>;

Hello make_hello(std::size_t index, std::size_t streams) {
  Hello hello{};
  std::memcpy(hello.data(), kHelloMagic, 8);
  hello[8] = static_cast<std::uint8_t>(index >> 8);
  hello[9] = static_cast<std::uint8_t>(index);
  hello[10] = static_cast<std::uint8_t>(streams >> 8);
  hello[11] = static_cast<std::uint8_t>(streams);
  return hello;
}

struct RawOptions {
  bool is_server = false;
  SocketAddress address;  // to listen on or to connect to
  std::size_t streams = 1;
  std::size_t write_bytes = std::size_t{1} << 20;
  double timeout_s = 60;
};

Status parse_raw_options(const std::vector<std::string>& words, RawOptions* options) {
  CommandLine line;
  BAGUA_NET_RETURN_IF_ERROR(CommandLine::parse(
      words, {"--role", "--streams", "--address", "--connect", "--write-bytes", "--timeout-ms"}, &line));
  std::string role;
  BAGUA_NET_RETURN_IF_ERROR(line.choice("--role", {"server", "client"}, &role));
  options->is_server = role == "server";
  if (line.has(options->is_server ? "--connect" : "--address")) {
    return Status::invalid_argument("a server takes --address to listen on, a client --connect to the server");
  }
  if (options->is_server) {
    BAGUA_NET_RETURN_IF_ERROR(
        parse_endpoint("--address", line.text_or("--address", "127.0.0.1"), &options->address));
  } else {
    std::string text;
    BAGUA_NET_RETURN_IF_ERROR(line.text("--connect", &text));
    BAGUA_NET_RETURN_IF_ERROR(parse_endpoint("--connect", text, &options->address));
    if (options->address.port() == 0) {
      return Status::invalid_argument("--connect is \"" + text + "\": the port is missing; the server printed it");
    }
  }
  std::int64_t number = 0;
  BAGUA_NET_RETURN_IF_ERROR(line.integer("--streams", 1, kMaxStreams, &number));
  options->streams = static_cast<std::size_t>(number);
  BAGUA_NET_RETURN_IF_ERROR(line.integer_or("--write-bytes", 1, std::int64_t{1} << 30, std::int64_t{1} << 20, &number));
  options->write_bytes = static_cast<std::size_t>(number);
  BAGUA_NET_RETURN_IF_ERROR(line.integer_or("--timeout-ms", 100, 3'600'000, 60000, &number));
  options->timeout_s = static_cast<double>(number) / 1000;
  return Status::ok();
}

// 0: no limit. A call that moves nothing for that long fails with EAGAIN.
void set_call_deadline(int socket, int option, double seconds) {
  timeval time{};
  time.tv_sec = static_cast<time_t>(seconds);
  time.tv_usec = static_cast<suseconds_t>((seconds - static_cast<double>(time.tv_sec)) * 1e6);
  setsockopt(socket, SOL_SOCKET, option, &time, sizeof time);
}

void set_blocking(int socket) { fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) & ~O_NONBLOCK); }

Status stream_failure(const std::string& operation, std::size_t stream, ssize_t result, int error, double timeout_s) {
  const std::string where = operation + " on stream " + std::to_string(stream);
  if (result == 0) return Status::remote_error(where + ": closed by the other end: has that process ended?");
  if (error == EAGAIN || error == EWOULDBLOCK) {
    return Status::remote_error(where + ": nothing moved for " + std::to_string(timeout_s) +
                                " s: does the other end run the same command?");
  }
  if (error == ECONNRESET || error == EPIPE) {
    return Status::remote_error(Status::system_error(where, error).message() + ": has the other process ended?");
  }
  return Status::system_error(where, error);
}

// Exactly `bytes`, within the socket's call deadline.
Status receive_exactly(int socket, std::size_t stream, double timeout_s, std::uint8_t* data, std::size_t bytes) {
  for (std::size_t offset = 0; offset < bytes;) {
    const ssize_t received = recv(socket, data + offset, bytes - offset, 0);
    if (received < 0 && errno == EINTR) continue;
    if (received <= 0) return stream_failure("recv", stream, received, errno, timeout_s);
    offset += static_cast<std::size_t>(received);
  }
  return Status::ok();
}

Status send_exactly(int socket, std::size_t stream, double timeout_s, const std::uint8_t* data, std::size_t bytes) {
  for (std::size_t offset = 0; offset < bytes;) {
    const ssize_t sent = send(socket, data + offset, bytes - offset, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return stream_failure("send", stream, sent, errno, timeout_s);
    offset += static_cast<std::size_t>(sent);
  }
  return Status::ok();
}

// What both ends have: the connections, a buffer and a thread for each, and the first failure of any thread.
class RawEnd {
 public:
  explicit RawEnd(const RawOptions& options)
      : options_(options), sockets_(options.streams), buffers_(options.streams) {}
  virtual ~RawEnd() = default;
  RawEnd(const RawEnd&) = delete;
  RawEnd& operator=(const RawEnd&) = delete;

  virtual Status connect() = 0;
  virtual Status run(std::int64_t bytes) = 0;

 protected:
  Status allocate_buffers() {
    for (PageBuffer& buffer : buffers_) {
      BAGUA_NET_RETURN_IF_ERROR(buffer.allocate(options_.write_bytes, "a stream's buffer"));
    }
    return Status::ok();
  }

  template <typename Function>
  void start_threads(Function function) {
    for (std::size_t stream = 0; stream < options_.streams; ++stream) threads_.emplace_back(function, stream);
  }

  // Derived destructors call it first: the threads use their members.
  void stop_threads() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      is_stopping_ = true;
    }
    changed_.notify_all();
    for (const OwnedFd& socket : sockets_) {
      if (socket.is_open()) shutdown(socket.get(), SHUT_RDWR);  // wakes a thread that waits in recv or send
    }
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  // Wakes the main thread; the first failure is the one that counts.
  void fail(Status status) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (failure_.is_ok()) failure_ = std::move(status);
    }
    changed_.notify_all();
  }

  void report(std::int64_t bytes, double seconds, const ResourceUsage& used) const {
    JsonLine line("result");
    line.add("bytes", bytes).add("seconds", seconds);
    used.add_to(&line);
    write_event(line);
  }

  const RawOptions options_;
  std::vector<OwnedFd> sockets_;
  std::vector<PageBuffer> buffers_;
  std::vector<std::thread> threads_;

  std::mutex mutex_;  // guards failure_, is_stopping_ and what derived classes say; changed_ goes with it
  std::condition_variable changed_;
  Status failure_;
  bool is_stopping_ = false;
};

class RawServer final : public RawEnd {
 public:
  using RawEnd::RawEnd;
  ~RawServer() override { stop_threads(); }

  Status connect() override;
  Status run(std::int64_t bytes) override;

 private:
  Status accept_stream(double deadline, std::size_t* accepted);
  void receive_blocks(std::size_t stream);

  OwnedFd listener_;
  // Bytes of all runs on all streams. Relaxed: the mutex orders what depends on reaching the target.
  std::atomic<std::int64_t> arrived_{0};
  std::atomic<std::int64_t> run_begin_{0};   // value of arrived_ at which the current or next run begins
  std::atomic<std::int64_t> run_end_{0};     // and ends; equal to run_begin_ between runs
  std::atomic<double> first_arrival_{0};     // when the run's first bytes had been received
  ResourceUsage idle_usage_;                 // at the end of the run before: a client may start earlier than we do
};

Status RawServer::connect() {
  SocketAddress bound;
  BAGUA_NET_RETURN_IF_ERROR(listen_on(options_.address, &listener_, &bound));
  BAGUA_NET_RETURN_IF_ERROR(allocate_buffers());
  write_event(JsonLine("listening").add("address", bound.to_string()));

  const double deadline = monotonic_seconds() + options_.timeout_s;
  for (std::size_t accepted = 0; accepted < options_.streams;) {
    BAGUA_NET_RETURN_IF_ERROR(accept_stream(deadline, &accepted));
  }
  listener_.reset();
  idle_usage_ = ResourceUsage::now();
  start_threads([this](std::size_t stream) { receive_blocks(stream); });
  return send_exactly(sockets_[0].get(), 0, options_.timeout_s, &kAllConnected, 1);
}

// Accepts one connection; one that is not a client's is dropped.
Status RawServer::accept_stream(double deadline, std::size_t* accepted) {
  const double left = deadline - monotonic_seconds();
  if (left <= 0) {
    return Status::remote_error("only " + std::to_string(*accepted) + " of " + std::to_string(options_.streams) +
                                " streams were connected within " + std::to_string(options_.timeout_s) +
                                " s: does the client run with the same --streams?");
  }
  pollfd readable{listener_.get(), POLLIN, 0};
  if (poll(&readable, 1, static_cast<int>(left * 1000) + 1) <= 0) return Status::ok();
  OwnedFd socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!socket.is_open()) {
    return errno == EAGAIN || errno == EINTR || errno == ECONNABORTED ? Status::ok()
                                                                      : Status::system_error("accept", errno);
  }
  set_call_deadline(socket.get(), SO_RCVTIMEO, std::min(left, kHelloDeadlineSeconds));
  Hello hello{};
  if (!receive_exactly(socket.get(), *accepted, left, hello.data(), hello.size()).is_ok()) return Status::ok();
  if (std::memcmp(hello.data(), kHelloMagic, 8) != 0) return Status::ok();
  const auto stream = static_cast<std::size_t>(hello[8] << 8 | hello[9]);
  const auto streams = static_cast<std::size_t>(hello[10] << 8 | hello[11]);
  if (streams != options_.streams) {
    return Status::invalid_usage("the client has --streams " + std::to_string(streams) + ", this server has " +
                                 std::to_string(options_.streams) + ": give both the same");
  }
  if (stream >= streams || sockets_[stream].is_open()) return Status::ok();
  set_call_deadline(socket.get(), SO_RCVTIMEO, 0);  // between runs a thread waits as long as the client likes
  set_call_deadline(socket.get(), SO_SNDTIMEO, options_.timeout_s);
  BAGUA_NET_RETURN_IF_ERROR(set_no_delay(socket.get()));
  sockets_[stream] = std::move(socket);
  ++*accepted;
  return Status::ok();
}

void RawServer::receive_blocks(std::size_t stream) {
  PageBuffer& buffer = buffers_[stream];
  while (true) {
    const ssize_t received = recv(sockets_[stream].get(), buffer.data(), buffer.bytes(), 0);
    if (received < 0 && errno == EINTR) continue;
    if (received <= 0) {
      fail(stream_failure("recv", stream, received, errno, options_.timeout_s));
      return;
    }
    const std::int64_t before = arrived_.fetch_add(received, std::memory_order_relaxed);
    if (before == run_begin_.load(std::memory_order_relaxed)) {
      first_arrival_.store(monotonic_seconds(), std::memory_order_relaxed);
    }
    const std::int64_t end = run_end_.load(std::memory_order_relaxed);
    if (before < end && before + received >= end) {
      // Under the mutex, so that the main thread is either before its look at arrived_ or asleep.
      const std::lock_guard<std::mutex> lock(mutex_);
      changed_.notify_all();
    }
  }
}

Status RawServer::run(std::int64_t bytes) {
  std::int64_t seen = arrived_.load(std::memory_order_relaxed);
  const std::int64_t end = run_begin_.load(std::memory_order_relaxed) + bytes;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    run_end_.store(end, std::memory_order_relaxed);
    const auto is_over = [&] { return arrived_.load(std::memory_order_relaxed) >= end || !failure_.is_ok(); };
    while (!changed_.wait_for(lock, std::chrono::duration<double>(options_.timeout_s), is_over)) {
      const std::int64_t arrived = arrived_.load(std::memory_order_relaxed);
      if (arrived == seen) {
        return Status::remote_error("nothing arrived for " + std::to_string(options_.timeout_s) + " s; " +
                                    std::to_string(arrived - end + bytes) + " of " + std::to_string(bytes) +
                                    " bytes did: does the client run the same size?");
      }
      seen = arrived;
    }
    const std::int64_t arrived = arrived_.load(std::memory_order_relaxed);
    if (arrived < end) return failure_;
    if (arrived > end) {
      return Status::invalid_usage("the client sent more than the " + std::to_string(bytes) +
                                   " bytes of this run: give both ends the same size");
    }
  }
  const double seconds = monotonic_seconds() - first_arrival_.load(std::memory_order_relaxed);
  const ResourceUsage usage = ResourceUsage::now();
  run_begin_.store(end, std::memory_order_relaxed);  // before the acknowledgement: then the next run may begin
  BAGUA_NET_RETURN_IF_ERROR(send_exactly(sockets_[0].get(), 0, options_.timeout_s, &kRunReceived, 1));
  report(bytes, seconds, usage.since(idle_usage_));
  idle_usage_ = usage;
  return Status::ok();
}

class RawClient final : public RawEnd {
 public:
  using RawEnd::RawEnd;
  ~RawClient() override { stop_threads(); }

  Status connect() override;
  Status run(std::int64_t bytes) override;

 private:
  Status connect_stream(std::size_t stream, double deadline);
  Status receive_answer(std::uint8_t expected);
  void send_blocks(std::size_t stream);

  // Guarded by mutex_.
  std::int64_t run_number_ = 0;  // a thread starts when it grows
  std::int64_t run_bytes_ = 0;
  std::size_t sending_threads_ = 0;
  // The next byte of the run that no thread has taken; the mutex orders its reset.
  std::atomic<std::int64_t> next_byte_{0};
};

Status RawClient::connect() {
  BAGUA_NET_RETURN_IF_ERROR(allocate_buffers());
  const double deadline = monotonic_seconds() + options_.timeout_s;
  for (std::size_t stream = 0; stream < options_.streams; ++stream) {
    BAGUA_NET_RETURN_IF_ERROR(connect_stream(stream, deadline));
  }
  BAGUA_NET_RETURN_IF_ERROR(receive_answer(kAllConnected));
  start_threads([this](std::size_t stream) { send_blocks(stream); });
  return Status::ok();
}

Status RawClient::connect_stream(std::size_t stream, double deadline) {
  const std::string server = options_.address.to_string();
  OwnedFd socket(::socket(options_.address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket.is_open()) return Status::system_error("socket for " + server, errno);
  if (::connect(socket.get(), options_.address.data(), options_.address.length()) != 0 && errno != EINPROGRESS) {
    return Status::system_error("connect to " + server, errno);
  }
  pollfd writable{socket.get(), POLLOUT, 0};
  const int left_ms = static_cast<int>(std::max(0.0, deadline - monotonic_seconds()) * 1000);
  if (poll(&writable, 1, left_ms) <= 0) {
    return Status::remote_error("connect to " + server + ": no answer within " + std::to_string(options_.timeout_s) +
                                " s: can the host and the port be reached?");
  }
  int error = 0;
  socklen_t length = sizeof error;
  getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  if (error != 0) {
    return Status::remote_error(Status::system_error("connect to " + server, error).message() +
                                ": does the server run, and is this the address that it printed?");
  }
  set_blocking(socket.get());
  set_call_deadline(socket.get(), SO_SNDTIMEO, options_.timeout_s);
  set_call_deadline(socket.get(), SO_RCVTIMEO, options_.timeout_s);
  BAGUA_NET_RETURN_IF_ERROR(set_no_delay(socket.get()));
  const Hello hello = make_hello(stream, options_.streams);
  BAGUA_NET_RETURN_IF_ERROR(send_exactly(socket.get(), stream, options_.timeout_s, hello.data(), hello.size()));
  sockets_[stream] = std::move(socket);
  return Status::ok();
}

Status RawClient::receive_answer(std::uint8_t expected) {
  std::uint8_t answer = 0;
  BAGUA_NET_RETURN_IF_ERROR(receive_exactly(sockets_[0].get(), 0, options_.timeout_s, &answer, 1));
  if (answer == expected) return Status::ok();
  return Status::remote_error("the server at " + options_.address.to_string() + " answered with byte " +
                              std::to_string(answer) + " instead of " + std::to_string(expected) +
                              ": it is not a bagua-net-driver of this version");
}

void RawClient::send_blocks(std::size_t stream) {
  const PageBuffer& buffer = buffers_[stream];
  const auto block = static_cast<std::int64_t>(buffer.bytes());
  for (std::int64_t seen_run = 0;;) {
    std::int64_t total = 0;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return is_stopping_ || run_number_ > seen_run; });
      if (is_stopping_) return;
      seen_run = run_number_;
      total = run_bytes_;
    }
    while (true) {
      const std::int64_t begin = next_byte_.fetch_add(block, std::memory_order_relaxed);
      if (begin >= total) break;
      const auto bytes = static_cast<std::size_t>(std::min(block, total - begin));
      Status status = send_exactly(sockets_[stream].get(), stream, options_.timeout_s, buffer.data(), bytes);
      if (!status.is_ok()) {
        fail(std::move(status));
        return;
      }
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--sending_threads_ == 0) changed_.notify_all();
  }
}

Status RawClient::run(std::int64_t bytes) {
  const ResourceUsage before = ResourceUsage::now();
  const double began = monotonic_seconds();
  {
    std::unique_lock<std::mutex> lock(mutex_);
    next_byte_.store(0, std::memory_order_relaxed);
    run_bytes_ = bytes;
    sending_threads_ = options_.streams;
    ++run_number_;
    changed_.notify_all();
    // No deadline here: a thread whose send moves nothing for timeout_s fails, which ends this wait.
    changed_.wait(lock, [&] { return sending_threads_ == 0 || !failure_.is_ok(); });
    if (!failure_.is_ok()) return failure_;
  }
  BAGUA_NET_RETURN_IF_ERROR(receive_answer(kRunReceived));
  const double seconds = monotonic_seconds() - began;
  report(bytes, seconds, ResourceUsage::now().since(before));
  return Status::ok();
}

Status serve(RawEnd* end) {
  BAGUA_NET_RETURN_IF_ERROR(end->connect());
  write_event(JsonLine("connected"));
  std::vector<std::string> words;
  while (read_command(&words)) {
    if (words[0] == "quit") break;
    if (words[0] != "run") {
      return Status::invalid_argument("unknown command \"" + words[0] + "\"; raw mode knows run and quit");
    }
    BAGUA_NET_RETURN_IF_ERROR(expect_arguments(words, 1, "run BYTES"));
    std::int64_t bytes = 0;
    BAGUA_NET_RETURN_IF_ERROR(parse_integer("BYTES of run", words[1], 1, kMaxRunBytes, &bytes));
    BAGUA_NET_RETURN_IF_ERROR(end->run(bytes));
  }
  limit_closing_time();
  write_event(JsonLine("bye"));
  return Status::ok();
}

}  // namespace

Status run_raw_mode(const std::vector<std::string>& words) {
  RawOptions options;
  Status status = parse_raw_options(words, &options);
  if (!status.is_ok()) {
    report_failure(status);
    return status;
  }
  std::unique_ptr<RawEnd> end;
  if (options.is_server) {
    end = std::make_unique<RawServer>(options);
  } else {
    end = std::make_unique<RawClient>(options);
  }
  status = serve(end.get());
  // Before the destructor: nobody has to wait for the news until every thread is joined.
  if (!status.is_ok()) report_failure(status);
  return status;
}

}  // namespace bagua_net::bench

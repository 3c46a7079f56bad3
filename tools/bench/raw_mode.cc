// Raw mode: how fast TCP alone moves bytes from a client to a server over N connections with a thread each: the limit
// that transports are measured against. The threads write and read blocks and do nothing else. Each run says how much
// memory the blocks come from, because TCP copies cache-hot memory faster and for less CPU.
//
// The first bytes of every connection, client to server: "BAGUARAW", its index and the number of connections, each a
// byte. On connection 0, the server sends a byte when all are connected, and one at the end of each run.
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>

#include "base/monotonic_clock.h"
#include "base/owned_fd.h"
#include "bench/driver_protocol.h"
#include "bench/modes.h"
#include "bench/page_buffer.h"
#include "bench/tcp.h"
#include "os/tcp_socket.h"

namespace bagua_net::bench {
namespace {

constexpr std::int64_t kMaxStreams = 256;
constexpr std::int64_t kMaxWriteBytes = std::int64_t{1} << 30;
constexpr std::int64_t kMaxMemoryBytes = std::int64_t{1} << 40;
constexpr std::int64_t kMaxRunBytes = std::int64_t{1} << 50;
constexpr char kMagic[] = "BAGUARAW";
constexpr std::size_t kMagicBytes = sizeof kMagic - 1;
constexpr std::uint8_t kAllConnected = 'C';
constexpr std::uint8_t kRunReceived = 'R';
// Longer than a live client needs for the bytes that it sends right after connecting.
constexpr std::int64_t kHelloDeadlineMs = 2000;

using Hello = std::array<std::uint8_t, kMagicBytes + 2>;

// The number of streams is at most 256 and at least 1, and an index less.
Hello hello_of(std::size_t stream, std::size_t streams) {
  Hello hello{};
  std::memcpy(hello.data(), kMagic, kMagicBytes);
  hello[kMagicBytes] = static_cast<std::uint8_t>(stream);
  hello[kMagicBytes + 1] = static_cast<std::uint8_t>(streams - 1);
  return hello;
}

struct RawOptions {
  explicit RawOptions(const Words& words)
      : RawOptions(Options(words, {"--role", "--streams", "--address", "--connect", "--write-bytes", "--memory-bytes",
                                   "--timeout-ms"})) {}
  explicit RawOptions(const Options& options)
      : is_server(options.text("--role") == "server"),
        address(is_server ? parse_endpoint("--address", options.text("--address", "127.0.0.1"))
                          : parse_endpoint("--connect", options.text("--connect"))),
        streams(static_cast<std::size_t>(options.integer("--streams", 1, kMaxStreams))),
        write_bytes(static_cast<std::size_t>(options.integer("--write-bytes", 1, kMaxWriteBytes, 1 << 20))),
        memory_bytes(static_cast<std::size_t>(options.integer("--memory-bytes", 1, kMaxMemoryBytes, 1 << 20))),
        timeout_ms(options.integer("--timeout-ms", 100, 3'600'000, 60000)) {}

  bool is_server;
  SocketAddress address;  // to listen on or to connect to
  std::size_t streams;
  std::size_t write_bytes;   // at most, in one call
  std::size_t memory_bytes;  // of all streams, for the largest run
  std::int64_t timeout_ms;
};

// The memory that one stream moves. The stream goes through it block by block and begins again at its end: what a run
// copies is as warm or as cold in the CPU's caches as memory of that size is.
struct Region {
  std::uint8_t* data;
  std::size_t bytes;  // at least 1, as largest_block
  std::size_t largest_block;
  std::size_t offset = 0;

  // What a send or recv may use next: never empty, and never beyond the region's end.
  std::uint8_t* next() const { return data + offset; }
  std::size_t block() const { return std::min(largest_block, bytes - offset); }
  // Behind the first `moved` bytes of that block; from now on, the region has `size` bytes.
  void advance(std::size_t moved, std::size_t size) {
    offset += moved;
    bytes = size;
    if (offset >= bytes) offset = 0;
  }
};

// A send or recv (SO_SNDTIMEO, SO_RCVTIMEO) that moves nothing for that long fails. 0: no limit.
void set_call_deadline(int socket, int option, std::int64_t timeout_ms) {
  const timeval time{timeout_ms / 1000, timeout_ms % 1000 * 1000};
  setsockopt(socket, SOL_SOCKET, option, &time, sizeof time);
}

// What the two ends share: the connections with a thread for each, the memory, and the first failure of any thread. The
// main thread owns it and calls it; the stream threads only use their own socket and their own part of the memory. The
// memory stays where it is until they have ended: between runs a server's thread waits in recv.
class RawEnd {
 public:
  explicit RawEnd(RawOptions options) : options_(options), sockets_(options.streams) {}
  virtual ~RawEnd() = default;
  RawEnd(const RawEnd&) = delete;
  RawEnd& operator=(const RawEnd&) = delete;

  virtual void connect() = 0;
  // Moves that many bytes from client to server, through `memory_bytes` of memory on each end; called on both ends.
  // Returns the seconds.
  virtual double move(std::int64_t bytes, std::size_t memory_bytes) = 0;

  void serve() {
    connect();
    JsonLine("connected").send();
    cpu_before_ = cpu_seconds();
    bench::serve({{"run BYTES MEMORY", [this](const Words& words) { run(words); }}}, [] {});
  }

 protected:
  void allocate_memory() {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    region_stride_ = (region_bytes(options_.memory_bytes) + page - 1) / page * page;
    memory_.allocate(options_.streams * region_stride_, "the buffer of all streams");
  }
  // Of one stream in a run of that memory; rounded up, so that each has some.
  std::size_t region_bytes(std::size_t memory_bytes) const {
    return (memory_bytes + options_.streams - 1) / options_.streams;
  }
  Region region(std::size_t stream, std::size_t bytes) const {
    return {memory_.data() + stream * region_stride_, bytes, options_.write_bytes};
  }

  template <typename Function>
  void start_threads(Function function) {
    for (std::size_t stream = 0; stream < options_.streams; ++stream) {
      threads_.emplace_back([this, function, stream] {
        try {
          function(stream);
        } catch (const Failure& failure) {
          const std::lock_guard<std::mutex> lock(mutex_);
          if (failure_.empty()) failure_ = failure.what();
          changed_.notify_all();
        }
      });
    }
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
  }

  // Of a send or recv, which returned `result`.
  Failure stream_failure(const std::string& operation, std::size_t stream, ssize_t result) const {
    const int error = errno;
    const std::string where = operation + " on stream " + std::to_string(stream);
    if (result == 0) return Failure(where + ": closed by the other end: has that process ended?");
    if (is_temporary(error)) {
      return Failure(where + ": nothing moved for " + std::to_string(options_.timeout_ms) +
                     " ms: does the other end run the same command?");
    }
    const bool is_lost = error == ECONNRESET || error == EPIPE;
    const Failure failure = system_failure(where, error);
    return is_lost ? Failure(failure.what() + std::string(": has the other process ended?")) : failure;
  }

  // What is in the socket, at least a byte.
  std::size_t receive(int socket, std::size_t stream, std::uint8_t* data, std::size_t bytes) const {
    while (true) {
      const ssize_t received = recv(socket, data, bytes, 0);
      if (received > 0) return static_cast<std::size_t>(received);
      if (received == 0 || errno != EINTR) throw stream_failure("recv", stream, received);
    }
  }

  void send_all(int socket, std::size_t stream, const std::uint8_t* data, std::size_t bytes) const {
    for (std::size_t offset = 0; offset < bytes;) {
      const ssize_t sent = send(socket, data + offset, bytes - offset, MSG_NOSIGNAL);
      if (sent < 0 && errno == EINTR) continue;
      if (sent <= 0) throw stream_failure("send", stream, sent);
      offset += static_cast<std::size_t>(sent);
    }
  }

  const RawOptions options_;
  std::vector<OwnedFd> sockets_;
  std::mutex mutex_;  // guards failure_, is_stopping_ and what derived classes say; changed_ goes with it
  std::condition_variable changed_;
  std::string failure_;  // "": none
  bool is_stopping_ = false;

 private:
  void run(const Words& words) {
    const std::int64_t bytes = parse_integer("BYTES of run", words[1], 1, kMaxRunBytes);
    const auto most = static_cast<std::int64_t>(options_.memory_bytes);
    const std::int64_t memory = parse_integer("MEMORY of run (at most --memory-bytes)", words[2], 1, most);
    const double seconds = move(bytes, static_cast<std::size_t>(memory));
    // Since the end of the run before: a client may start earlier than a server is told to.
    const double cpu = cpu_seconds();
    JsonLine("result").add("bytes", bytes).add("seconds", seconds).add("cpu_s", cpu - cpu_before_).send();
    cpu_before_ = cpu;
  }

  PageBuffer memory_;
  std::size_t region_stride_ = 0;  // whole pages: no two regions share a cache line
  std::vector<std::thread> threads_;
  double cpu_before_ = 0;
};

// The sending end. Its threads take the next block of the run from one shared counter, so a slow connection takes
// fewer. Its seconds end with the server's acknowledgement.
class RawClient final : public RawEnd {
 public:
  using RawEnd::RawEnd;
  ~RawClient() override { stop_threads(); }

  void connect() override {
    allocate_memory();
    const std::int64_t deadline = monotonic_ms() + options_.timeout_ms;
    for (std::size_t stream = 0; stream < options_.streams; ++stream) connect_stream(stream, deadline);
    await_answer(kAllConnected);
    start_threads([this](std::size_t stream) { send_blocks(stream); });
  }

  double move(std::int64_t bytes, std::size_t memory_bytes) override {
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
      changed_.wait(lock, [&] { return sending_threads_ == 0 || !failure_.empty(); });
      if (!failure_.empty()) throw Failure(failure_);
    }
    await_answer(kRunReceived);
    return monotonic_seconds() - began;
  }

 private:
  void connect_stream(std::size_t stream, std::int64_t deadline) {
    const std::string what = "connect to " + options_.address.to_string();
    OwnedFd& socket = sockets_[stream];
    // The plugin's own options, so that the limit is that of the same TCP: within a host the system's congestion
    // control may cost half of the rate.
    require(tcp_connect(options_.address, TcpOptions{}, nullptr, &socket));
    pollfd writable{socket.get(), POLLOUT, 0};
    if (poll(&writable, 1, static_cast<int>(std::max<std::int64_t>(0, deadline - monotonic_ms()))) <= 0) {
      throw Failure(what + ": no answer within " + std::to_string(options_.timeout_ms) +
                    " ms: can the host and the port be reached?");
    }
    if (const int error = tcp_connect_result(socket.get())) {
      throw Failure(system_failure(what, error).what() +
                    std::string(": does the server run, and is this the address that it printed?"));
    }
    fcntl(socket.get(), F_SETFL, fcntl(socket.get(), F_GETFL) & ~O_NONBLOCK);
    set_call_deadline(socket.get(), SO_SNDTIMEO, options_.timeout_ms);
    set_call_deadline(socket.get(), SO_RCVTIMEO, options_.timeout_ms);
    const Hello hello = hello_of(stream, options_.streams);
    send_all(socket.get(), stream, hello.data(), hello.size());
  }

  void await_answer(std::uint8_t expected) {
    std::uint8_t answer = 0;
    receive(sockets_[0].get(), 0, &answer, 1);
    if (answer != expected) throw Failure("the server is not a bagua-net-driver of this version: reinstall bagua");
  }

  void send_blocks(std::size_t stream) {
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
      Region memory = region(stream, bytes_of_region);
      while (true) {
        const auto block = static_cast<std::int64_t>(memory.block());
        const std::int64_t begin = next_byte_.fetch_add(block, std::memory_order_relaxed);
        if (begin >= total) break;
        const auto bytes = static_cast<std::size_t>(std::min(block, total - begin));
        send_all(sockets_[stream].get(), stream, memory.next(), bytes);
        memory.advance(bytes, bytes_of_region);
      }
      const std::lock_guard<std::mutex> lock(mutex_);
      if (--sending_threads_ == 0) changed_.notify_all();
    }
  }

  // Guarded by mutex_.
  std::int64_t run_number_ = 0;  // a thread starts when it grows
  std::int64_t run_bytes_ = 0;
  std::size_t run_region_bytes_ = 0;
  std::size_t sending_threads_ = 0;
  // The next byte of the run that no thread has taken; relaxed: the mutex orders its reset.
  std::atomic<std::int64_t> next_byte_{0};
};

// The receiving end. Counts what arrives on all connections together; when the run's bytes are there it acknowledges.
// Its seconds begin with the first bytes that arrive.
class RawServer final : public RawEnd {
 public:
  using RawEnd::RawEnd;
  ~RawServer() override { stop_threads(); }

  void connect() override {
    SocketAddress bound = options_.address;
    OwnedFd listener;
    require(tcp_listen(&bound, &listener));
    allocate_memory();
    JsonLine("listening").add("address", bound.to_string()).send();
    const std::int64_t deadline = monotonic_ms() + options_.timeout_ms;
    for (std::size_t accepted = 0; accepted < options_.streams;) {
      const std::int64_t left = deadline - monotonic_ms();
      if (left <= 0) {
        throw Failure("only " + std::to_string(accepted) + " of " + std::to_string(options_.streams) +
                      " streams were connected within " + std::to_string(options_.timeout_ms) +
                      " ms: does the client run with the same --streams?");
      }
      pollfd readable{listener.get(), POLLIN, 0};
      if (poll(&readable, 1, static_cast<int>(left)) > 0) accepted += accept_stream(listener.get(), left) ? 1 : 0;
    }
    run_region_bytes_.store(region_bytes(options_.memory_bytes), std::memory_order_relaxed);
    start_threads([this](std::size_t stream) { receive_blocks(stream); });
    send_all(sockets_[0].get(), 0, &kAllConnected, 1);
  }

  double move(std::int64_t bytes, std::size_t memory_bytes) override {
    run_region_bytes_.store(region_bytes(memory_bytes), std::memory_order_relaxed);
    std::int64_t seen = arrived_.load();
    const std::int64_t end = run_begin_.load() + bytes;
    const auto share = [&] {
      return std::to_string(arrived_.load() - end + bytes) + " of " + std::to_string(bytes) + " bytes";
    };
    {
      std::unique_lock<std::mutex> lock(mutex_);
      run_end_.store(end);
      const auto is_over = [&] { return arrived_.load() >= end || !failure_.empty(); };
      while (!changed_.wait_for(lock, std::chrono::milliseconds(options_.timeout_ms), is_over)) {
        if (arrived_.load() == seen) {
          throw Failure("nothing arrived for " + std::to_string(options_.timeout_ms) + " ms; " + share() +
                        " did: does the client run the same size?");
        }
        seen = arrived_.load();
      }
      if (arrived_.load() < end) throw Failure(share() + " arrived: " + failure_);
      if (arrived_.load() > end) throw Failure("the client sent " + share() + ": give both ends the same size");
    }
    const double seconds = monotonic_seconds() - first_arrival_.load();
    run_begin_.store(end);  // before the acknowledgement: then the next run may begin
    send_all(sockets_[0].get(), 0, &kRunReceived, 1);
    return seconds;
  }

 private:
  // Accepts one connection; one that is not a client's is dropped.
  bool accept_stream(int listener, std::int64_t left_ms) {
    OwnedFd socket;
    SocketAddress peer;
    require(tcp_accept(listener, &socket, &peer));
    if (!socket.is_open()) return false;
    fcntl(socket.get(), F_SETFL, fcntl(socket.get(), F_GETFL) & ~O_NONBLOCK);
    set_call_deadline(socket.get(), SO_RCVTIMEO, std::min(left_ms, kHelloDeadlineMs));
    Hello hello{};
    if (recv(socket.get(), hello.data(), hello.size(), MSG_WAITALL) != static_cast<ssize_t>(hello.size())) return false;
    const std::size_t stream = hello[kMagicBytes];
    const std::size_t streams = hello[kMagicBytes + 1] + std::size_t{1};
    if (std::memcmp(hello.data(), kMagic, kMagicBytes) != 0) return false;
    if (streams != options_.streams) {
      throw Failure("the client has --streams " + std::to_string(streams) + ", this server has " +
                    std::to_string(options_.streams) + ": give both the same");
    }
    if (stream >= streams || sockets_[stream].is_open()) return false;
    set_call_deadline(socket.get(), SO_RCVTIMEO, 0);  // between runs a thread waits as long as the client likes
    set_call_deadline(socket.get(), SO_SNDTIMEO, options_.timeout_ms);
    const int on = 1;
    setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    sockets_[stream] = std::move(socket);
    return true;
  }

  void receive_blocks(std::size_t stream) {
    for (Region memory = region(stream, run_region_bytes_.load(std::memory_order_relaxed));;) {
      const std::size_t received = receive(sockets_[stream].get(), stream, memory.next(), memory.block());
      memory.advance(received, run_region_bytes_.load(std::memory_order_relaxed));
      const auto bytes = static_cast<std::int64_t>(received);
      const std::int64_t before = arrived_.fetch_add(bytes);
      if (before == run_begin_.load()) first_arrival_.store(monotonic_seconds());
      const std::int64_t end = run_end_.load();
      if (before < end && before + bytes >= end) {
        // Under the mutex, so that the main thread is either before its look at arrived_ or asleep.
        const std::lock_guard<std::mutex> lock(mutex_);
        changed_.notify_all();
      }
    }
  }

  // Sequentially consistent: a stream thread adds to arrived_ and then looks at run_end_, the main thread sets run_end_
  // and then looks at arrived_. One of the two has to see the other.
  std::atomic<std::int64_t> arrived_{0};    // bytes of all runs on all streams
  std::atomic<std::int64_t> run_end_{0};    // value of arrived_ at which the run ends
  std::atomic<std::int64_t> run_begin_{0};  // and at which it begins; equal to run_end_ between runs
  std::atomic<double> first_arrival_{0};    // when the run's first bytes had been received
  // Of each stream. What comes before our own command, or in a recv that waited for it, still goes through the region
  // of the run before: the client's time must not depend on when the command reached us. Relaxed: nothing else follows.
  std::atomic<std::size_t> run_region_bytes_{0};
};

}  // namespace

void run_raw_mode(const Words& words) {
  const RawOptions options(words);
  std::unique_ptr<RawEnd> end;
  if (options.is_server) {
    end = std::make_unique<RawServer>(options);
  } else {
    end = std::make_unique<RawClient>(options);
  }
  reported([&] { end->serve(); });
}

}  // namespace bagua_net::bench

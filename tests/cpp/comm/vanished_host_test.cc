// A peer whose host vanishes while a rank sends to it, and one that lives and does not read. The packets of a real
// connection on the loopback interface are dropped by a filter at its other end, as if that host was gone.
//
// Real time, because it is the kernel that sends again. A busy machine makes it longer: errors have 30 s for what takes
// one, and that nothing happens for a while stays true.
#include <fcntl.h>
#include <sys/socket.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/context_pair.h"
#include "support/cut_connections.h"
#include "support/raw_handshake.h"

namespace bagua_net {
namespace {

constexpr int kKeepaliveS = 1;
constexpr std::size_t kMessageBytes = 32u << 20;  // more than both ends' buffers hold

void vanish(const OwnedFd& socket) { lose_packets(socket.get(), 0); }

// A sending process, and as its peer the sockets of the test: one for each stream, of which the last takes large
// messages.
struct Sending {
  std::unique_ptr<TransportContext> context;
  std::vector<OwnedFd> peers;
  SendComm* comm = nullptr;
  std::vector<std::uint8_t> message = make_message(0, kMessageBytes);
  Request* request = nullptr;

  explicit Sending(int workers) {
    PluginConfig config;
    config.workers = workers;
    config.streams = workers == 0 ? 1 : 2;
    config.keepalive_s = kKeepaliveS;
    config.zero_copy = false;
    const RawListener listener;
    Handle handle = listener.handle;
    context = make_context(config);
    while (peers.size() < static_cast<std::size_t>(*config.streams)) {
      CHECK_OK(context->connect(0, handle.data(), &comm));
      peers.push_back(listener.answer_next(acceptance(static_cast<std::uint16_t>(*config.streams))));
      CHECK_EQ(::fcntl(peers.back().get(), F_SETFL, O_NONBLOCK), 0);
    }
    comm = connect_to(*context, &handle);
  }
  ~Sending() {
    peers.clear();
    context.reset();
  }
  Sending(const Sending&) = delete;
  Sending& operator=(const Sending&) = delete;

  void send() { request = bagua_net::send(comm, message); }
  // Until it is done or fails, or for so long of real time: the kernel's timers decide. A slow machine is late to see
  // what they say; what is asserted is never an upper bound.
  Status test_for(std::int64_t ms, bool* done) {
    const std::int64_t end_ms = monotonic_ms() + ms;
    *done = false;
    while (monotonic_ms() < end_ms && !*done) {
      std::size_t bytes = 0;
      BAGUA_NET_RETURN_IF_ERROR(request->test(done, &bytes));
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return Status::ok();
  }
  void check_not_done(std::int64_t ms) {
    bool done = false;
    CHECK_OK(test_for(ms, &done));
    CHECK(!done);
  }
  std::string error(std::int64_t most_ms) {
    bool done = false;
    const Status status = test_for(most_ms, &done);
    CHECK(!status.is_ok());
    CHECK(status.code() == StatusCode::kRemoteError);
    return status.message();
  }
};

bool names(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE(a_host_that_vanishes_is_noticed) {
  for (const int workers : {0, 1}) {
    Sending sending(workers);
    for (const OwnedFd& peer : sending.peers) vanish(peer);
    const std::int64_t begin_ms = monotonic_ms();
    sending.send();
    const std::string error = sending.error(30000);
    CHECK(monotonic_ms() - begin_ms >= 1000 * kKeepaliveS - 100);  // the clock is a coarse one
    CHECK(names(error, "127.0.0.1"));
    CHECK(names(error, "BAGUA_NET_KEEPALIVE_S=1"));
  }
}

TEST_CASE(a_peer_that_does_not_read_is_waited_for) {
  for (const int workers : {0, 1}) {
    Sending sending(workers);
    sending.send();
    sending.check_not_done(4000 * kKeepaliveS);
    // All of it is still to be had.
    std::thread reader([&] {
      std::vector<std::uint8_t> bytes(1 << 20);
      std::size_t left = kMessageBytes;
      pollfd readable{sending.peers.back().get(), POLLIN, 0};
      while (left > 0 && ::poll(&readable, 1, 10000) == 1) {
        const ssize_t got = ::recv(readable.fd, bytes.data(), bytes.size(), MSG_DONTWAIT);
        if (got <= 0) return;
        left -= std::min(left, static_cast<std::size_t>(got));
      }
    });
    bool done = false;
    const Status status = sending.test_for(20000, &done);
    reader.join();
    CHECK_OK(status);
    CHECK(done);
  }
}

// Jumbo frames that a switch does not pass: the handshake and the kernel's own probes are small.
TEST_CASE(a_network_that_drops_large_packets_is_noticed) {
  Sending sending(0);
  lose_packets(sending.peers[0].get(), 1500);
  sending.send();
  CHECK(names(sending.error(30000), "the network drops packets of"));
  CHECK(has_ended(sending.peers[0].get()));  // small enough to get through
}

}  // namespace bagua_net

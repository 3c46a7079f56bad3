// A peer in a process of its own, which is killed, stopped, or whose host vanishes, while connections are lost.
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/monotonic_clock.h"
#include "support/context_pair.h"
#include "support/cut_connections.h"
#include "support/pause.h"
#include "support/test_clock.h"
#include "transport/recovery/recovery_timing.h"

namespace bagua_net {
namespace {

// The other end of a connection, in a process that can be killed.
class KilledPeer {
 public:
  // `run` is called in that process, with the handle of its listener or the one that the test gives.
  explicit KilledPeer(const std::function<void(int pipe)>& run) {
    int ends[2];
    CHECK_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    const pid_t child = ::fork();
    CHECK(child >= 0);
    child_ = child;  // NOLINT(cppcoreguidelines-prefer-member-initializer): the sockets come first
    if (child_ == 0) {
      ::close(ends[0]);
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      run(ends[1]);
      for (;;) ::pause();
    }
    ::close(ends[1]);
    pipe_ = OwnedFd(ends[0]);
  }
  ~KilledPeer() { kill(); }
  KilledPeer(const KilledPeer&) = delete;
  KilledPeer& operator=(const KilledPeer&) = delete;

  int pipe() const { return pipe_.get(); }
  void signal(int number) const { ::kill(child_, number); }
  void kill() {
    if (child_ <= 0) return;
    ::kill(child_, SIGKILL);
    ::waitpid(std::exchange(child_, -1), nullptr, 0);
  }

 private:
  pid_t child_ = -1;
  OwnedFd pipe_;
};

void write_handle(int pipe, const Handle& handle) {
  CHECK_EQ(::write(pipe, handle.data(), handle.size()), static_cast<ssize_t>(handle.size()));
}
Handle read_handle(int pipe) {
  Handle handle;
  CHECK_EQ(::read(pipe, handle.data(), handle.size()), static_cast<ssize_t>(handle.size()));
  return handle;
}

// A rank whose peer can be killed. The peer has connected or accepted, and goes on with `run`.
struct SendingRank {
  KilledPeer peer;
  std::unique_ptr<TransportContext> context;
  SendComm* comm = nullptr;

  SendingRank(const PluginConfig& config, const std::function<void(int pipe, RecvComm* comm)>& run)
      : peer([&](int pipe) {
          const auto peers_context = make_context(config);
          Handle handle{};
          ListenComm* const listener = listen_on(*peers_context, &handle);
          write_handle(pipe, handle);
          RecvComm* const accepted = accept_from(*peers_context, listener);
          write_handle(pipe, handle);
          run(pipe, accepted);
          for (;;) ::pause();
        }),
        context(make_context(config)) {
    Handle handle = read_handle(peer.pipe());
    comm = connect_to(*context, &handle);
    read_handle(peer.pipe());
  }
};
struct ReceivingRank {
  KilledPeer peer;
  std::unique_ptr<TransportContext> context;
  RecvComm* comm = nullptr;

  ReceivingRank(const PluginConfig& config, const std::function<void(int pipe, SendComm* comm)>& run)
      : peer([&](int pipe) {
          const auto peers_context = make_context(config);
          Handle handle = read_handle(pipe);
          SendComm* const connected = connect_to(*peers_context, &handle);
          write_handle(pipe, handle);
          run(pipe, connected);
          for (;;) ::pause();
        }),
        context(make_context(config)) {
    Handle handle{};
    ListenComm* const listener = listen_on(*context, &handle);
    write_handle(peer.pipe(), handle);
    comm = accept_from(*context, listener);
    read_handle(peer.pipe());
  }
  void signal_peer() const { write_handle(peer.pipe(), {}); }
};

void check_noticed(const Status& status, const std::string& what) {
  for (const std::string& part : {std::string("over lo"), std::string("data stream"), what}) check_names(status, part);
}

}  // namespace

TEST_CASE(a_receiver_that_was_killed_is_an_error) {
  for (const int workers : {0, 2}) {
    SendingRank rank(recovering(workers), [](int, RecvComm*) {});
    const std::vector<std::uint8_t> message = make_message(0, 64u << 20);
    Request* const request = send(rank.comm, message);
    CHECK(!is_done(request));
    rank.peer.kill();
    check_noticed(outcome(request), "from message 0 on");
    rank.context->close(rank.comm);
  }
}

// Also with a NIC that is dead: over it nothing says that the process has ended.
TEST_CASE(a_sender_that_was_killed_is_an_error) {
  for (const auto& [workers, is_silent] : {std::pair{0, false}, {2, false}, {0, true}, {2, true}}) {
    ReceivingRank rank(recovering(workers, 2), [](int, SendComm*) {});
    std::vector<std::uint8_t> room(1000);
    Request* const request = receive(rank.comm, room);
    CHECK(!is_done(request));
    if (is_silent) silence(open_connections().at(1));
    rank.peer.kill();
    check_noticed(outcome(request), is_silent ? "the peer's port refuses connections" : "waits for message 0");
    rank.context->close(rank.comm);
  }
}

// The nearest healthy situation: the network ends one connection, or all, and the sender's process is slow to open
// another. It gets no CPU, say.
TEST_CASE(a_sender_that_is_stopped_has_not_ended_though_connections_were_lost) {
  for (const auto& [workers, all] : {std::pair{0, false}, {0, true}, {2, true}}) {
    ReceivingRank rank(recovering(workers, 2), [](int pipe, SendComm* comm) {
      read_handle(pipe);
      CHECK_OK(outcome(send(comm, make_message(0, 1000))));
    });
    std::vector<std::uint8_t> room(1000);
    Request* const request = receive(rank.comm, room);
    rank.peer.signal(SIGSTOP);
    all ? cut_all(Cut::kReset) : cut(open_connections().at(1), Cut::kReset);
    // Real time, in which the other process's kernel answers: longer than a process that has ended takes to be noticed.
    const std::int64_t end_ms = monotonic_ms() + 2 * kRefusedMs;
    for (Pause pause; monotonic_ms() < end_ms; pause()) CHECK(!is_done(request));
    rank.peer.signal(SIGCONT);
    rank.signal_peer();
    CHECK_OK(outcome(request));
    CHECK(room == make_message(0, 1000));
    rank.context->close(rank.comm);
  }
}

// The kernel probes nothing while something is unacknowledged, and repeats that for a quarter of an hour.
TEST_CASE(a_sender_whose_host_vanished_before_an_acknowledgement_is_an_error) {
  PluginConfig config = recovering(0, 1);
  config.keepalive_s = 2;
  // Until the receiver's window has room for the last one, which asks for an acknowledgement.
  constexpr std::size_t kSizes[] = {4u << 20, 4u << 20, 4u << 20, 4u << 20, 100000};
  ReceivingRank rank(config, [&](int pipe, SendComm* comm) {
    for (const std::size_t bytes : kSizes) {
      const bool is_last = bytes == kSizes[4];
      if (is_last) {
        for (const int fd : open_connections()) silence(fd);
      }
      const std::vector<std::uint8_t> message = make_message(bytes, bytes);
      Request* const request = send(comm, message);
      pollfd received{pipe, POLLIN, 0};
      while (!is_done(request) && ::poll(&received, 1, 1) == 0) {
      }
      if (is_last) ::raise(SIGSTOP);
    }
  });
  for (const std::size_t bytes : kSizes) {
    std::vector<std::uint8_t> room(bytes);
    CHECK_OK(outcome(receive(rank.comm, room)));
    CHECK(room == make_message(bytes, bytes));
  }
  rank.signal_peer();
  std::vector<std::uint8_t> room(100);
  check_names(outcome(receive(rank.comm, room)), "waits for message 5");
  rank.context->close(rank.comm);
}

// In every state of recovery: nothing can be opened again, because the receiving process does not answer. The process's
// deadline tells whether closing waits for that.
TEST_CASE(closing_does_not_wait_for_connections_that_cannot_be_opened) {
  for (const int workers : {0, 2}) {
    for (const bool is_idle : {false, true}) {
      PluginConfig config = recovering(workers);
      config.keepalive_s = 600;  // for which it would be tried
      SendingRank rank(config, [](int, RecvComm*) { ::raise(SIGSTOP); });
      const std::vector<std::uint8_t> message = make_message(0, is_idle ? 100 : 64u << 20);
      Request* const request = send(rank.comm, message);
      if (is_idle) CHECK_OK(outcome(request));
      cut_all(Cut::kReset);
      if (!is_idle) CHECK(!is_done(request));
      rank.context->close(rank.comm);
    }
  }
}

// The comms of a job are closed one after the other, and no time passes meanwhile: if one waited for the peer, it would
// wait for ever. The last one waits for all of them together.
TEST_CASE(comms_that_are_closed_one_after_the_other_wait_together) {
  constexpr std::size_t kComms = 8;
  KilledPeer peer([&](int pipe) {
    const auto peers_context = make_context(recovering(0));
    for (std::size_t i = 0; i < kComms; ++i) {
      Handle handle{};
      ListenComm* const listener = listen_on(*peers_context, &handle);
      write_handle(pipe, handle);
      accept_from(*peers_context, listener);
    }
    write_handle(pipe, {});
    ::raise(SIGSTOP);
  });
  const auto context = make_context(recovering(0));
  std::vector<SendComm*> comms;
  const std::vector<std::uint8_t> message = make_message(0, 100);
  for (std::size_t i = 0; i < kComms; ++i) {
    Handle handle = read_handle(peer.pipe());
    comms.push_back(connect_to(*context, &handle));
    CHECK_OK(outcome(send(comms.back(), message)));
  }
  read_handle(peer.pipe());
  cut_all(Cut::kReset);
  test_clock::stop();
  for (std::size_t i = 0; i + 1 < kComms; ++i) context->close(comms[i]);
  test_clock::go_on();
  context->close(comms.back());
}

}  // namespace bagua_net

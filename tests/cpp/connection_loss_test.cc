// Connections are cut while messages are under way, again and again: every message arrives whole, once, in its receive.
// Long run: BAGUA_TEST_FAULTS=<number of cuts> connection_loss_test random_cuts_0_0 (and the others of that name).
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "support/byte_patterns.h"
#include "support/context_pair.h"
#include "support/cut_connections.h"

namespace bagua_net {
namespace {

PluginConfig config_with(int workers, std::optional<int> streams = 4) {
  PluginConfig config;
  config.workers = workers;
  config.streams = streams;
  config.keepalive_s = 10;
  config.recovery = Recovery::kOn;
  return config;
}

std::size_t random_size(std::mt19937& random) {
  switch (random() % 6) {
    case 0: return 0;
    case 1: return random() % 2000;
    case 2: return random() % 70000;
    case 3: return random() % (1u << 20);
    case 4: return random() % (2u << 20);
    default: return random() % (8u << 20);
  }
}

// Messages with as many under way as the comm takes, each verified. The sender overwrites its memory as soon as a
// request is done, and the receiver its own. `step` is called before each round of calls; it ends when that says so.
class Traffic {
 public:
  Traffic(ContextPair& pair, unsigned seed) : pair_(pair), random_(seed) {}

  void run(std::size_t messages, const std::function<void()>& step) {
    const std::size_t end = next_ + messages;
    std::int64_t progress_ms = monotonic_ms();
    while (sends_done_ < end || receives_done_ < end) {
      if (monotonic_ms() - progress_ms > kDeadlineMs) {
        check::fail(__FILE__, __LINE__,
                    "no progress: " + std::to_string(sends_done_) + " sent and " + std::to_string(receives_done_) +
                        " received of " + std::to_string(end));
      }
      step();
      if (posted_ < end && posted_ < sends_done_ + kWindow && posted_ < receives_done_ + kWindow) {
        Slot& slot = slots_[posted_ % kWindow];
        slot.size = random_size(random_);
        slot.sent = make_message(posted_, slot.size);
        slot.received.assign(slot.size + 1, 0xee);
        slot.is_sending = slot.is_receiving = true;
        slot.receive = nullptr;
        slot.send = pair_.send(slot.sent);
        if (slot.send != nullptr) ++posted_;
      }
      // Receives lag behind, by a few messages.
      if (receives_posted_ < posted_ && (random_() % 4 == 0 || posted_ == end)) {
        Slot& slot = slots_[receives_posted_ % kWindow];
        slot.receive = pair_.receive(slot.received);
        if (slot.receive != nullptr) ++receives_posted_;
      }
      for (std::size_t number = std::min(sends_done_, receives_done_); number < posted_; ++number) {
        Slot& slot = slots_[number % kWindow];
        if (slot.is_sending && is_request_done(slot.send)) {
          slot.is_sending = false;
          std::fill(slot.sent.begin(), slot.sent.end(), std::uint8_t{0x5a});
          progress_ms = monotonic_ms();
        }
        if (slot.is_receiving && slot.receive != nullptr && number < receives_posted_ &&
            is_request_done(slot.receive)) {
          slot.is_receiving = false;
          CHECK_EQ(int{slot.received.back()}, 0xee);
          slot.received.pop_back();
          CHECK(slot.received == make_message(number, slot.size));
          // Nothing writes there any more: verified before the next message takes the place.
          std::fill(slot.received.begin(), slot.received.end(), std::uint8_t{0xa5});
          progress_ms = monotonic_ms();
        }
      }
      while (sends_done_ < posted_ && !slots_[sends_done_ % kWindow].is_sending) ++sends_done_;
      while (receives_done_ < receives_posted_ && !slots_[receives_done_ % kWindow].is_receiving) {
        const std::vector<std::uint8_t>& done = slots_[receives_done_ % kWindow].received;
        if (!byte_patterns::all_bytes_are(done.data(), done.size(), 0xa5)) {
          check::fail(__FILE__, __LINE__, "memory was written after its receive was done");
        }
        ++receives_done_;
      }
    }
    next_ = end;
  }

 private:
  static constexpr std::size_t kWindow = 12;
  struct Slot {
    std::size_t size = 0;
    std::vector<std::uint8_t> sent;
    std::vector<std::uint8_t> received;
    Request* send = nullptr;
    Request* receive = nullptr;
    bool is_sending = false;
    bool is_receiving = false;
  };

  ContextPair& pair_;
  std::mt19937 random_;
  std::array<Slot, kWindow> slots_;
  std::size_t next_ = 0;
  std::size_t posted_ = 0;
  std::size_t receives_posted_ = 0;
  std::size_t sends_done_ = 0;
  std::size_t receives_done_ = 0;
};

int fault_count(int usual) {
  const char* const asked = std::getenv("BAGUA_TEST_FAULTS");
  return asked != nullptr ? static_cast<int>(std::strtol(asked, nullptr, 10)) : usual;
}

void random_cuts(int sending_workers, int receiving_workers, int streams) {
  const auto seed = static_cast<unsigned>(100 * sending_workers + 10 * receiving_workers + streams);
  std::mt19937 random(seed);
  ContextPair pair(config_with(sending_workers, streams), config_with(receiving_workers, streams));
  Traffic traffic(pair, seed);
  const int faults = fault_count(40);
  int cuts = 0;
  std::size_t messages = 0;
  std::int64_t next_us = 0;
  while (cuts < faults) {
    traffic.run(10, [&] {
      const std::int64_t now_us = monotonic_us();
      if (now_us < next_us || cuts >= faults) return;
      cuts += cut_some(random, 2 * static_cast<std::size_t>(streams));
      next_us = now_us + static_cast<std::int64_t>(random() % (random() % 3 == 0 ? 1000 : 30000));
    });
    messages += 10;
  }
  traffic.run(10, [] {});
  std::printf("        %d cuts, %zu messages\n", cuts, messages + 10);
}

void cut_all(Cut how) {
  for (const int fd : open_connections()) cut(fd, how);
}

// The first error of the request, or ok when it is done.
Status outcome(Request* request) {
  const Deadline deadline;
  for (int looks = 0;; ++looks) {
    deadline.check("a request");
    bool done = false;
    std::size_t bytes = 0;
    const Status status = request->test(&done, &bytes);
    if (done || !status.is_ok()) return status;
    looks < 1000 ? sched_yield() : ::usleep(1000);
  }
}

void check_names(const Status& status, const std::string& what) {
  CHECK(status.code() == StatusCode::kRemoteError);
  if (status.message().find(what) == std::string::npos) {
    check::fail(__FILE__, __LINE__, "no \"" + what + "\" in: " + status.message());
  }
}

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

using Handle = std::array<std::uint8_t, kHandleBytes>;

void write_handle(int pipe, const Handle& handle) {
  CHECK_EQ(::write(pipe, handle.data(), handle.size()), static_cast<ssize_t>(handle.size()));
}
Handle read_handle(int pipe) {
  Handle handle;
  CHECK_EQ(::read(pipe, handle.data(), handle.size()), static_cast<ssize_t>(handle.size()));
  return handle;
}

RecvComm* accept_from(TransportContext& context, ListenComm* listener) {
  RecvComm* comm = nullptr;
  wait_until(
      [&] {
        CHECK_OK(context.accept(listener, &comm));
        return comm != nullptr;
      },
      "the connection");
  return comm;
}
SendComm* connect_to(TransportContext& context, Handle& handle) {
  SendComm* comm = nullptr;
  wait_until(
      [&] {
        CHECK_OK(context.connect(0, handle.data(), &comm));
        return comm != nullptr;
      },
      "the connection");
  return comm;
}

}  // namespace

TEST_CASE(without_faults) {
  for (const int workers : {0, 2}) {
    ContextPair pair(config_with(workers), config_with(workers));
    Traffic(pair, 1).run(60, [] {});
  }
}

TEST_CASE(random_cuts_without_workers) { random_cuts(0, 0, 4); }

TEST_CASE(random_cuts_with_workers) { random_cuts(2, 2, 4); }

TEST_CASE(random_cuts_with_workers_of_the_sender) { random_cuts(2, 0, 3); }

TEST_CASE(random_cuts_with_workers_of_the_receiver) { random_cuts(0, 2, 3); }

TEST_CASE(random_cuts_of_a_single_stream) { random_cuts(0, 0, 1); }

TEST_CASE(random_cuts_of_a_single_stream_with_workers) { random_cuts(2, 2, 1); }

// The sender waits for an answer on another comm, say: its message was done as soon as it was written.
TEST_CASE(a_small_message_comes_again_though_its_sender_does_not_call) {
  for (const int workers : {0, 2}) {
    for (const Cut how : {Cut::kReset, Cut::kEnd}) {
      ContextPair pair(config_with(workers), config_with(workers));
      const std::vector<std::uint8_t> message = make_message(0, 1000);
      std::vector<std::uint8_t> room(1000);
      Request* send = pair.send(message);
      CHECK_OK(outcome(send));
      cut_all(how);
      CHECK_OK(outcome(pair.receive(room)));
      CHECK(room == message);
    }
  }
}

// The receiver has the message, and the sender does not know.
TEST_CASE(a_send_finishes_though_its_receiver_does_not_call) {
  for (const int workers : {0, 2}) {
    ContextPair pair(config_with(workers), config_with(workers));
    const std::vector<std::uint8_t> message = make_message(0, 300000);
    std::vector<std::uint8_t> room(message.size());
    Request* receive = pair.receive(room);
    Request* send = pair.send(message);
    bool sent = false;
    wait_until(
        [&] {
          if (is_request_done(receive)) return true;
          if (!sent) sent = is_request_done(send);
          return false;
        },
        "the receive");
    cut_all(Cut::kReset);
    if (!sent) CHECK_OK(outcome(send));
    CHECK(room == message);
  }
}

TEST_CASE(a_stream_that_is_cut_silently_is_replaced) {
  for (const int workers : {0, 2}) {
    PluginConfig config = config_with(workers, workers == 0 ? 1 : 4);
    config.keepalive_s = 3;
    ContextPair pair(config, config);
    std::vector<std::uint8_t> room(4u << 20);
    const std::vector<std::uint8_t> message = make_message(0, room.size());
    for (const int fd : open_connections()) silence(fd);
    Request* send = pair.send(message);
    Request* receive = pair.receive(room);
    bool sent = false;
    bool received = false;
    wait_until(
        [&] {
          if (!sent) sent = is_request_done(send);
          if (!received) received = is_request_done(receive);
          return sent && received;
        },
        "the message");
    CHECK(room == message);
  }
}

TEST_CASE(closing_delivers_what_was_lost_before) {
  for (const int workers : {0, 2}) {
    ContextPair pair(config_with(workers), config_with(workers));
    const std::vector<std::uint8_t> message = make_message(0, 1000);
    std::vector<std::uint8_t> room(1000);
    CHECK_OK(outcome(pair.send(message)));
    cut_all(Cut::kReset);
    pair.close_sender();
    CHECK_OK(outcome(pair.receive(room)));
    CHECK(room == message);
  }
}

TEST_CASE(a_peer_that_has_closed_its_comm_is_not_waited_for) {
  for (const int workers : {0, 2}) {
    ContextPair pair(config_with(workers), config_with(workers));
    std::vector<std::uint8_t> room(1000);
    Request* receive = pair.receive(room);
    pair.close_sender();
    check_names(outcome(receive), "the peer closed the connection while this rank waits for message 0");
    ContextPair other(config_with(workers), config_with(workers));
    const std::vector<std::uint8_t> message = make_message(0, 8u << 20);
    Request* send = other.send(message);
    other.close_receiver();
    check_names(outcome(send), "the peer closed the connection before");
  }
}

TEST_CASE(without_recovery_a_lost_connection_is_an_error) {
  PluginConfig off = config_with(0);
  off.recovery = Recovery::kOff;
  for (const bool sender : {false, true}) {
    ContextPair pair(sender ? off : config_with(0), sender ? config_with(0) : off);
    std::vector<std::uint8_t> room(1000);
    Request* receive = pair.receive(room);
    cut_all(Cut::kReset);
    CHECK(outcome(receive).code() == StatusCode::kRemoteError);
  }
}

TEST_CASE(a_receiver_that_was_killed_is_an_error) {
  for (const int workers : {0, 2}) {
    KilledPeer peer([&](int pipe) {
      std::unique_ptr<TransportContext> context;
      CHECK_OK(TransportContext::create(config_with(workers), {loopback_device()}, &context));
      Handle handle{};
      ListenComm* listener = nullptr;
      CHECK_OK(context->listen(0, handle.data(), &listener));
      write_handle(pipe, handle);
      accept_from(*context, listener);
      for (;;) ::pause();
    });
    std::unique_ptr<TransportContext> context;
    CHECK_OK(TransportContext::create(config_with(workers), {loopback_device()}, &context));
    Handle handle = read_handle(peer.pipe());
    SendComm* comm = connect_to(*context, handle);
    const std::vector<std::uint8_t> message = make_message(0, 64u << 20);
    Request* send = nullptr;
    CHECK_OK(TransportContext::isend(comm, message.data(), message.size(), nullptr, &send));
    CHECK(!is_request_done(send));
    peer.kill();
    const std::int64_t begin_ms = monotonic_ms();
    const Status status = outcome(send);
    std::printf("        noticed after %d ms\n", static_cast<int>(monotonic_ms() - begin_ms));
    check_names(status, "over lo");
    check_names(status, "data stream");
    check_names(status, "from message 0 on");
    context->close(comm);
  }
}

TEST_CASE(a_sender_that_was_killed_is_an_error) {
  for (const int workers : {0, 2}) {
    KilledPeer peer([&](int pipe) {
      std::unique_ptr<TransportContext> context;
      CHECK_OK(TransportContext::create(config_with(workers), {loopback_device()}, &context));
      Handle handle = read_handle(pipe);
      connect_to(*context, handle);
      write_handle(pipe, handle);
      for (;;) ::pause();
    });
    std::unique_ptr<TransportContext> context;
    CHECK_OK(TransportContext::create(config_with(workers), {loopback_device()}, &context));
    Handle handle{};
    ListenComm* listener = nullptr;
    CHECK_OK(context->listen(0, handle.data(), &listener));
    write_handle(peer.pipe(), handle);
    RecvComm* comm = accept_from(*context, listener);
    read_handle(peer.pipe());
    std::vector<std::uint8_t> room(1000);
    Request* receive = nullptr;
    CHECK_OK(TransportContext::irecv(comm, room.data(), room.size(), nullptr, &receive));
    CHECK(!is_request_done(receive));
    peer.kill();
    const std::int64_t begin_ms = monotonic_ms();
    const Status status = outcome(receive);
    std::printf("        noticed after %d ms\n", static_cast<int>(monotonic_ms() - begin_ms));
    check_names(status, "over lo");
    check_names(status, "data stream");
    check_names(status, "waits for message 0");
    context->close(comm);
  }
}

// It gets no CPU, say: its connections are replaced when it does.
TEST_CASE(a_sender_that_is_stopped_when_its_connections_are_reset_is_waited_for) {
  for (const int workers : {0, 2}) {
    const std::vector<std::uint8_t> message = make_message(0, 1000);
    KilledPeer peer([&](int pipe) {
      std::unique_ptr<TransportContext> context;
      CHECK_OK(TransportContext::create(config_with(workers), {loopback_device()}, &context));
      Handle handle = read_handle(pipe);
      SendComm* comm = connect_to(*context, handle);
      write_handle(pipe, handle);
      read_handle(pipe);
      Request* send = nullptr;
      CHECK_OK(TransportContext::isend(comm, message.data(), message.size(), nullptr, &send));
      CHECK_OK(outcome(send));
      for (;;) ::pause();
    });
    std::unique_ptr<TransportContext> context;
    CHECK_OK(TransportContext::create(config_with(workers), {loopback_device()}, &context));
    Handle handle{};
    ListenComm* listener = nullptr;
    CHECK_OK(context->listen(0, handle.data(), &listener));
    write_handle(peer.pipe(), handle);
    RecvComm* comm = accept_from(*context, listener);
    read_handle(peer.pipe());
    std::vector<std::uint8_t> room(message.size());
    Request* receive = nullptr;
    CHECK_OK(TransportContext::irecv(comm, room.data(), room.size(), nullptr, &receive));
    peer.signal(SIGSTOP);
    cut_all(Cut::kReset);
    // Longer than it takes to notice one that was killed.
    for (const std::int64_t end_ms = monotonic_ms() + 2500; monotonic_ms() < end_ms; ::usleep(1000)) {
      CHECK(!is_request_done(receive));
    }
    peer.signal(SIGCONT);
    write_handle(peer.pipe(), handle);
    CHECK_OK(outcome(receive));
    CHECK(room == message);
    context->close(comm);
  }
}

// The kernel probes nothing while something is unacknowledged, and repeats that for a quarter of an hour.
TEST_CASE(a_sender_whose_host_vanished_before_an_acknowledgement_is_an_error) {
  PluginConfig config = config_with(0, 1);
  config.keepalive_s = 2;
  // Until the receiver's window has room for the last one, which asks for an acknowledgement.
  constexpr std::size_t kSizes[] = {4u << 20, 4u << 20, 4u << 20, 4u << 20, 100000};
  KilledPeer peer([&](int pipe) {
    std::unique_ptr<TransportContext> context;
    CHECK_OK(TransportContext::create(config, {loopback_device()}, &context));
    Handle handle = read_handle(pipe);
    SendComm* comm = connect_to(*context, handle);
    for (const std::size_t bytes : kSizes) {
      const bool is_last = bytes == kSizes[4];
      if (is_last) {
        for (const int fd : open_connections()) silence(fd);
      }
      const std::vector<std::uint8_t> message = make_message(bytes, bytes);
      Request* send = nullptr;
      CHECK_OK(TransportContext::isend(comm, message.data(), message.size(), nullptr, &send));
      pollfd received{pipe, POLLIN, 0};
      while (!is_request_done(send) && ::poll(&received, 1, 1) == 0) {
      }
      if (is_last) ::raise(SIGSTOP);
    }
  });
  std::unique_ptr<TransportContext> context;
  CHECK_OK(TransportContext::create(config, {loopback_device()}, &context));
  Handle handle{};
  ListenComm* listener = nullptr;
  CHECK_OK(context->listen(0, handle.data(), &listener));
  write_handle(peer.pipe(), handle);
  RecvComm* comm = accept_from(*context, listener);
  Request* receive = nullptr;
  for (const std::size_t bytes : kSizes) {
    std::vector<std::uint8_t> room(bytes);
    CHECK_OK(TransportContext::irecv(comm, room.data(), room.size(), nullptr, &receive));
    CHECK_OK(outcome(receive));
    CHECK(room == make_message(bytes, bytes));
  }
  write_handle(peer.pipe(), handle);
  std::vector<std::uint8_t> room(100);
  CHECK_OK(TransportContext::irecv(comm, room.data(), room.size(), nullptr, &receive));
  check_names(outcome(receive), "waits for message 5");
  context->close(comm);
}

// In every state of recovery: nothing can be opened again, because the receiving process does not answer.
TEST_CASE(closing_does_not_wait_for_connections_that_cannot_be_opened) {
  for (const int workers : {0, 2}) {
    for (const bool is_idle : {false, true}) {
      KilledPeer peer([&](int pipe) {
        std::unique_ptr<TransportContext> context;
        CHECK_OK(TransportContext::create(config_with(workers), {loopback_device()}, &context));
        Handle handle{};
        ListenComm* listener = nullptr;
        CHECK_OK(context->listen(0, handle.data(), &listener));
        write_handle(pipe, handle);
        accept_from(*context, listener);
        write_handle(pipe, handle);
        ::raise(SIGSTOP);
      });
      std::unique_ptr<TransportContext> context;
      CHECK_OK(TransportContext::create(config_with(workers), {loopback_device()}, &context));
      Handle handle = read_handle(peer.pipe());
      SendComm* comm = connect_to(*context, handle);
      read_handle(peer.pipe());
      const std::vector<std::uint8_t> message = make_message(0, is_idle ? 100 : 64u << 20);
      Request* send = nullptr;
      CHECK_OK(TransportContext::isend(comm, message.data(), message.size(), nullptr, &send));
      if (is_idle) CHECK_OK(outcome(send));
      cut_all(Cut::kReset);
      if (!is_idle) CHECK(!is_request_done(send));
      const std::int64_t begin_ms = monotonic_ms();
      context->close(comm);
      std::printf("        closed within %d ms\n", static_cast<int>(monotonic_ms() - begin_ms));
      CHECK(monotonic_ms() - begin_ms < 10000);  // a second, on a machine that has nothing else to do
      context.reset();
    }
  }
}

TEST_CASE(many_comms_close_as_fast_as_one) {
  const auto close_ms = [](int count) {
    KilledPeer peer([&](int pipe) {
      std::unique_ptr<TransportContext> context;
      CHECK_OK(TransportContext::create(config_with(0), {loopback_device()}, &context));
      for (int i = 0; i < count; ++i) {
        Handle handle{};
        ListenComm* listener = nullptr;
        CHECK_OK(context->listen(0, handle.data(), &listener));
        write_handle(pipe, handle);
        accept_from(*context, listener);
      }
      write_handle(pipe, {});
      ::raise(SIGSTOP);
    });
    std::unique_ptr<TransportContext> context;
    CHECK_OK(TransportContext::create(config_with(0), {loopback_device()}, &context));
    std::vector<SendComm*> comms;
    const std::vector<std::uint8_t> message = make_message(0, 100);
    for (int i = 0; i < count; ++i) {
      Handle handle = read_handle(peer.pipe());
      comms.push_back(connect_to(*context, handle));
      Request* send = nullptr;
      CHECK_OK(TransportContext::isend(comms.back(), message.data(), message.size(), nullptr, &send));
      CHECK_OK(outcome(send));
    }
    read_handle(peer.pipe());
    cut_all(Cut::kReset);
    const std::int64_t begin_ms = monotonic_ms();
    for (SendComm* const comm : comms) context->close(comm);
    return monotonic_ms() - begin_ms;
  };
  const std::int64_t one_ms = close_ms(1);
  const std::int64_t eight_ms = close_ms(8);
  std::printf("        one within %d ms, eight within %d ms\n", static_cast<int>(one_ms), static_cast<int>(eight_ms));
  CHECK(eight_ms < 4 * one_ms);
}

}  // namespace bagua_net

CHECK_MAIN

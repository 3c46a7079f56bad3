// Handshakes in a process that stands still, as SIGSTOP makes it, with a clock that is set forward: what came meanwhile
// is read before a deadline counts. And a proof that is sent late has the time of a hello.
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <memory>
#include <vector>

#include "support/check.h"
#include "support/connection_ends.h"
#include "support/raw_handshake.h"
#include "support/test_clock.h"
#include "support/wire_relay.h"
#include "transport/recovery/recovery_timing.h"

namespace bagua_net {
namespace {

std::atomic<bool> is_to_stop{false};
std::atomic<bool> is_stopped{false};

// The connection thread of this process, of which there is one, stands still where it waits for its sockets. Its wait
// then ends without an event, whatever has come.
struct StoppedThread {
  StoppedThread() {
    is_to_stop = true;
    wait_until([] { return is_stopped.load(); }, "the thread to stop");
  }
  ~StoppedThread() {
    is_to_stop = false;
    wait_until([] { return !is_stopped; }, "the thread to go on");
  }
  StoppedThread(const StoppedThread&) = delete;
  StoppedThread& operator=(const StoppedThread&) = delete;
};

NicPath path_to(const SocketAddress& address) { return {loopback(), address, 0}; }

int wait_or_stop(int epoll, epoll_event* events, int most, int timeout_ms) {
  for (;;) {
    if (is_to_stop) {
      is_stopped = true;
      while (is_to_stop) ::usleep(100);
      is_stopped = false;
      errno = EINTR;
      return -1;
    }
    const int step_ms = timeout_ms == 0 ? 0 : 1;
    const auto ready = static_cast<int>(::syscall(SYS_epoll_pwait, epoll, events, most, step_ms, nullptr, 8));
    if (ready != 0 || timeout_ms == 0) return ready;
    if (timeout_ms > 0) --timeout_ms;
  }
}

}  // namespace

TEST_CASE(a_listener_that_was_stopped_reads_a_proof_before_its_deadline_counts) {
  ListeningService listening;
  Said said;
  const OwnedFd peer = listening.challenged(listening.hello(), &said);
  const HandshakeKeyRef key = handshake_key(listening.handle.token);
  {
    const StoppedThread stopped;
    prove(peer, *key, said);
    test_clock::skip_ms(settings_with(1).handshake_timeout_ms + 1);
  }
  CHECK(read_reply(peer, *key, said).verdict == HandshakeVerdict::kAccepted);
}

TEST_CASE(a_connector_that_was_stopped_reads_the_reply_before_its_deadline_counts) {
  RawListener listener;
  ConnectingService connecting(listener.handle.data());
  CHECK_OK(connecting.ask());
  const OwnedFd peer = listener.next();
  const HandshakeKeyRef key = handshake_key(listener.token);
  Hello hello;
  Said said = read_hello(peer, &hello);
  challenge(peer, &said);
  read_proof(peer, *key, said);
  {
    const StoppedThread stopped;
    send_reply(peer, *key, said, acceptance(1));
    test_clock::skip_ms(settings_with(1).connect_timeout_ms + 1);
  }
  connecting.finish();
}

// A peer that was stopped sends its challenge when the time for an answer is nearly over. If the connector then went
// over a shorter path, that connection would be there before the proof, which would take its place.
TEST_CASE(a_proof_has_the_time_of_a_hello_however_late_the_challenge_was) {
  ListeningService listening;
  ConnectingService connecting(listening.handle_bytes.data());
  const EstablishedConnection accepted = listening.accept_from(&connecting);
  HandleBytes handle = listening.handle_bytes;
  std::atomic<bool> has_challenge{false};
  std::atomic<bool> passes_challenge{false};
  std::atomic<bool> has_proof{false};
  std::atomic<bool> passes_proof{false};
  WireRelay relay(handle.data(), [&](const WireRelay::Passing& passing) {
    if (!passing.forth && passing.offset == 0) {
      has_challenge = true;
      wait_until([&] { return passes_challenge.load(); }, "the end of the delay");
    } else if (passing.forth && passing.offset >= kHelloBytes) {
      has_proof = true;
      wait_until([&] { return passes_proof.load(); }, "the end of the way");
    }
    return WireRelay::Fate::kPass;
  });
  const auto arrivals = std::make_shared<StreamArrivals>();
  JoinTicket ticket = connecting.connection.ticket;
  ticket.paths = {path_to(relay.address()), path_to(listening.address)};
  ticket.hello.stream_index = kReplacingFirstStream;
  JoinTicket other = ticket;
  other.first_path = 1;
  // The connection thread has looked at its deadlines.
  const auto look = [&](std::size_t place) {
    wait_until([&] { return connecting.service.prepare(other, place, arrivals) == Prepared::kReady; }, "a turn");
  };

  test_clock::stop();
  connecting.service.join(ticket, 1, arrivals);
  wait_until([&] { return has_challenge.load(); }, "the challenge");
  test_clock::skip_ms(kLongConnectAnswerMs - 1);
  look(1);
  passes_challenge = true;
  wait_until([&] { return has_proof.load(); }, "the proof");
  test_clock::skip_ms(2);
  look(2);
  test_clock::skip_ms(kConnectAgainMs);
  look(3);
  passes_proof = true;
  std::vector<StreamArrivals::Arrival> arrived;
  wait_until(
      [&] {
        arrived = arrivals->take();
        return !arrived.empty();
      },
      "the replacement");
  test_clock::go_on();
  CHECK_EQ(arrived[0].path, std::size_t{0});
}

}  // namespace bagua_net

// In place of the C library's.
extern "C" __attribute__((used, visibility("default"))) int epoll_wait(int epoll, epoll_event* events, int most,
                                                                       int timeout_ms) {
  return bagua_net::wait_or_stop(epoll, events, most, timeout_ms);
}

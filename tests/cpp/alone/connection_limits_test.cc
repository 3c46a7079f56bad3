// A connection is set up, and carries messages, although a system call fails once, for want of descriptors, memory or
// an interface, or because a signal came. The calls below stand before those of the C library.
#include <dlfcn.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "support/check.h"
#include "support/connection_ends.h"
#include "support/context_pair.h"
#include "support/cut_connections.h"
#include "support/process_limits.h"

namespace {

enum class Call { kNone, kSocket, kConnect, kAccept, kSend, kRecv, kEpollCtl, kGetrandom };

std::atomic<Call> failing_call{Call::kNone};
std::atomic<int> failing_errno{0};

// True once after fail_once(): then errno is set.
bool fails(Call call) {
  Call expected = call;
  if (!failing_call.compare_exchange_strong(expected, Call::kNone)) return false;
  errno = failing_errno;
  return true;
}

void fail_once(Call call, int error_number) {
  failing_errno = error_number;
  failing_call = call;
}

template <typename Function>
Function* next(Function* /*same type*/, const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

int socket(int domain, int type, int protocol) noexcept {
  if (fails(Call::kSocket)) return -1;
  return next(&::socket, "socket")(domain, type, protocol);
}
int connect(int fd, const sockaddr* address, socklen_t length) {
  const int result = next(&::connect, "connect")(fd, address, length);
  // After EINTR the kernel goes on connecting; other errors are as good as a connection that was never there.
  return fails(Call::kConnect) ? -1 : result;
}
int accept4(int fd, sockaddr* address, socklen_t* length, int flags) {
  if (fails(Call::kAccept)) return -1;
  return next(&::accept4, "accept4")(fd, address, length, flags);
}
ssize_t send(int fd, const void* data, size_t bytes, int flags) {
  if (fails(Call::kSend)) return -1;
  return next(&::send, "send")(fd, data, bytes, flags);
}
ssize_t recv(int fd, void* data, size_t bytes, int flags) {
  if (fails(Call::kRecv)) return -1;
  return next(&::recv, "recv")(fd, data, bytes, flags);
}
int epoll_ctl(int poller, int operation, int fd, epoll_event* event) noexcept {
  if (operation == EPOLL_CTL_ADD && fails(Call::kEpollCtl)) return -1;
  return next(&::epoll_ctl, "epoll_ctl")(poller, operation, fd, event);
}
ssize_t getrandom(void* data, size_t bytes, unsigned flags) {
  if (fails(Call::kGetrandom)) return -1;
  return next(&::getrandom, "getrandom")(data, bytes, flags);
}

}  // extern "C"

namespace bagua_net {
namespace {

void connect_while_a_call_fails(Call call, int error_number) {
  ListeningService listening(settings_with(2));
  ConnectingService connecting(listening.handle_bytes.data(), settings_with(2));
  // Or else the call would fail for the port where its peer may ask.
  HandleBytes own_handle{};
  RandomId own_id{};
  CHECK_OK(connecting.service.listen({loopback()}, own_handle.data(), &own_id));
  fail_once(call, error_number);
  const EstablishedConnection accepted = listening.accept_from(&connecting);
  CHECK(failing_call == Call::kNone);
  CHECK_EQ(connecting.connection.sockets.size(), 2u);
  CHECK_EQ(accepted.sockets.size(), 2u);
}

PluginConfig config_with(Recovery recovery) {
  PluginConfig config;
  config.workers = 0;
  config.streams = 3;
  config.recovery = recovery;
  return config;
}

Status transfer(ContextPair& pair, std::size_t bytes) {
  bool is_right = false;
  const Status status = pair.transfer(make_message(bytes, bytes), &is_right);
  CHECK(is_right || !status.is_ok());
  return status;
}

}  // namespace

TEST_CASE(a_call_that_fails_once_does_not_fail_the_connection) {
  struct Failure {
    Call call;
    int error_number;
  };
  for (const auto& [call, error_number] :
       {Failure{Call::kSocket, EMFILE}, {Call::kSocket, ENFILE},       {Call::kSocket, ENOBUFS},
        {Call::kSocket, ENOMEM},        {Call::kConnect, EINTR},       {Call::kConnect, ENETUNREACH},
        {Call::kConnect, EHOSTUNREACH}, {Call::kConnect, ENETDOWN},    {Call::kConnect, EADDRNOTAVAIL},
        {Call::kAccept, EMFILE},        {Call::kAccept, ENOBUFS},      {Call::kAccept, ENOMEM},
        {Call::kAccept, EINTR},         {Call::kAccept, ECONNABORTED}, {Call::kSend, ENOBUFS},
        {Call::kSend, ENOMEM},          {Call::kRecv, EINTR},          {Call::kRecv, ENOMEM},
        {Call::kEpollCtl, ENOMEM},      {Call::kEpollCtl, ENOSPC},     {Call::kGetrandom, EINTR}}) {
    connect_while_a_call_fails(call, error_number);
  }
}

TEST_CASE(what_no_retry_mends_is_an_error_that_says_so) {
  RawListener listener;
  ConnectingService connecting(listener.handle.data());
  HandleBytes own_handle{};
  RandomId own_id{};
  CHECK_OK(connecting.service.listen({loopback()}, own_handle.data(), &own_id));
  fail_once(Call::kSocket, EAFNOSUPPORT);
  CHECK_OK(connecting.ask());
  CHECK_EQ(connecting.ask().error_number(), EAFNOSUPPORT);
}

TEST_CASE(a_message_for_which_the_kernel_has_no_memory_comes_over_another_connection) {
  for (const int error_number : {ENOBUFS, ENOMEM}) {
    ContextPair pair(config_with(Recovery::kOn), config_with(Recovery::kOn));
    fail_once(Call::kSend, error_number);
    CHECK_OK(transfer(pair, 1000));
    CHECK(failing_call == Call::kNone);
  }
}

TEST_CASE(without_recovery_it_is_an_error_that_says_so) {
  ContextPair pair(config_with(Recovery::kOff), config_with(Recovery::kOff));
  fail_once(Call::kSend, ENOBUFS);
  const Status status = transfer(pair, 1000);
  check_contains(status.message(), "connection to 127.0.0.1");
  check_contains(status.message(), "send: No buffer space available");
}

TEST_CASE(lost_connections_are_replaced_once_there_are_descriptors) {
  ContextPair pair(config_with(Recovery::kOn), config_with(Recovery::kOn));
  const std::vector<std::uint8_t> message = make_message(0, 300000);
  std::vector<std::uint8_t> room(message.size());
  const std::vector<int> connections = open_connections();
  std::optional<DescriptorLimit> none(3);
  for (const int fd : connections) cut(fd, Cut::kReset);
  Request* const receive = pair.receive(room);
  Request* const send = pair.send(message);
  // Some attempts to connect; fewer on a busy machine, and none of them may succeed.
  for (int looks = 0; looks < 300; ++looks) {
    CHECK(!is_done(receive));
    ::usleep(1000);
  }
  none.reset();
  CHECK_OK(outcome({send, receive}));
  CHECK(room == message);
}

// Of an application that has timers, and handlers without SA_RESTART.
TEST_CASE(signals_disturb_no_message) {
  struct sigaction action{};
  static std::atomic<int> signals{0};
  action.sa_handler = [](int) { ++signals; };
  CHECK_EQ(::sigaction(SIGALRM, &action, nullptr), 0);
  const itimerval often{{0, 500}, {0, 500}};
  const itimerval never{};
  for (const int workers : {0, 2}) {
    PluginConfig config = config_with(Recovery::kOff);
    config.workers = workers;
    CHECK_EQ(::setitimer(ITIMER_REAL, &often, nullptr), 0);
    signals = 0;
    {
      ContextPair pair(config, config);
      for (std::size_t number = 0; number < 10 || signals < 100; ++number) {
        CHECK_OK(transfer(pair, number % 3 == 0 ? 2u << 20 : 5000));
      }
    }
    CHECK_EQ(::setitimer(ITIMER_REAL, &never, nullptr), 0);
  }
}

}  // namespace bagua_net

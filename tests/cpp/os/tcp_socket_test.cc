// The options that every connection has, read back from the kernel.
#include "os/tcp_socket.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <thread>

#include "support/check.h"
#include "support/comm_parts.h"
#include "support/denied_calls.h"
#include "support/kept_log.h"

namespace bagua_net {
namespace {

constexpr bool kSameHost = true;
constexpr bool kBetweenHosts = false;

OwnedFd fresh_socket() {
  OwnedFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  CHECK(socket.is_open());
  return socket;
}

int option(const OwnedFd& socket, int level, int name) {
  int value = -1;
  socklen_t length = sizeof value;
  CHECK_EQ(::getsockopt(socket.get(), level, name, &value, &length), 0);
  return value;
}

std::string congestion_control(const OwnedFd& socket) {
  char name[16] = "";
  socklen_t length = sizeof name;
  CHECK_EQ(::getsockopt(socket.get(), IPPROTO_TCP, TCP_CONGESTION, name, &length), 0);
  return name;
}

// This process: the list in net.ipv4.tcp_allowed_congestion_control binds those without privileges only.
bool kernel_allows(const std::string& congestion_control) {
  const OwnedFd socket = fresh_socket();
  return ::setsockopt(socket.get(), IPPROTO_TCP, TCP_CONGESTION, congestion_control.data(),
                      static_cast<socklen_t>(congestion_control.size())) == 0;
}

TcpOptions with_congestion_control(CongestionControl choice) {
  TcpOptions options;
  options.congestion_control = choice;
  return options;
}

}  // namespace

TEST_CASE(small_messages_are_not_held_back) {
  for (const bool same_host : {kSameHost, kBetweenHosts}) {
    const OwnedFd socket = fresh_socket();
    CHECK_OK(apply_tcp_options(socket.get(), {}, same_host));
    CHECK_EQ(option(socket, IPPROTO_TCP, TCP_NODELAY), 1);
  }
}

TEST_CASE(unsent_bytes_are_limited_between_hosts_only) {
  const OwnedFd untouched = fresh_socket();
  const OwnedFd local = fresh_socket();
  CHECK_OK(apply_tcp_options(local.get(), {}, kSameHost));
  CHECK_EQ(option(local, IPPROTO_TCP, TCP_NOTSENT_LOWAT), option(untouched, IPPROTO_TCP, TCP_NOTSENT_LOWAT));
  const OwnedFd remote = fresh_socket();
  CHECK_OK(apply_tcp_options(remote.get(), {}, kBetweenHosts));
  CHECK_EQ(option(remote, IPPROTO_TCP, TCP_NOTSENT_LOWAT), 128 << 10);
}

TEST_CASE(a_connection_that_turns_out_to_stay_on_the_host_is_not_limited) {
  const OwnedFd untouched = fresh_socket();
  const OwnedFd socket = fresh_socket();
  CHECK_OK(apply_tcp_options(socket.get(), {}, kBetweenHosts));
  CHECK_OK(apply_tcp_options(socket.get(), {}, kSameHost));
  CHECK_EQ(option(socket, IPPROTO_TCP, TCP_NOTSENT_LOWAT), option(untouched, IPPROTO_TCP, TCP_NOTSENT_LOWAT));
}

TEST_CASE(what_was_lost_is_sent_again_soon_between_hosts) {
  constexpr int kRtoMinUs = 45, kDelackMaxUs = 46;  // <linux/tcp.h> of Linux 6.15
  const OwnedFd untouched = fresh_socket();
  const OwnedFd local = fresh_socket();
  const OwnedFd remote = fresh_socket();
  CHECK_OK(apply_tcp_options(local.get(), {}, kSameHost));
  CHECK_OK(apply_tcp_options(remote.get(), {}, kBetweenHosts));
  int value = 0;
  socklen_t length = sizeof value;
  if (::getsockopt(untouched.get(), IPPROTO_TCP, kRtoMinUs, &value, &length) != 0) return;  // an older kernel
  for (const int name : {kRtoMinUs, kDelackMaxUs}) {
    CHECK_EQ(option(local, IPPROTO_TCP, name), option(untouched, IPPROTO_TCP, name));
  }
  // The kernel counts in ticks of up to 10 ms.
  const int retransmission_us = option(remote, IPPROTO_TCP, kRtoMinUs);
  const int acknowledgement_us = option(remote, IPPROTO_TCP, kDelackMaxUs);
  CHECK(retransmission_us >= 40000 && retransmission_us <= 50000);
  CHECK(acknowledgement_us >= 20000 && acknowledgement_us <= 30000);
}

TEST_CASE(a_dead_host_is_noticed_within_the_keepalive_time) {
  for (const int keepalive_s : {1, 2, 3, 5, 30, 31, 3600}) {
    const OwnedFd socket = fresh_socket();
    TcpOptions options;
    options.keepalive_s = keepalive_s;
    CHECK_OK(apply_tcp_options(socket.get(), options, kBetweenHosts));
    CHECK_EQ(option(socket, SOL_SOCKET, SO_KEEPALIVE), 1);
    const int idle_s = option(socket, IPPROTO_TCP, TCP_KEEPIDLE);
    const int probing_s = option(socket, IPPROTO_TCP, TCP_KEEPINTVL) * option(socket, IPPROTO_TCP, TCP_KEEPCNT);
    CHECK(idle_s >= 1 && probing_s >= 1);
    // The kernel counts whole seconds: at least one of silence, and one before each of three probes.
    CHECK(idle_s + probing_s <= std::max(keepalive_s, 4));
    CHECK(idle_s + probing_s >= keepalive_s - 2);
    // With three probes in the first third a sender has time for another connection.
    CHECK(idle_s + 2 * option(socket, IPPROTO_TCP, TCP_KEEPINTVL) <= std::max(keepalive_s / 3, 3));
  }
}

TEST_CASE(keepalive_can_be_off) {
  const OwnedFd socket = fresh_socket();
  TcpOptions options;
  options.keepalive_s = 0;
  CHECK_OK(apply_tcp_options(socket.get(), options, kBetweenHosts));
  CHECK_EQ(option(socket, SOL_SOCKET, SO_KEEPALIVE), 0);
}

TEST_CASE(buffers_are_set_or_left_to_the_kernel) {
  const OwnedFd untouched = fresh_socket();
  const OwnedFd automatic = fresh_socket();
  CHECK_OK(apply_tcp_options(automatic.get(), {}, kBetweenHosts));
  const OwnedFd fixed = fresh_socket();
  TcpOptions options;
  options.buffer_bytes = 65536;
  CHECK_OK(apply_tcp_options(fixed.get(), options, kBetweenHosts));
  for (const int name : {SO_SNDBUF, SO_RCVBUF}) {
    CHECK_EQ(option(automatic, SOL_SOCKET, name), option(untouched, SOL_SOCKET, name));
    CHECK_EQ(option(fixed, SOL_SOCKET, name), 2 * 65536);  // the kernel doubles it, for its own book-keeping
  }
}

TEST_CASE(congestion_control_is_the_systems_between_hosts) {
  const std::string systems = congestion_control(fresh_socket());
  for (const CongestionControl choice : {CongestionControl::kAuto, CongestionControl::kSystem}) {
    const OwnedFd socket = fresh_socket();
    CHECK_OK(apply_tcp_options(socket.get(), with_congestion_control(choice), kBetweenHosts));
    CHECK_EQ(congestion_control(socket), systems);
  }
}

TEST_CASE(congestion_control_on_one_host_is_cubic_unless_the_system_is_asked_for) {
  const std::string systems = congestion_control(fresh_socket());
  const OwnedFd automatic = fresh_socket();
  CHECK_OK(apply_tcp_options(automatic.get(), {}, kSameHost));
  CHECK_EQ(congestion_control(automatic), kernel_allows("cubic") ? "cubic" : systems);
  const OwnedFd of_the_system = fresh_socket();
  CHECK_OK(apply_tcp_options(of_the_system.get(), with_congestion_control(CongestionControl::kSystem), kSameHost));
  CHECK_EQ(congestion_control(of_the_system), systems);
}

TEST_CASE(a_chosen_congestion_control_is_used_or_refused_by_name) {
  struct Choice {
    CongestionControl choice;
    const char* name;
  };
  for (const auto& [choice, name] : {Choice{CongestionControl::kCubic, "cubic"},
                                     {CongestionControl::kReno, "reno"},
                                     {CongestionControl::kBbr, "bbr"}}) {
    for (const bool same_host : {kSameHost, kBetweenHosts}) {
      const OwnedFd socket = fresh_socket();
      const Status status = apply_tcp_options(socket.get(), with_congestion_control(choice), same_host);
      if (status.is_ok()) {
        CHECK_EQ(congestion_control(socket), name);
      } else {
        CHECK(!kernel_allows(name));
        CHECK(status.message().find(std::string("BAGUA_NET_CONGESTION_CONTROL=") + name) != std::string::npos);
      }
    }
  }
  // Every kernel has reno: not all of the above was refused.
  const OwnedFd socket = fresh_socket();
  CHECK_OK(apply_tcp_options(socket.get(), with_congestion_control(CongestionControl::kReno), kBetweenHosts));
}

TEST_CASE(a_refused_option_names_itself) {
  int ends[2];
  CHECK_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  const OwnedFd first(ends[0]);
  const OwnedFd second(ends[1]);
  const Status status = apply_tcp_options(first.get(), {}, kBetweenHosts);
  CHECK(!status.is_ok());
  CHECK(status.message().find("TCP_NODELAY") != std::string::npos);
}

// Some sandboxes lack them. A connect that fails for it would be repeated until its deadline.
TEST_CASE(without_the_options_of_keepalive_connections_work_and_one_line_says_so) {
  const KeptLog log;
  std::thread([] {
    deny_calls(SYS_setsockopt, 2, TCP_KEEPIDLE, ENOPROTOOPT);
    TcpOptions options;
    options.keepalive_s = 30;
    for (int i = 0; i < 2; ++i) {
      const OwnedFd socket = fresh_socket();
      CHECK_OK(apply_tcp_options(socket.get(), options, kBetweenHosts));
      CHECK_EQ(option(socket, IPPROTO_TCP, TCP_NODELAY), 1);
    }
  }).join();
  const std::string said = KeptLog::text();
  check_contains(said, "setsockopt TCP_KEEPIDLE=5: Protocol not available (errno 92): going on without keepalive");
  CHECK_EQ(std::count(said.begin(), said.end(), '\n'), 1);
}

}  // namespace bagua_net

// What the recovery thread says of comms that lose connections.
#include "transport/recovery/recovery_thread.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include <atomic>
#include <cerrno>
#include <string>
#include <thread>
#include <vector>

#include "base/log_sink.h"
#include "support/check.h"
#include "support/comm_parts.h"

namespace bagua_net {
namespace {

std::vector<std::string>& logged() {
  static std::vector<std::string> lines;
  return lines;
}

void keep_line(LogLevel, const char*, int, const char* message) { logged().emplace_back(message); }

// A comm that loses a connection whenever it is asked.
class Loser : public Recoverable {
 public:
  std::vector<RareLog::Line> recover() override {
    losses.fetch_add(1);
    return {{LogLevel::kWarn, "lost a connection", ""}};
  }
  void fail(Status) override {}

  std::atomic<int> losses{0};
};

// As in a sandbox: the calling thread, and those that it starts, may open no sockets of rtnetlink.
bool forbid_netlink() {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_socket, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[0])),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AF_NETLINK, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter{sizeof program / sizeof program[0], program};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

}  // namespace

TEST_CASE(a_peer_that_ends_causes_one_line_however_many_comms_it_had) {
  logged().clear();
  set_log_function(&keep_line);
  constexpr std::size_t kComms = 5;
  std::vector<Loser> comms(kComms);
  {
    RecoveryThread thread;
    CHECK_OK(thread.start());
    std::vector<std::uint64_t> ids;
    for (Loser& comm : comms) ids.push_back(thread.add(&comm, false));
    for (const std::uint64_t id : ids) thread.notify(id);
    const Deadline deadline;
    for (const Loser& comm : comms) {
      while (comm.losses.load() == 0) deadline.check("a loss");
    }
    for (const std::uint64_t id : ids) thread.remove(id);
  }
  set_log_function(nullptr);
  CHECK_EQ(logged().size(), 1u);
  CHECK_EQ(logged()[0], "lost a connection");
}

TEST_CASE(an_interface_that_is_down_from_the_start_is_reported) {
  logged().clear();
  set_log_function(&keep_line);
  std::string told;
  {
    RecoveryThread thread;
    NetworkInterface interface;
    interface.name = "nosuch0";
    CHECK_OK(thread.start(
        {{interface}, [&](const NetworkInterface& one, LinkState state) { told = describe(state, one); }}));
  }
  set_log_function(nullptr);
  CHECK_EQ(told, "nosuch0 was removed");
  CHECK_EQ(logged().size(), 1u);
  CHECK_EQ(logged()[0], "Bagua-Net: network interface nosuch0 was removed");
}

TEST_CASE(without_rtnetlink_it_says_so_once_and_recovers_all_the_same) {
  logged().clear();
  set_log_function(&keep_line);
  std::thread([] {
    CHECK(forbid_netlink());
    RecoveryThread thread;
    NetworkInterface interface;
    interface.name = "eth0";
    CHECK_OK(thread.start({{interface}, nullptr}));
    Loser comm;
    const std::uint64_t id = thread.add(&comm, false);
    thread.notify(id);
    const Deadline deadline;
    while (comm.losses.load() == 0) deadline.check("a loss");
    thread.remove(id);
  }).join();
  set_log_function(nullptr);
  CHECK_EQ(logged().size(), 2u);
  CHECK(logged()[0].find("noticed only by its silence: rtnetlink socket") != std::string::npos);
  CHECK(logged()[0].find("Operation not permitted") != std::string::npos);
  CHECK_EQ(logged()[1], "lost a connection");
}

}  // namespace bagua_net

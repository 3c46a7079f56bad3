// What the recovery thread says of comms that lose connections.
#include "transport/recovery/recovery_thread.h"

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
#include "support/denied_calls.h"

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
    for (Loser& comm : comms) {
      ids.push_back(thread.new_id());
      thread.add(ids.back(), &comm, false);
    }
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

// What happened while a comm was built is told when it is whole: its connections may go over what was lost meanwhile.
TEST_CASE(a_comm_is_told_of_links_when_it_is_added) {
  class Told final : public Loser {
   public:
    void on_links_changed() override { was_told = true; }

    bool was_told = false;
  };
  set_log_function(&keep_line);
  Told comm;
  {
    RecoveryThread thread;
    CHECK_OK(thread.start());
    const std::uint64_t id = thread.new_id();
    thread.notify(id);
    thread.add(id, &comm, false);
    const Deadline deadline;
    while (comm.losses.load() == 0) deadline.check("the first look");
    thread.remove(id);
  }
  set_log_function(nullptr);
  CHECK(comm.was_told);
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
        {{interface}, [&](const NetworkInterface& one, LinkState state) { told = describe(state, one); }, nullptr}));
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
    deny_calls(SYS_socket, 0, AF_NETLINK, EPERM);
    RecoveryThread thread;
    NetworkInterface interface;
    interface.name = "eth0";
    CHECK_OK(thread.start({{interface}, nullptr, nullptr}));
    Loser comm;
    const std::uint64_t id = thread.new_id();
    thread.add(id, &comm, false);
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

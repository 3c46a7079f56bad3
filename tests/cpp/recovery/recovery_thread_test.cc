// What the recovery thread says of comms that lose connections.
#include "transport/recovery/recovery_thread.h"

#include <sys/socket.h>
#include <sys/syscall.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <string>
#include <thread>
#include <vector>

#include "support/check.h"
#include "support/comm_parts.h"
#include "support/denied_calls.h"
#include "support/kept_log.h"

namespace bagua_net {
namespace {

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

void lose_once(RecoveryThread& thread, Loser& comm) {
  const std::uint64_t id = thread.new_id();
  thread.notify(id);
  thread.add(id, &comm, false);
  wait_until([&] { return comm.losses.load() > 0; }, "a loss");
  thread.remove(id);
}

}  // namespace

TEST_CASE(a_peer_that_ends_causes_one_line_however_many_comms_it_had) {
  const KeptLog log;
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
    for (const Loser& comm : comms) wait_until([&] { return comm.losses.load() > 0; }, "a loss");
    for (const std::uint64_t id : ids) thread.remove(id);
  }
  CHECK_EQ(KeptLog::text(), "lost a connection\n");
}

// What happened while a comm was built is told when it is whole: its connections may go over what was lost meanwhile.
TEST_CASE(a_comm_is_told_of_links_when_it_is_added) {
  class Told final : public Loser {
   public:
    void on_links_changed() override { was_told = true; }

    bool was_told = false;
  };
  const KeptLog log;
  Told comm;
  {
    RecoveryThread thread;
    CHECK_OK(thread.start());
    lose_once(thread, comm);
  }
  CHECK(comm.was_told);
}

TEST_CASE(an_interface_that_is_down_from_the_start_is_reported) {
  const KeptLog log;
  std::string told;
  {
    RecoveryThread thread;
    NetworkInterface interface;
    interface.name = "nosuch0";
    CHECK_OK(thread.start(
        {{interface}, [&](const NetworkInterface& one, LinkState state) { told = describe(state, one); }, nullptr}));
  }
  CHECK_EQ(told, "nosuch0 was removed");
  CHECK_EQ(KeptLog::text(), "Bagua-Net: network interface nosuch0 was removed\n");
}

TEST_CASE(without_rtnetlink_it_says_so_once_and_recovers_all_the_same) {
  const KeptLog log;
  std::thread([] {
    deny_calls(SYS_socket, 0, AF_NETLINK, EPERM);
    RecoveryThread thread;
    NetworkInterface interface;
    interface.name = "eth0";
    CHECK_OK(thread.start({{interface}, nullptr, nullptr}));
    Loser comm;
    lose_once(thread, comm);
  }).join();
  const std::string said = KeptLog::text();
  CHECK_EQ(std::count(said.begin(), said.end(), '\n'), 2);
  check_contains(said, "noticed only by its silence: rtnetlink socket");
  check_contains(said, "Operation not permitted");
  check_contains(said, "\nlost a connection\n");
}

}  // namespace bagua_net

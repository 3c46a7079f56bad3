// What the recovery thread says of comms that lose connections.
#include "transport/recovery/recovery_thread.h"

#include <atomic>
#include <string>
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
  std::vector<std::string> recover() override {
    losses.fetch_add(1);
    return {"lost a connection"};
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

}  // namespace bagua_net

CHECK_MAIN

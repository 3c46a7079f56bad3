// Threads of ours where there is no memory: for the thread itself, or for what it does later.
#include "base/background_thread.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>

#include "stats/stall_report.h"
#include "support/check.h"
#include "support/connection_ends.h"
#include "support/context_pair.h"
#include "transport/comm/recv_comm.h"
#include "transport/recovery/recovery_thread.h"

namespace {

// Of this process: the next allocation fails.
std::atomic<bool> out_of_memory{false};
// The same, of threads with that name alone; nullptr: of none.
std::atomic<const char*> starving{nullptr};

bool may_allocate() {
  const char* const name = starving.load();
  if (out_of_memory.load() || name == nullptr) return !out_of_memory.load();
  char own[16] = "";
  pthread_getname_np(pthread_self(), own, sizeof own);
  return std::strcmp(own, name) != 0;
}

}  // namespace

// Not inlined: the compiler would see malloc or free without the other.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  void* const memory = may_allocate() ? std::malloc(bytes) : nullptr;
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace bagua_net {
namespace {

bool is_blocked(int signal) {
  sigset_t now;
  pthread_sigmask(SIG_SETMASK, nullptr, &now);
  return sigismember(&now, signal) == 1;
}

}  // namespace

TEST_CASE(the_creator_takes_its_signals_again) {
  std::thread thread;
  bool is_blocked_there = false;
  CHECK_OK(start_background_thread("here", nullptr, [&] { is_blocked_there = is_blocked(SIGINT); }, &thread));
  thread.join();
  CHECK(is_blocked_there);
  CHECK(!is_blocked(SIGINT));
}

TEST_CASE(the_creator_takes_its_signals_again_without_memory) {
  const std::function<void()> body = [] {};
  const std::string name = "nowhere";
  std::thread thread;
  out_of_memory = true;
  bool has_failed = false;
  try {
    has_failed = !start_background_thread(name, nullptr, body, &thread).is_ok();
  } catch (const std::bad_alloc&) {
    has_failed = true;
  }
  out_of_memory = false;
  CHECK(has_failed);
  CHECK(!thread.joinable());
  CHECK(!is_blocked(SIGINT));
}

TEST_CASE(what_a_thread_throws_does_not_end_the_process) {
  for (const bool no_memory : {true, false}) {
    std::thread thread;
    Status told;
    CHECK_OK(start_background_thread(
        "throws", nullptr,
        [no_memory] {
          if (no_memory) throw std::bad_alloc();
          throw std::runtime_error("something else");
        },
        &thread, [&told](const Status& failure) { told = failure; }));
    thread.join();
    CHECK(told.message().find("throws") != std::string::npos);
    CHECK(told.message().find(no_memory ? "memory" : "something else") != std::string::npos);
  }
}

namespace {

struct Starving {
  explicit Starving(const char* thread) { starving = thread; }
  ~Starving() { starving = nullptr; }
};

}  // namespace

TEST_CASE(a_connection_thread_without_memory_fails_what_waits_for_it) {
  ListeningService listening;
  const Starving starved("bagua-net-conn");
  const OwnedFd peer = connect_to(listening.address);
  bool ready = false;
  EstablishedConnection connection;
  Status status;
  wait_until(
      [&] {
        status = listening.service.accept(listening.id, &ready, &connection);
        return !status.is_ok();
      },
      "the failure");
  CHECK(status.message().find("bagua-net-conn") != std::string::npos);
  // Also what is asked for only now.
  CHECK(!listening.service.connect({loopback()}, listening.handle_bytes.data(), &ready, &connection).is_ok());
  const auto arrivals = std::make_shared<StreamArrivals>();
  JoinTicket ticket;
  ticket.paths[0].address = listening.address;
  ticket.hello.stream_index = kReplacingStream;
  listening.service.join(ticket, 1, arrivals);
  CHECK(!arrivals->take_failures().empty());
}

TEST_CASE(an_io_thread_without_memory_fails_its_comms) {
  PluginConfig config;
  config.workers = 1;
  config.streams = 2;
  std::vector<std::uint8_t> message(4 << 20);
  std::vector<std::uint8_t> room(message.size());
  std::string failure;
  const Starving starved("bagua-net-io0");  // from its first piece of work on
  try {
    ContextPair pair(config, config);
    Request* const send = pair.send(message);
    Request* const receive = pair.receive(room);
    wait_until([&] { return is_done(send) && is_done(receive); }, "a message that cannot be sent");
  } catch (const std::exception& error) {
    failure = error.what();
  }
  CHECK(failure.find("bagua-net-io") != std::string::npos || failure.find("the peer closed") != std::string::npos);
}

namespace {

// Its peer never has everything.
struct Lingering : Recoverable {
  explicit Lingering(std::atomic<int>* ended) : ended_(ended) {}
  ~Lingering() override { ended_->fetch_add(1); }
  std::vector<RareLog::Line> recover() override { return {}; }
  void fail(Status /*status*/) override {}
  bool is_closed(std::int64_t /*now_ms*/) override { return false; }

  std::atomic<int>* const ended_;
};

// Its peer has everything when it was asked for the third time.
struct Delivering : Recoverable {
  explicit Delivering(std::atomic<int>* asked_at_the_end) : asked_at_the_end_(asked_at_the_end) {}
  ~Delivering() override { *asked_at_the_end_ = asked_; }
  std::vector<RareLog::Line> recover() override { return {}; }
  void fail(Status /*status*/) override {}
  bool is_closed(std::int64_t /*now_ms*/) override { return ++asked_ == 3; }

  std::atomic<int>* const asked_at_the_end_;
  int asked_ = 0;
};

}  // namespace

TEST_CASE(a_recovery_thread_closes_what_its_peer_has) {
  std::atomic<int> asked_at_the_end{0};
  RecoveryThread recovery;
  CHECK_OK(recovery.start());
  recovery.close(std::make_unique<Delivering>(&asked_at_the_end));
  recovery.wait_until_closed();
  CHECK_EQ(asked_at_the_end.load(), 3);
}

TEST_CASE(nobody_waits_for_a_recovery_thread_without_memory) {
  std::atomic<int> ended{0};
  RecoveryThread recovery;
  CHECK_OK(recovery.start());
  recovery.close(std::make_unique<Lingering>(&ended));
  const Starving starved("bagua-net-fix");
  recovery.wait_until_closed();
  CHECK_EQ(ended.load(), 1);
  recovery.close(std::make_unique<Lingering>(&ended));
  CHECK_EQ(ended.load(), 2);
  CHECK(!recovery.is_closing());
}

// As when such a thread ends: nobody would catch what it throws then.
TEST_CASE(a_comm_fails_without_memory) {
  constexpr int kWaitsMs = 40000;
  StallReport stalls(1000);
  WorkerPool no_workers(0, 0, cpu_set_t{});
  RecvPolicy policy;
  policy.stalls = &stalls;
  std::unique_ptr<RecvComm> comm;
  CHECK_OK(
      RecvComm::create(std::vector<std::unique_ptr<ByteStream>>{}, "the sender", nullptr, &no_workers, &comm, policy));
  std::string line;
  for (const int now_ms : {0, kWaitsMs})
    line = stalls.waits(comm.get(), {"the sender", StallReport::Waits::kToReceive, kWaitsMs, ""}, now_ms);
  CHECK(!line.empty());  // the end of the stall is to be reported, too
  const Status failure = Status::remote_error("there is no memory");
  out_of_memory = true;
  bool has_thrown = false;
  try {
    comm->fail(failure);
  } catch (const std::bad_alloc&) {
    has_thrown = true;
  }
  out_of_memory = false;
  CHECK(!has_thrown);
  std::uint8_t byte = 0;
  Request* request = nullptr;
  CHECK_EQ(comm->irecv(&byte, 1, nullptr, &request).message(), failure.message());
}

}  // namespace bagua_net

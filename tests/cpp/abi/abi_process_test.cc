// The plugin in the life of a process: init and finalize any number of times, hundreds of comms, dlclose, exit.
#include <sched.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <optional>

#include "abi_connection.h"
#include "transport/tuning/thread_load.h"

namespace abi_test {
namespace {

// v11+: a context per communicator, the transport for as long as there is one.
void finalizes_and_starts_again(int version) {
  const PluginLibrary library;
  const Net net(library, version, &CapturedLog::log);
  const int threads_before = threads();
  std::optional<int> fds_before;
  for (int round = 0; round < 3; ++round) {
    void* first = slot_content(2);
    void* second = slot_content(2);
    CHECK_SUCCESS(net.init(&first));
    CHECK_SUCCESS(net.init(&second));
    if (net.has_finalize()) CHECK(first != nullptr && second != nullptr && first != second);
    transfer_once(net, first, 1);
    CHECK_SUCCESS(net.finalize(first));
    // The other communicator is not affected, whatever is finalized twice or was never there.
    CHECK_SUCCESS(net.finalize(first));
    CHECK_SUCCESS(net.finalize(nullptr));
    transfer_once(net, second, 2);
    // Left behind by an abort: reaped.
    Handle handle{};
    void* listen = nullptr;
    CHECK_SUCCESS(net.listen(second, 0, handle.data(), &listen));
    Connection connection = connect_both_ends(net, second);
    CHECK_SUCCESS(net.finalize(second));
    if (net.has_finalize()) {
      wait_for_threads(threads_before);
      if (!fds_before) fds_before = open_fds();
      CHECK_EQ(open_fds(), *fds_before);
      void* comm = slot_content(2);
      CHECK_RESULT(net.listen(second, 0, handle.data(), &comm), Result::kInternalError);
      CHECK(comm == nullptr);
      // Closing what went with its communicator is harmless.
      CHECK_SUCCESS(net.close_send(connection.send));
      CHECK_SUCCESS(net.close_listen(listen));
    } else {
      close_both_ends(net, &connection);
      CHECK_SUCCESS(net.close_listen(listen));
    }
  }
  CHECK_EQ(CapturedLog::get().count(bagua_net::nccl::LogLevel::kInfo, "active: table v" + std::to_string(version)), 1);
}

// 256 comms at once, with a sanitizer fewer, each used: threads do not grow with their number, descriptors only by the
// streams, and both go back.
void holds_256_comms(int version) {
  constexpr int kFew = 8;
  constexpr int kMany = check::rounds(256);
  constexpr int kStreams = 4;
  const Session session(version);
  const Net& net = session.net();
  const int threads_idle = threads();
  const int fds_idle = open_fds();
  std::vector<Connection> connections;
  int threads_with_few = 0;
  for (int index = 0; index < kMany; ++index) {
    connections.push_back(connect_both_ends(net, session.ctx()));
    exchange(net, connections.back(), 1000, 1000, 0, 0, static_cast<std::uint64_t>(index));
    if (index + 1 == kFew) {
      exchange(net, connections.back(), 1000000, 1000000, 0, 0, 1);
      threads_with_few = threads();
    }
  }
  for (std::size_t index = 0; index < connections.size(); ++index) {
    exchange(net, connections[index], 200001, 200001, 1, 1, index);
  }
  CHECK_EQ(threads(), threads_with_few);
  CHECK(threads_with_few - threads_idle <= 2 + 1);  // the workers, and one that shakes hands
  // Both ends of each are here.
  CHECK(open_fds() - fds_idle <= 2 * kMany * (kStreams + 1) + 16);
  for (Connection& connection : connections) close_both_ends(net, &connection);
  CHECK_EQ(open_fds(), fds_idle);
  wait_for_threads(threads_idle);
}

// A communicator is aborted and built anew, and a thread of NCCL's still holds what belonged to the old one.
void refuses_what_went_with_its_transport(int version) {
  const PluginLibrary library;
  const Net net(library, version, &CapturedLog::log);
  void* ctx = nullptr;
  CHECK_SUCCESS(net.init(&ctx));
  const Connection old = connect_both_ends(net, ctx);
  Handle handle{};
  void* listen = nullptr;
  CHECK_SUCCESS(net.listen(ctx, 0, handle.data(), &listen));
  Buffer buffer(100);
  void* const mhandle = register_buffer(net, old.recv, &buffer);
  void* const pending = Poster(net, old.recv).try_irecv(buffer.data(), 100, mhandle);
  CHECK(pending != nullptr);
  CHECK_SUCCESS(net.finalize(ctx));
  CHECK_SUCCESS(net.init(&ctx));
  Connection fresh = connect_both_ends(net, ctx);  // where the old one was in memory, perhaps
  int done = 1;
  CHECK_RESULT(net.test(pending, &done, nullptr), Result::kInternalError);
  CHECK_EQ(done, 0);
  void* request = slot_content(2);
  CHECK_RESULT(net.isend(old.send, buffer.data(), 100, 0, nullptr, &request), Result::kInternalError);
  CHECK(request == nullptr);
  void* accepted = slot_content(2);
  CHECK_RESULT(net.accept(listen, &accepted), Result::kInternalError);
  CHECK(net.dereg_mr(old.recv, mhandle) != Result::kSuccess);
  CHECK_SUCCESS(net.close_recv(old.recv));
  CHECK_SUCCESS(net.close_listen(listen));
  exchange(net, fresh, 300000, 300000, 1, 2, 3);
  close_both_ends(net, &fresh);
  CHECK_SUCCESS(net.finalize(ctx));
}

void survives_dlclose(int version, bool leave_connected) {
  for (int round = 0; round < 3; ++round) {
    const Session session(version);  // opens the library, and closes it
    transfer_once(session.net(), session.ctx(), 1);
    // NCCL up to 2.27 has no way to say that it will close the library: threads may still be at work.
    if (leave_connected) connect_both_ends(session.net(), session.ctx());
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
}

// Reachable until the end, as NCCL's own structures are; volatile, so that it is really stored.
const Session* volatile session_until_exit = nullptr;

// A process that just ends, in the middle of it all.
void survives_exit(int version) {
  auto* const session = new Session(version);
  const Net& net = session->net();
  Connection connection = connect_both_ends(net, session->ctx());
  exchange(net, connection, 300000, 300000, 0, 0, 1);
  // Never freed: a worker may read it until the very end.
  static auto* const buffer = new Buffer(8 << 20);
  CHECK(Poster(net, connection.send).try_isend(buffer->data(), buffer->bytes(), nullptr) != nullptr);
  session_until_exit = session;
}

// Takes blocks until the next one would begin 16 bytes into a page, where the allocator gives them one after the other.
std::vector<std::unique_ptr<char[]>> fill_up_to_a_page(std::size_t bytes) {
  constexpr std::size_t kMax = 2000;
  std::vector<std::unique_ptr<char[]>> blocks;
  blocks.reserve(kMax);
  std::uintptr_t before = 0;
  std::uintptr_t last = 0;
  do {
    before = last;
    blocks.push_back(std::make_unique<char[]>(bytes));
    last = reinterpret_cast<std::uintptr_t>(blocks.back().get());
  } while ((last + (last - before)) % 4096 != 16 && blocks.size() < kMax);
  return blocks;
}

// The plugin's thread-locals lie where leak checks of older compilers take what stands before them for their place.
void survives_exit_with_thread_locals_at_a_page() {
  const Session session(kNewestVersion);
  const Net& net = session.net();
  Connection connection = connect_both_ends(net, session.ctx());
  Buffer buffer(1 << 20);
  const auto blocks = fill_up_to_a_page(sizeof(bagua_net::ThreadLoad));
  CHECK(Poster(net, connection.send).try_isend(buffer.data(), buffer.bytes(), nullptr) != nullptr);
  close_both_ends(net, &connection);
}

// Several copies of the calls at once: NCCL runs a service thread per rank and communicator.
void serves_threads_at_once(int version) {
  const Session session(version);
  const Net& net = session.net();
  std::mutex mutex;
  std::string failure;
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&, caller] {
      try {
        void* ctx = nullptr;
        CHECK_SUCCESS(net.init(&ctx));
        for (int round = 0; round < 5; ++round)
          transfer_once(net, ctx, static_cast<std::uint64_t>(caller * 10 + round));
        Properties props{};
        CHECK_SUCCESS(net.properties(0, &props));
        CHECK_SUCCESS(net.finalize(ctx));
      } catch (const std::exception& error) {
        const std::lock_guard<std::mutex> lock(mutex);
        failure = error.what();
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK_EQ(failure, "");
}

// OpenMP pins the main thread to a core when it binds threads; NCCL's threads have the CPUs near one GPU.
void workers_run_on_the_cpus_of_all_threads() {
  cpu_set_t all;
  CHECK_EQ(::sched_getaffinity(0, sizeof all, &all), 0);
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(::sched_getcpu(), &one);
  CHECK_EQ(::sched_setaffinity(0, sizeof one, &one), 0);
  std::string failure;
  int workers = 0;
  std::thread([&] {
    try {
      CHECK_EQ(::sched_setaffinity(0, sizeof all, &all), 0);
      const Session session(kNewestVersion);
      Connection connection = connect_both_ends(session.net(), session.ctx());
      for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
        std::string name;
        std::getline(std::ifstream(task.path() / "comm"), name);
        if (name.rfind("bagua-net-io", 0) != 0) continue;
        ++workers;
        cpu_set_t mask;
        CHECK_EQ(::sched_getaffinity(std::stoi(task.path().filename()), sizeof mask, &mask), 0);
        CHECK(CPU_EQUAL(&mask, &all));
      }
      close_both_ends(session.net(), &connection);
    } catch (const std::exception& error) {
      failure = error.what();
    }
  }).join();
  CHECK_EQ(failure, "");
  CHECK_EQ(workers, 2);
}

bool register_process_cases() {
  for (int version = kOldestVersion; version <= kNewestVersion; ++version) {
    register_process_case("finalizes_and_starts_again_v" + std::to_string(version), "2",
                          [=] { finalizes_and_starts_again(version); });
    if (version < 11) continue;
    register_process_case("refuses_what_went_with_its_transport_v" + std::to_string(version), "2",
                          [=] { refuses_what_went_with_its_transport(version); });
  }
  register_process_case("exit_with_thread_locals_at_a_page", "2", &survives_exit_with_thread_locals_at_a_page);
  register_process_case("run_on_the_cpus_of_all_threads", "2", &workers_run_on_the_cpus_of_all_threads);
  for (const int version : {8, kNewestVersion}) {
    const std::string suffix = "_v" + std::to_string(version);
    for (const char* workers : {"0", "2"}) {
      if (version == kNewestVersion) {
        register_process_case("holds_256_comms" + suffix, workers, [=] { holds_256_comms(version); });
      }
      register_process_case("dlclose" + suffix, workers, [=] { survives_dlclose(version, false); });
      register_process_case("dlclose_while_connected" + suffix, workers, [=] { survives_dlclose(version, true); });
      register_process_case("exit_mid_transfer" + suffix, workers, [=] { survives_exit(version); });
      register_process_case("threads_at_once" + suffix, workers, [=] { serves_threads_at_once(version); });
    }
  }
  return true;
}

const bool process_cases_registered = register_process_cases();

}  // namespace
}  // namespace abi_test

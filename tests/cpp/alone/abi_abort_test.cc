// A process that aborts communicators again and again and goes on with new ones, as fault-tolerant trainers do: in each
// state that a connection can be in. Nothing stays behind, and no abort waits for the peer: what it would wait for is
// longer than the case's deadline.
// Long run, the number of aborts: BAGUA_TEST_ROUNDS=240 abi_abort_test
#include <malloc.h>

#include <array>
#include <fstream>

#include "abi/abi_connection.h"
#include "support/cut_connections.h"
#include "support/test_clock.h"

namespace abi_test {
namespace {

constexpr std::size_t kMiB = 1024 * 1024;

int round_count() {
  const char* const asked = std::getenv("BAGUA_TEST_ROUNDS");
  return asked != nullptr ? static_cast<int>(std::strtol(asked, nullptr, 10)) : 24;
}

// Of every connect: no healthy one has to be faster, however busy the machine is.
constexpr std::int64_t kPatienceMs = 600000;

long resident_kib() {
  std::string word;
  long pages = 0;
  std::ifstream statm("/proc/self/statm");
  statm >> word >> pages;
  return pages * (::sysconf(_SC_PAGESIZE) / 1024);
}

// Of this process alone: other processes of the machine use /dev/shm meanwhile.
int shared_mappings() {
  int count = 0;
  std::ifstream maps("/proc/self/maps");
  for (std::string range, permissions, rest; maps >> range >> permissions && std::getline(maps, rest);) {
    if (permissions.back() == 's') ++count;
  }
  return count;
}

// One round: a communicator that ends in some state, without a word to its other end.
struct Round {
  const Net& net;
  void* ctx;
  std::array<Buffer, 4>& from;
  std::array<Buffer, 4>& to;
  std::vector<void*> requests;

  void send(const Connection& connection) {
    Poster sender(net, connection.send);
    for (Buffer& buffer : from) requests.push_back(sender.try_isend(buffer.data(), buffer.bytes(), nullptr));
  }
  void receive(const Connection& connection) {
    Poster receiver(net, connection.recv);
    for (Buffer& buffer : to) requests.push_back(receiver.try_irecv(buffer.data(), buffer.bytes(), nullptr));
  }
  // Some of it moves.
  void look() {
    for (int turn = 0; turn < 3; ++turn) {
      int done = 0;
      for (void*& request : requests) {
        if (request == nullptr) continue;
        // Whatever it is: an error is one of the states.
        if (net.test(request, &done, nullptr) != Result::kSuccess || done != 0) request = nullptr;
      }
    }
  }
  void abort(const Connection& connection, bool sender_first) {
    if (sender_first) CHECK_SUCCESS(net.close_send(connection.send));
    CHECK_SUCCESS(net.close_recv(connection.recv));
    if (!sender_first) CHECK_SUCCESS(net.close_send(connection.send));
  }
};

// The process has one that its communicators share.
std::vector<int> listeners() { return bagua_net::sockets_in_state(bagua_net::TcpState::kListen); }
void silence_listeners() {
  for (const int fd : listeners()) bagua_net::silence(fd);
}

enum class State {
  kConnecting,          // nobody accepts
  kConnectingToNobody,  // and nobody answers
  kIdle,
  kSending,  // streams are parked: no receive is posted
  kReceiving,
  kTransferring,
  kRecovering,            // all connections were lost just now
  kRecoveringFromNobody,  // and there is nobody to connect to
  kCount,
};

void run(Round& round, State state, bool sender_first) {
  const Net& net = round.net;
  if (state == State::kConnecting || state == State::kConnectingToNobody) {
    Handle handle{};
    void* listen = nullptr;
    void* send = nullptr;
    CHECK_SUCCESS(net.listen(round.ctx, 0, handle.data(), &listen));
    if (state == State::kConnectingToNobody) silence_listeners();
    CHECK_SUCCESS(net.connect(round.ctx, 0, handle.data(), &send));
    if (send != nullptr) CHECK_SUCCESS(net.close_send(send));
    CHECK_SUCCESS(net.close_listen(listen));
    return;
  }
  const Connection connection = connect_both_ends(net, round.ctx);
  exchange(net, connection, 1000, 1000, 0, 0, 1);
  if (state == State::kReceiving || state == State::kTransferring) round.receive(connection);
  if (state != State::kIdle && state != State::kReceiving) round.send(connection);
  round.look();
  if (state == State::kRecoveringFromNobody) silence_listeners();
  if (state == State::kRecovering || state == State::kRecoveringFromNobody) bagua_net::cut_all(bagua_net::Cut::kReset);
  if (sender_first) round.look();
  round.abort(connection, sender_first);
}

void connect_and_close(const Net& net) {
  void* ctx = nullptr;
  CHECK_SUCCESS(net.init(&ctx));
  Connection connection = connect_both_ends(net, ctx);
  close_both_ends(net, &connection);
  CHECK_SUCCESS(net.finalize(ctx));
}

void aborts_leave_nothing(int version) {
  const PluginLibrary library;
  const Net net(library, version, &CapturedLog::log);
  const int threads_before = threads();
  std::array<Buffer, 4> from{Buffer(3 * kMiB), Buffer(100), Buffer(70000), Buffer(3 * kMiB)};
  std::array<Buffer, 4> to{Buffer(3 * kMiB), Buffer(100), Buffer(70000), Buffer(3 * kMiB)};
  struct Left {
    int fds = 0;
    int threads = 0;
    int shared_mappings = 0;
    long resident_kib = 0;
    std::size_t allocated_bytes = 0;
  };
  Left after_warm_up;
  constexpr int kStates = static_cast<int>(State::kCount);
  const int rounds = round_count();
  const int warm_up = std::clamp(rounds / 3, kStates, 100);
  for (int number = 0; number < rounds; ++number) {
    void* ctx = nullptr;
    CHECK_SUCCESS(net.init(&ctx));
    Round round{net, ctx, from, to, {}};
    run(round, static_cast<State>(number % kStates), number / kStates % 2 == 0);
    for (const int fd : listeners()) bagua_net::hear_again(fd);
    // A communicator of the same process that goes on, and the next one.
    Connection next = connect_both_ends(net, ctx);
    exchange(net, next, 300000, 300000, 0, 0, static_cast<std::uint64_t>(number));
    close_both_ends(net, &next);
    CHECK_SUCCESS(net.finalize(ctx));
    CapturedLog::get().clear();
    if (number + 1 != warm_up && number + 1 != rounds) continue;
    // Before v11, a connect that nobody fetches is forgotten a while after its deadline, and its threads end. The next
    // communicator joins them and closes their descriptors. It is kept as long as it was tried.
    test_clock::skip_ms(2 * kPatienceMs);
    wait_for_threads(threads_before);
    connect_and_close(net);
    wait_for_threads(threads_before);
    const Left left{open_fds(), threads(), shared_mappings(), resident_kib(), mallinfo2().uordblks};
    if (number + 1 == warm_up) {
      after_warm_up = left;
      continue;
    }
    std::printf(
        "        %d aborts; descriptors %d, then %d; resident KiB %ld, then %ld; "
        "allocated KiB %zu, then %zu\n",
        rounds, after_warm_up.fds, left.fds, after_warm_up.resident_kib, left.resident_kib,
        after_warm_up.allocated_bytes / 1024, left.allocated_bytes / 1024);
    CHECK_EQ(left.fds, after_warm_up.fds);
    CHECK_EQ(left.threads, after_warm_up.threads);
    CHECK_EQ(left.shared_mappings, after_warm_up.shared_mappings);
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
    CHECK(left.resident_kib - after_warm_up.resident_kib < 8 * 1024);
    // Up to 8 KiB more after 4,000 rounds: what is allocated once, and late.
    const std::size_t most = 16 * 1024 + 64 * static_cast<std::size_t>(rounds - warm_up);
    CHECK(left.allocated_bytes < after_warm_up.allocated_bytes + most);
#endif
  }
}

bool register_all() {
  const bool is_long = std::getenv("BAGUA_TEST_ROUNDS") != nullptr;
  // Waits for real time: an aborted connect ends by its deadline. The healthy connects of the case have the same one:
  // they fail on a machine on which three threads together get no turn within it.
  for (int version = kOldestVersion; version <= kNewestVersion; ++version) {
    if (!is_long && version != kOldestVersion && version != kNewestVersion) continue;
    for (const char* workers : {"0", "2"}) {
      for (const char* recovery : {"0", "1"}) {
        const Environment environment = {{"BAGUA_NET_NWORKERS", workers},
                                         {"BAGUA_NET_NSTREAMS", "4"},
                                         {"BAGUA_NET_RECOVERY", recovery},
                                         {"BAGUA_NET_KEEPALIVE_S", is_long ? "3600" : "600"},
                                         {"BAGUA_NET_CONNECT_TIMEOUT_MS", std::to_string(kPatienceMs)}};
        const std::string name =
            "aborts_leave_nothing_v" + std::to_string(version) + "_workers" + workers + "_recovery" + recovery;
        register_case(name, [=] {
          in_own_process(environment, [=] { aborts_leave_nothing(version); }, is_long ? 3600 : 90 * kSlowdown);
        });
      }
    }
  }
  return true;
}

const bool registered = register_all();

}  // namespace
}  // namespace abi_test

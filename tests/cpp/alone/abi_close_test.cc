// Closing, in every state that a connection can be in when NCCL tears it down or aborts, again and again, as
// fault-tolerant trainers do: nothing may wait for the peer, touch memory that was given back, or stay behind, and a
// communicator that is made afterwards works. A call that waits for the peer would take until one of the deadlines,
// which are longer than the case's own. Long run, how often each state is closed: BAGUA_TEST_ROUNDS=30 abi_close_test
#include <malloc.h>
#include <sys/mman.h>

#include <fstream>

#include "abi/abi_connection.h"
#include "support/cut_connections.h"
#include "support/test_clock.h"

namespace abi_test {
namespace {

constexpr std::size_t kMiB = 1024 * 1024;
// Of every connect: no healthy one has to be faster, however busy the machine is.
constexpr int kPatienceMs = 60000;

void close_null(const Session& session, bool /*send_first*/) {
  const Net& net = session.net();
  CHECK_SUCCESS(net.close_listen(nullptr));
  CHECK_SUCCESS(net.close_send(nullptr));
  CHECK_SUCCESS(net.close_recv(nullptr));
}

void close_listening(const Session& session, bool /*send_first*/) {
  const Net& net = session.net();
  Handle handle{};
  void* listen = nullptr;
  CHECK_SUCCESS(net.listen(session.ctx(), 0, handle.data(), &listen));
  void* recv = nullptr;
  CHECK_SUCCESS(net.accept(listen, &recv));
  CHECK(recv == nullptr);
  CHECK_SUCCESS(net.close_listen(listen));
}

// NCCL never closes these after an abort; the plugin reaps them at finalize, or when the process ends.
void listen_and_never_connect(const Session& session, bool /*send_first*/) {
  Handle handle{};
  void* listen = nullptr;
  CHECK_SUCCESS(session.net().listen(session.ctx(), 0, handle.data(), &listen));
  if (!session.net().has_finalize()) CHECK_SUCCESS(session.net().close_listen(listen));
}

// Half-open: the connecting end has begun, the accepting end goes away. An error at the deadline, not a hang. A connect
// is tried again until then, so the clock is set forward, and no healthy connect has a short deadline.
void connect_to_closed_listener(const Session& session, bool begin_first) {
  const Net& net = session.net();
  Handle handle{};
  void* listen = nullptr;
  void* send = nullptr;
  CHECK_SUCCESS(net.listen(session.ctx(), 0, handle.data(), &listen));
  if (begin_first) CHECK_SUCCESS(net.connect(session.ctx(), 0, handle.data(), &send));
  CHECK_SUCCESS(net.close_listen(listen));
  Result result = Result::kSuccess;
  if (send == nullptr) result = net.connect(session.ctx(), 0, handle.data(), &send);
  CHECK_RESULT(result, Result::kSuccess);
  test_clock::pass_ms(kPatienceMs);
  wait_until("the refusal", [&] {
    if (send == nullptr) result = net.connect(session.ctx(), 0, handle.data(), &send);
    return result != Result::kSuccess || send != nullptr;
  });
  if (send == nullptr) {
    CHECK_RESULT(result, Result::kRemoteError);
    CHECK_WARNED("connect: ");
    return;
  }
  // The handshake was over before the listener went: then using the connection has to fail.
  CHECK(begin_first);
  std::uint8_t byte = 0;
  wait_until("an error on the connection", [&] {
    void* request = nullptr;
    if (net.isend(send, &byte, 1, 0, nullptr, &request) != Result::kSuccess) return true;
    int done = 0;
    return request != nullptr && net.test(request, &done, nullptr) != Result::kSuccess;
  });
  CHECK_SUCCESS(net.close_send(send));
}

// The process has one that its communicators share.
std::vector<int> listeners() { return bagua_net::sockets_in_state(bagua_net::TcpState::kListen); }
void silence_listeners() {
  for (const int fd : listeners()) bagua_net::silence(fd);
}

// A connect that is begun and then forgotten, with a listener that never accepts, and one that does not answer. NCCL
// has no call for a connect that it gives up, and tables up to v10 none for the end of everything either.
void abandon_while_connecting(const Session& session, bool is_answered) {
  const Net& net = session.net();
  Handle handle{};
  void* listen = nullptr;
  CHECK_SUCCESS(net.listen(session.ctx(), 0, handle.data(), &listen));
  if (!is_answered) silence_listeners();
  void* send = nullptr;
  CHECK_SUCCESS(net.connect(session.ctx(), 0, handle.data(), &send));
  if (send != nullptr) CHECK_SUCCESS(net.close_send(send));
  CHECK_SUCCESS(net.close_listen(listen));
}

void close_both(const Net& net, const Connection& connection, bool send_first) {
  if (send_first) CHECK_SUCCESS(net.close_send(connection.send));
  CHECK_SUCCESS(net.close_recv(connection.recv));
  if (!send_first) CHECK_SUCCESS(net.close_send(connection.send));
}

void close_connected_idle(const Session& session, bool send_first) {
  const Connection connection = connect_both_ends(session.net(), session.ctx());
  exchange(session.net(), connection, 100, 100, 0, 0, 1);
  close_both(session.net(), connection, send_first);
}

// Memory that can be taken away: a thread that still touched it would crash.
class MappedBuffer {
 public:
  explicit MappedBuffer(std::size_t bytes)
      : bytes_(bytes), data_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    CHECK(data_ != MAP_FAILED);
  }
  MappedBuffer(const MappedBuffer&) = delete;
  MappedBuffer& operator=(const MappedBuffer&) = delete;
  ~MappedBuffer() { unmap(); }
  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  void unmap() {
    if (data_ != nullptr) munmap(data_, bytes_);
    data_ = nullptr;
  }

 private:
  const std::size_t bytes_;
  void* data_;
};

// Large messages under way in both directions of view: sends that nobody reads, receives that nobody feeds.
struct Traffic {
  Connection connection;
  std::vector<std::unique_ptr<MappedBuffer>> from;
  std::vector<std::unique_ptr<MappedBuffer>> to;
  std::vector<void*> from_handles;
  std::vector<void*> to_handles;
  std::vector<void*> sending;
  std::vector<void*> receiving;
};

Traffic start_traffic(const Session& session, int sends, int receives) {
  const Net& net = session.net();
  Traffic traffic;
  traffic.connection = connect_both_ends(net, session.ctx());
  const auto map = [&](std::vector<std::unique_ptr<MappedBuffer>>* buffers, void* comm, std::vector<void*>* handles) {
    buffers->push_back(std::make_unique<MappedBuffer>(8 * kMiB));
    void* mhandle = nullptr;
    CHECK_SUCCESS(net.reg_mr(comm, buffers->back()->data(), static_cast<std::int64_t>(buffers->back()->bytes()),
                             bagua_net::nccl::kPointerHost, &mhandle));
    handles->push_back(mhandle);
  };
  Poster receiver(net, traffic.connection.recv);
  for (int index = 0; index < receives; ++index) {
    map(&traffic.to, traffic.connection.recv, &traffic.to_handles);
    traffic.receiving.push_back(
        receiver.try_irecv(traffic.to.back()->data(), traffic.to.back()->bytes(), traffic.to_handles.back()));
    CHECK(traffic.receiving.back() != nullptr);
  }
  Poster sender(net, traffic.connection.send);
  for (int index = 0; index < sends; ++index) {
    map(&traffic.from, traffic.connection.send, &traffic.from_handles);
    traffic.sending.push_back(
        sender.try_isend(traffic.from.back()->data(), traffic.from.back()->bytes(), traffic.from_handles.back()));
    CHECK(traffic.sending.back() != nullptr);
  }
  // Some of it moves, none of it is required to be done.
  for (int turn = 0; turn < 3; ++turn) {
    int done = 0;
    if (!traffic.sending.empty()) CHECK_SUCCESS(net.test(traffic.sending[0], &done, nullptr));
    if (done == 1) traffic.sending.erase(traffic.sending.begin());
    done = 0;
    if (!traffic.receiving.empty()) CHECK_SUCCESS(net.test(traffic.receiving[0], &done, nullptr));
    if (done == 1) traffic.receiving.erase(traffic.receiving.begin());
  }
  return traffic;
}

// The order of NCCL's teardown after an abort: deregister, free the memory, close.
void tear_down(const Session& session, Traffic* traffic, bool send_side_first) {
  const Net& net = session.net();
  const auto send_side = [&] {
    for (void* mhandle : traffic->from_handles) CHECK_SUCCESS(net.dereg_mr(traffic->connection.send, mhandle));
    for (const auto& buffer : traffic->from) buffer->unmap();
    CHECK_SUCCESS(net.close_send(traffic->connection.send));
  };
  const auto recv_side = [&] {
    for (void* mhandle : traffic->to_handles) CHECK_SUCCESS(net.dereg_mr(traffic->connection.recv, mhandle));
    for (const auto& buffer : traffic->to) buffer->unmap();
    CHECK_SUCCESS(net.close_recv(traffic->connection.recv));
  };
  if (send_side_first) send_side();
  recv_side();
  if (!send_side_first) send_side();
}

void deregister_and_close_mid_transfer(const Session& session, bool send_first) {
  const std::pair<int, int> shapes[] = {{4, 4}, {8, 0}, {0, 8}, {8, 2}};  // sends and receives
  for (std::size_t shape = send_first ? 0 : 1; shape < std::size(shapes); shape += 2) {
    Traffic traffic = start_traffic(session, shapes[shape].first, shapes[shape].second);
    tear_down(session, &traffic, send_first);
  }
}

// Without deregistering: the memory stays, the comms go.
void close_mid_transfer(const Session& session, bool send_first) {
  const Traffic traffic = start_traffic(session, 8, 4);
  close_both(session.net(), traffic.connection, send_first);
}

// All connections were lost just now; and perhaps there is nobody to connect to.
void close_recovering(const Session& session, bool send_first, bool is_answered) {
  const Traffic traffic = start_traffic(session, 4, 0);
  if (!is_answered) silence_listeners();
  bagua_net::cut_all(bagua_net::Cut::kReset);
  int done = 0;
  // Whatever it is: an error is one of the states.
  if (send_first && !traffic.sending.empty()) session.net().test(traffic.sending[0], &done, nullptr);
  close_both(session.net(), traffic.connection, send_first);
}
void close_while_recovering(const Session& session, bool send_first) { close_recovering(session, send_first, true); }
void close_recovering_from_nobody(const Session& session, bool send_first) {
  close_recovering(session, send_first, false);
}

void wait_for_error(const Net& net, void* request) {
  wait_until("the peer's end to be noticed", [&] {
    int done = 0;
    const Result result = net.test(request, &done, nullptr);
    if (result == Result::kSuccess) {
      CHECK_EQ(done, 0);
      return false;
    }
    CHECK_RESULT(result, Result::kRemoteError);
    return true;
  });
}

// The surviving end is told, in a bounded time and with the peer's name; its own teardown then works as ever.
void peer_closes_first(const Session& session, bool send_first) {
  const Net& net = session.net();
  Traffic traffic = send_first ? start_traffic(session, 0, 4) : start_traffic(session, 8, 0);
  CHECK(send_first || !traffic.sending.empty());
  void*& closing = send_first ? traffic.connection.send : traffic.connection.recv;
  CHECK_SUCCESS(send_first ? net.close_send(closing) : net.close_recv(closing));
  wait_for_error(net, send_first ? traffic.receiving[0] : traffic.sending.back());
  CHECK_WARNED("127.0.0.1");
  closing = nullptr;
  tear_down(session, &traffic, !send_first);
}

// A send that is done may still be in the kernel when its comm is closed: it has to arrive all the same.
void close_delivers_what_was_sent(const Session& session, bool /*send_first*/) {
  const Net& net = session.net();
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{10}, std::size_t{50000}}) {
    Connection connection = connect_both_ends(net, session.ctx());
    Buffer from(bytes);
    Buffer to(bytes);
    from.fill(bytes);
    void* const from_handle = register_buffer(net, connection.send, &from);
    void* const sending = Poster(net, connection.send).try_isend(from.data(), bytes, from_handle);
    CHECK(sending != nullptr);
    wait_until("the send", [&] { return is_done(net, sending, nullptr); });
    CHECK_SUCCESS(net.dereg_mr(connection.send, from_handle));
    CHECK_SUCCESS(net.close_send(connection.send));
    void* const to_handle = register_buffer(net, connection.recv, &to);
    void* const receiving = Poster(net, connection.recv).try_irecv(to.data(), bytes, to_handle);
    CHECK(receiving != nullptr);
    int received = -1;
    wait_until("the receive", [&] { return is_done(net, receiving, &received); });
    CHECK_EQ(received, static_cast<int>(bytes));
    to.check(bytes, bytes);
    CHECK_SUCCESS(net.dereg_mr(connection.recv, to_handle));
    CHECK_SUCCESS(net.close_recv(connection.recv));
  }
}

// The connection is one of many: its end must not touch the others.
void others_live_on(const Session& session, bool send_first) {
  const Net& net = session.net();
  Connection survivor = connect_both_ends(net, session.ctx());
  exchange(net, survivor, 1000, 1000, 0, 0, 1);
  Traffic traffic = start_traffic(session, 4, 4);
  tear_down(session, &traffic, send_first);
  exchange(net, survivor, kMiB + 1, kMiB + 1, 1, 1, 2);
  close_both_ends(net, &survivor);
}

struct State {
  const char* name;
  void (*run)(const Session&, bool send_first);
};
constexpr State kStates[] = {
    {"null", &close_null},
    {"listening", &close_listening},
    {"listening, never closed", &listen_and_never_connect},
    {"connecting", &abandon_while_connecting},
    {"connecting to a closed listener", &connect_to_closed_listener},
    {"idle", &close_connected_idle},
    {"in mid-transfer, deregistered", &deregister_and_close_mid_transfer},
    {"in mid-transfer", &close_mid_transfer},
    {"closed by the peer", &peer_closes_first},
    {"with a message in the kernel", &close_delivers_what_was_sent},
    {"one of several", &others_live_on},
    {"recovering", &close_while_recovering},
    {"recovering from nobody", &close_recovering_from_nobody},
};
constexpr int kStateCount = static_cast<int>(std::size(kStates));

// What a process has.
struct Left {
  int fds = open_fds();
  int threads = abi_test::threads();
  int shared_mappings = 0;  // of this process alone: others of the machine use /dev/shm meanwhile
  long resident_kib = 0;
  std::size_t allocated_bytes = mallinfo2().uordblks;

  Left() {
    std::ifstream maps("/proc/self/maps");
    for (std::string range, permissions, rest; maps >> range >> permissions && std::getline(maps, rest);) {
      if (permissions.back() == 's') ++shared_mappings;
    }
    std::string total;
    std::ifstream("/proc/self/statm") >> total >> resident_kib;
    resident_kib *= ::sysconf(_SC_PAGESIZE) / 1024;
  }
};

int times_each() {
  const char* const asked = std::getenv("BAGUA_TEST_ROUNDS");
  if (asked != nullptr) return static_cast<int>(std::strtol(asked, nullptr, 10));
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  return 2;  // each in both orders
#else
  return 3;
#endif
}

void closing_leaves_nothing(int version) {
  const PluginLibrary stays_open;
  const int threads_before = threads();
  std::unique_ptr<Left> after_warm_up;
  const int rounds = times_each() * kStateCount;
  const int warm_up = std::clamp(rounds / 3, kStateCount, 100);
  for (int number = 0; number < rounds; ++number) {
    const State& state = kStates[number % kStateCount];
    try {
      const Session session(version);
      state.run(session, number / kStateCount % 2 == 0);
      for (const int fd : listeners()) bagua_net::hear_again(fd);
      // A communicator of the same process that goes on, and the next one.
      transfer_once(session.net(), session.ctx(), static_cast<std::uint64_t>(number));
    } catch (const std::exception& error) {
      throw std::runtime_error(std::string(state.name) + ": " + error.what());
    }
    CapturedLog::get().clear();
    if (number + 1 != warm_up && number + 1 != rounds) continue;
    // Before v11, a connect that nobody fetches is forgotten a while after its deadline, and its threads end: the next
    // communicator wakes them, and the one after it joins them and closes their descriptors. It is kept as long as it
    // was tried.
    test_clock::pass_ms(2 * kPatienceMs);
    for (int next = 0; next < 2; ++next) {
      {
        const Session session(version);
        transfer_once(session.net(), session.ctx(), 1);
      }
      wait_for_threads(threads_before);
    }
    const Left left;
    if (after_warm_up == nullptr) {
      after_warm_up = std::make_unique<Left>(left);
      continue;
    }
    const Left& before = *after_warm_up;
    std::printf("        %d times; descriptors %d, then %d; resident KiB %ld, then %ld; allocated KiB %zu, then %zu\n",
                rounds, before.fds, left.fds, before.resident_kib, left.resident_kib, before.allocated_bytes / 1024,
                left.allocated_bytes / 1024);
    CHECK_EQ(left.fds, before.fds);
    CHECK_EQ(left.threads, before.threads);
    CHECK_EQ(left.shared_mappings, before.shared_mappings);
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
    CHECK(left.resident_kib - before.resident_kib < 8 * 1024);
    // Up to 8 KiB more after 4,000 rounds: what is allocated once, and late.
    CHECK(left.allocated_bytes < before.allocated_bytes + 16 * 1024 + 64 * static_cast<std::size_t>(rounds - warm_up));
#endif
  }
}

bool register_all() {
  const bool is_long = std::getenv("BAGUA_TEST_ROUNDS") != nullptr;
  // Of the tables those at the two ends; what is between them differs in arguments only, as the scenario shows.
  for (int version = kOldestVersion; version <= kNewestVersion; ++version) {
    if (!is_long && version != kOldestVersion && version != kNewestVersion) continue;
    for (const char* workers : {"0", "2"}) {
      for (const char* recovery : {"0", "1"}) {
        // Of the eight every second, in which each value meets each of the others.
        const bool is_both_or_none = (*workers == '0') == (*recovery == '0');
        if (!is_long && is_both_or_none != (version == kNewestVersion)) continue;
        const Environment environment = {{"BAGUA_NET_NWORKERS", workers},
                                         {"BAGUA_NET_NSTREAMS", "4"},
                                         {"BAGUA_NET_RECOVERY", recovery},
                                         {"BAGUA_NET_KEEPALIVE_S", is_long ? "3600" : "600"},
                                         {"BAGUA_NET_CONNECT_TIMEOUT_MS", std::to_string(kPatienceMs)}};
        register_case(
            "closing_leaves_nothing_v" + std::to_string(version) + "_workers" + workers + "_recovery" + recovery, [=] {
              in_own_process(environment, [=] { closing_leaves_nothing(version); }, is_long ? 3600 : 90 * kSlowdown);
            });
      }
    }
  }
  return true;
}

const bool registered = register_all();

}  // namespace
}  // namespace abi_test

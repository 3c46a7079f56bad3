// Closing, in every state that a connection can be in when NCCL tears it down or aborts: nothing may wait for the
// peer, touch memory that was given back, or stay behind. A call that waits for the peer would take until one of the
// deadlines, which are longer than the case's own.
#include <sys/mman.h>

#include "abi/abi_connection.h"
#include "support/test_clock.h"

namespace abi_test {
namespace {

constexpr std::size_t kMiB = 1024 * 1024;

void close_null(const Session& session) {
  const Net& net = session.net();
  CHECK_SUCCESS(net.close_listen(nullptr));
  CHECK_SUCCESS(net.close_send(nullptr));
  CHECK_SUCCESS(net.close_recv(nullptr));
}

void close_listening(const Session& session) {
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
void listen_and_never_connect(const Session& session) {
  Handle handle{};
  void* listen = nullptr;
  CHECK_SUCCESS(session.net().listen(session.ctx(), 0, handle.data(), &listen));
}

// Of every connect: no case has to be faster, however busy the machine is.
constexpr std::int64_t kPatienceMs = 600000;

// Half-open: the connecting end has begun, the accepting end goes away. An error at the deadline, not a hang. A connect
// is tried again until then, so the clock is set forward, and no healthy connect has a short deadline.
void connect_to_closed_listener(const Session& session) {
  const Net& net = session.net();
  for (const bool begin_first : {false, true}) {
    CapturedLog::get().clear();
    Handle handle{};
    void* listen = nullptr;
    void* send = nullptr;
    CHECK_SUCCESS(net.listen(session.ctx(), 0, handle.data(), &listen));
    if (begin_first) CHECK_SUCCESS(net.connect(session.ctx(), 0, handle.data(), &send));
    CHECK_SUCCESS(net.close_listen(listen));
    Result result = Result::kSuccess;
    if (send == nullptr) result = net.connect(session.ctx(), 0, handle.data(), &send);
    CHECK_RESULT(result, Result::kSuccess);
    test_clock::skip_ms(kPatienceMs);
    wait_until("the refusal", [&] {
      if (send == nullptr) result = net.connect(session.ctx(), 0, handle.data(), &send);
      return result != Result::kSuccess || send != nullptr;
    });
    if (send == nullptr) {
      CHECK_RESULT(result, Result::kRemoteError);
      CHECK_WARNED("connect: ");
      continue;
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
}

// A connect that is begun and then forgotten, with a listener that never accepts.
void abandon_while_connecting(const Session& session) {
  const Net& net = session.net();
  Handle handle{};
  void* listen = nullptr;
  CHECK_SUCCESS(net.listen(session.ctx(), 0, handle.data(), &listen));
  void* send = nullptr;
  CHECK_SUCCESS(net.connect(session.ctx(), 0, handle.data(), &send));
  if (send != nullptr) CHECK_SUCCESS(net.close_send(send));
  CHECK_SUCCESS(net.close_listen(listen));
}

// NCCL has no call for a connect that it gives up, and tables up to v10 none for the end of everything either.
void threads_end_after_an_aborted_connect(int version) {
  const Session session(version);
  const Net& net = session.net();
  const int threads_before = threads();
  const int fds_before = open_fds();
  Connection connection = connect_both_ends(net, session.ctx());
  exchange(net, connection, 300000, 300000, 0, 0, 1);
  Handle handle{};
  void* listen = nullptr;
  CHECK_SUCCESS(net.listen(session.ctx(), 0, handle.data(), &listen));
  CHECK_SUCCESS(net.close_listen(listen));
  void* send = nullptr;
  CHECK_SUCCESS(net.connect(session.ctx(), 0, handle.data(), &send));
  CHECK(send == nullptr);
  close_both_ends(net, &connection);
  // The connect is tried until its deadline, and its result is kept for as long again.
  test_clock::skip_ms(2 * kPatienceMs);
  wait_for_threads(threads_before);
  // Of the epoll and the event descriptor the next connect decides.
  CHECK(open_fds() <= fds_before + 2);
  connection = connect_both_ends(net, session.ctx());
  exchange(net, connection, 300000, 300000, 0, 0, 2);
  close_both_ends(net, &connection);
  wait_for_threads(threads_before);
  CHECK_EQ(open_fds(), fds_before);
}

void close_connected_idle(const Session& session) {
  const Net& net = session.net();
  for (const bool send_first : {false, true}) {
    Connection connection = connect_both_ends(net, session.ctx());
    exchange(net, connection, 100, 100, 0, 0, 1);
    if (send_first) CHECK_SUCCESS(net.close_send(connection.send));
    CHECK_SUCCESS(net.close_recv(connection.recv));
    if (!send_first) CHECK_SUCCESS(net.close_send(connection.send));
  }
}

// Memory that can be taken away: a thread that still touched it would crash.
class MappedBuffer {
 public:
  explicit MappedBuffer(std::size_t bytes)
      : bytes_(bytes), data_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    CHECK(data_ != MAP_FAILED);
    std::memset(data_, 1, bytes);
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

void deregister_and_close_mid_transfer(const Session& session) {
  struct Shape {
    int sends;
    int receives;
  };
  for (const Shape shape : {Shape{4, 4}, Shape{8, 0}, Shape{0, 8}, Shape{8, 2}}) {
    for (const bool send_side_first : {true, false}) {
      Traffic traffic = start_traffic(session, shape.sends, shape.receives);
      tear_down(session, &traffic, send_side_first);
    }
  }
}

// Without deregistering: the memory stays, the comms go.
void close_mid_transfer(const Session& session) {
  const Net& net = session.net();
  for (const bool send_first : {true, false}) {
    Traffic traffic = start_traffic(session, 8, 4);
    if (send_first) CHECK_SUCCESS(net.close_send(traffic.connection.send));
    CHECK_SUCCESS(net.close_recv(traffic.connection.recv));
    if (!send_first) CHECK_SUCCESS(net.close_send(traffic.connection.send));
  }
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
void peer_closes_first(const Session& session) {
  {
    CapturedLog::get().clear();
    Traffic traffic = start_traffic(session, 0, 4);
    CHECK_SUCCESS(session.net().close_send(traffic.connection.send));
    wait_for_error(session.net(), traffic.receiving[0]);
    CHECK_WARNED("127.0.0.1");
    traffic.connection.send = nullptr;
    tear_down(session, &traffic, false);
  }
  {
    CapturedLog::get().clear();
    Traffic traffic = start_traffic(session, 8, 0);
    CHECK(!traffic.sending.empty());
    CHECK_SUCCESS(session.net().close_recv(traffic.connection.recv));
    wait_for_error(session.net(), traffic.sending.back());
    CHECK_WARNED("127.0.0.1");
    traffic.connection.recv = nullptr;
    tear_down(session, &traffic, true);
  }
}

// A send that is done may still be in the kernel when its comm is closed: it has to arrive all the same.
void close_delivers_what_was_sent(const Session& session) {
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
void others_live_on(const Session& session) {
  const Net& net = session.net();
  Connection survivor = connect_both_ends(net, session.ctx());
  exchange(net, survivor, 1000, 1000, 0, 0, 1);
  Traffic traffic = start_traffic(session, 4, 4);
  tear_down(session, &traffic, true);
  exchange(net, survivor, kMiB + 1, kMiB + 1, 1, 1, 2);
  close_both_ends(net, &survivor);
}

struct State {
  const char* name;
  void (*run)(const Session&);
};

bool register_all() {
  static const State kStates[] = {
      {"close_null", &close_null},
      {"close_listening", &close_listening},
      {"listen_and_never_connect", &listen_and_never_connect},
      {"abandon_while_connecting", &abandon_while_connecting},
      {"close_connected_idle", &close_connected_idle},
      {"deregister_and_close_mid_transfer", &deregister_and_close_mid_transfer},
      {"close_mid_transfer", &close_mid_transfer},
      {"peer_closes_first", &peer_closes_first},
      {"close_delivers_what_was_sent", &close_delivers_what_was_sent},
      {"others_live_on", &others_live_on},
  };
  const Environment patient{{"BAGUA_NET_CONNECT_TIMEOUT_MS", std::to_string(kPatienceMs)},
                            {"BAGUA_NET_HANDSHAKE_TIMEOUT_MS", "60000"},
                            {"BAGUA_NET_KEEPALIVE_S", "600"}};
  for (const State& state : kStates) {
    // The two ends of the range of tables; what is between them differs in arguments only, as the scenario shows.
    for (const int version : {kOldestVersion, kNewestVersion}) {
      for (const char* workers : {"0", "2"}) {
        register_case(std::string(state.name) + "_v" + std::to_string(version) + "_workers" + workers, [=] {
          Environment environment = patient;
          environment.insert(environment.end(), {{"BAGUA_NET_NWORKERS", workers}, {"BAGUA_NET_NSTREAMS", "4"}});
          in_own_process(environment, [=] { state.run(Session(version)); });
        });
      }
    }
  }
  const auto connect_to_closed = [=](int version, Environment environment) {
    environment.insert(environment.end(), patient.begin(), patient.end());
    in_own_process(environment, [=] { connect_to_closed_listener(Session(version)); });
  };
  for (int version = kOldestVersion; version <= kNewestVersion; ++version) {
    register_case("connect_to_closed_listener_v" + std::to_string(version), [=] { connect_to_closed(version, {}); });
    if (version != kOldestVersion && version != kNewestVersion) continue;
    for (const char* workers : {"0", "2"}) {
      register_case("connect_to_closed_listener_v" + std::to_string(version) + "_workers" + workers, [=] {
        connect_to_closed(version, {{"BAGUA_NET_NWORKERS", workers}, {"BAGUA_NET_NSTREAMS", "4"}});
      });
    }
  }
  for (const int version : {kOldestVersion, 10}) {
    register_case("threads_end_after_an_aborted_connect_v" + std::to_string(version), [=] {
      Environment environment = patient;
      environment.emplace_back("BAGUA_NET_NWORKERS", "2");
      in_own_process(environment, [=] { threads_end_after_an_aborted_connect(version); });
    });
  }
  for (const int version : {kOldestVersion, kNewestVersion}) {
    register_case("every_state_v" + std::to_string(version), [=] {
      in_own_process(patient, [=] {
        const Session session(version);
        for (const State& state : kStates) state.run(session);
      });
    });
  }
  return true;
}

const bool registered = register_all();

}  // namespace
}  // namespace abi_test

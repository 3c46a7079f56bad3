// NCCL's profiler tables v4 to v7, as NCCL calls them, and what comes of it in the trace file; with the messages of the
// network table in the same file.
#include "abi_connection.h"
#include "abi_profiler_table.h"
#include "support/temporary_tree.h"
#include "support/trace_file.h"

namespace abi_test {
namespace {

std::unique_ptr<ProfilerTable> profiler_table(int version) {
  // Never closed: the library stays in memory in any case.
  static const auto& library = *new PluginLibrary;
  return std::make_unique<ProfilerTable>(library, version, &CapturedLog::log);
}

Environment traced(const TemporaryTree& folder) { return {{"BAGUA_NET_TRACE", folder.root() + "/trace.json"}}; }

// Of the communicator that NCCL makes here; tracks of its events end with it.
const std::string kWhose = ", NCCL default_pg abc, rank 1 of 2";

template <typename Use>
void in_traced_process(const TemporaryTree& folder, Use use) {
  in_own_process(traced(folder), [&] {
    const auto table = profiler_table(kNewestProfiler);
    void* context = nullptr;
    int mask = 0;
    CHECK_SUCCESS(table->init(&context, &mask));
    use(table.get(), context);
  });
}

// What NCCL hands to isend and irecv, and its callback that the network plugin calls with that.
struct StepOfNccl {
  const ProfilerTable* table;
  void* context;
  void* step;
};
Result callback_of_nccl(void** handle, int type, void* parent, std::int64_t id, void* data) {
  CHECK_EQ(type, 0);
  const auto* step = static_cast<const StepOfNccl*>(parent);
  *handle = step->table->start_net_event(step->context, step->step, id, data);
  CHECK(*handle == nullptr);
  return Result::kSuccess;
}

// One all-reduce over one channel: a message each way, both ends of it in this process.
void reduce_once(const ProfilerTable& table, void* context) {
  using nccl::ProfilerState;
  void* const group_call = table.start_call(context, nccl::kProfileGroupApi, nullptr);
  void* const call = table.start_call(context, nccl::kProfileCollApi, "AllReduce");
  CHECK_SUCCESS(table.stop(call));
  void* const launch = table.start_call(context, nccl::kProfileKernelLaunch, nullptr);
  CHECK_SUCCESS(table.stop(launch));
  void* const group = table.start_group(context);
  void* const collective = table.start_collective(context, group, "AllReduce", 41);
  void* const local = table.start_collective(context, group, "Broadcast", 7);
  void* const p2p = table.start_p2p(context, group, "Send", 5);
  for (void* handle : {collective, local, p2p, group, group_call}) CHECK_SUCCESS(table.stop(handle));

  void* const send = table.start_operation(context, collective, true, 3, getpid());
  void* const receive = table.start_operation(context, collective, false, 3, getpid());
  StepOfNccl send_step{&table, context, table.start_step(context, send, 0)};
  StepOfNccl receive_step{&table, context, table.start_step(context, receive, 0)};
  CHECK_SUCCESS(table.state(send_step.step, ProfilerState::kSendGpuWait, 0));
  CHECK_SUCCESS(table.state(send_step.step, ProfilerState::kSendPeerWait, 0));

  const PluginLibrary library;
  const auto* net = static_cast<const nccl::NetTableV11*>(library.table("ncclNetPlugin", 11));
  void* ctx = nullptr;
  nccl::NetCommConfig config{nccl::kUndefined};
  CHECK_SUCCESS(net->init(&ctx, 0xabc, &config, &CapturedLog::log, &callback_of_nccl));
  const Net over_table(library, 11, &CapturedLog::log);
  Connection connection = connect_both_ends(over_table, ctx);
  // Connecting over the table needs no callback; init with one again, as the next communicator does.
  std::array<std::uint8_t, 300> from{};
  std::array<std::uint8_t, 4096> to{};
  void* receiving = nullptr;
  void* data = to.data();
  std::size_t size = to.size();
  int tag = 1;
  void* mhandle = nullptr;
  void* phandle = &receive_step;
  CHECK_SUCCESS(net->irecv(connection.recv, 1, &data, &size, &tag, &mhandle, &phandle, &receiving));
  CHECK_SUCCESS(table.state(receive_step.step, ProfilerState::kRecvWait, 0));
  void* sending = nullptr;
  CHECK_SUCCESS(net->isend(connection.send, from.data(), from.size(), tag, nullptr, &send_step, &sending));
  CHECK_SUCCESS(table.state(send_step.step, ProfilerState::kSendWait, from.size()));
  for (void* request : {sending, receiving}) {
    wait_until("the message", [&] { return is_done(over_table, request, nullptr); });
  }
  CHECK_SUCCESS(table.state(receive_step.step, ProfilerState::kRecvFlushWait, from.size()));
  CHECK_SUCCESS(table.state(receive_step.step, ProfilerState::kRecvGpuWait, 12345));  // that of a later step
  for (void* handle : {send_step.step, receive_step.step, send, receive}) CHECK_SUCCESS(table.stop(handle));
  close_both_ends(over_table, &connection);
  CHECK_SUCCESS(net->finalize(ctx));
}

void check_trace_of_reduction(const trace_file::Trace& trace, int version) {
  CHECK_EQ(trace.paths().size(), std::size_t{1});
  using trace_file::number;
  using trace_file::value;
  // Enqueued, and then on the network for as long as its operations were.
  const auto reductions = trace.named("AllReduce");
  CHECK_EQ(reductions.size(), std::size_t{2});
  CHECK_EQ(value(reductions[0], "ph"), "i");
  CHECK_EQ(trace.track_of(reductions[0]), "calls" + kWhose);
  CHECK_EQ(value(reductions[1], "ph"), "X");
  CHECK_EQ(trace.track_of(reductions[1]), "collectives" + kWhose);
  for (const std::string& reduction : reductions) {
    CHECK_EQ(number(reduction, "seq"), 41);
    CHECK_EQ(number(reduction, "count"), 1000);
    CHECK_EQ(number(reduction, "channels"), 2);
    CHECK_EQ(value(reduction, "datatype"), "ncclFloat32");
    CHECK_EQ(value(reduction, "algorithm") + value(reduction, "protocol"), "RINGSIMPLE");
  }
  // Those without network operations were only enqueued.
  CHECK_EQ(value(trace.only("Broadcast"), "ph"), "i");
  CHECK_EQ(number(trace.only("Send"), "peer"), 5);
  for (const char* direction : {"send", "receive"}) {
    const std::string operation = trace.only(std::string("AllReduce ") + direction);
    CHECK_EQ(number(operation, "seq"), 41);
    CHECK_EQ(number(operation, "channel"), 3);
    CHECK_EQ(number(operation, "bytes"), 300);
    CHECK(number(operation, "ts") >= number(reductions[1], "ts"));
    CHECK(number(operation, "network_wait_us") <= number(operation, "dur"));
    CHECK(!value(operation, "gpu_wait_us").empty() && !value(operation, "peer_wait_us").empty());
  }
  for (const char* way : {"isend", "irecv"}) {
    const std::string message = trace.only(way);
    CHECK_EQ(number(message, "bytes"), 300);
    CHECK_EQ(value(message, "operation"), "AllReduce");
    CHECK_EQ(number(message, "seq"), 41);
    CHECK_EQ(number(message, "channel"), 3);
  }
  const std::size_t calls = version == 4 ? 0 : 1;
  for (const char* call : {"ncclAllReduce", "group call", "kernel launch"}) CHECK_EQ(trace.named(call).size(), calls);
  if (version >= 7) CHECK_EQ(number(trace.only("ncclAllReduce"), "user_tag"), static_cast<long long>(kUserTag));
  CHECK_EQ(value(trace.only("group"), "ph"), "X");
}

void records_a_collective(int version) {
  const TemporaryTree folder;
  in_own_process(traced(folder), [&] {
    const auto table = profiler_table(version);
    CHECK_EQ(std::string(table->name()), "BaguaNet");
    void* context = nullptr;
    int mask = 0;
    CHECK_SUCCESS(table->init(&context, &mask));
    CHECK(context != nullptr);
    CHECK((mask & nccl::kProfileColl) != 0 && (mask & nccl::kProfileProxyOp) != 0);
    reduce_once(*table, context);
    CHECK_SUCCESS(table->finalize(context));
  });
  check_trace_of_reduction(trace_file::Trace(folder.root()), version);
}

void asks_for_nothing_without_a_trace(int version) {
  for (const Environment& environment : {Environment{}, Environment{{"BAGUA_NET_TRACE", ""}},
                                         Environment{{"BAGUA_NET_TRACE", "/tmp/t"}, {"ENABLE_BAGUA_NET", "0"}}}) {
    in_own_process(environment, [&] {
      const auto table = profiler_table(version);
      void* context = slot_content(2);
      int mask = 0xfff;
      const int before = threads();
      CHECK_SUCCESS(table->init(&context, &mask));
      CHECK(context == nullptr);
      CHECK_EQ(mask, 0);
      CHECK_EQ(threads(), before);
      // What a call that comes all the same finds.
      CHECK(table->start_collective(nullptr, nullptr, "AllReduce", 1) == nullptr);
      CHECK_SUCCESS(table->stop(nullptr));
      CHECK_SUCCESS(table->finalize(nullptr));
    });
  }
}

const bool profiler_cases_registered = [] {
  for (int version = kOldestProfiler; version <= kNewestProfiler; ++version) {
    const std::string suffix = "_v" + std::to_string(version);
    register_case("records_a_collective" + suffix, [version] { records_a_collective(version); });
    register_case("asks_for_nothing_without_a_trace" + suffix,
                  [version] { asks_for_nothing_without_a_trace(version); });
  }
  return true;
}();

}  // namespace

TEST_CASE(handles_that_are_too_old_are_ignored) {
  const TemporaryTree folder;
  in_traced_process(folder, [](const ProfilerTable* table, void* context) {
    void* const old = table->start_collective(context, nullptr, "AllReduce", 0);
    void* const running = table->start_operation(context, old, true, 1, getpid());
    // More than there is room for: the place of the first is another's.
    for (std::uint64_t number = 1; number < 5000; ++number) {
      CHECK_SUCCESS(table->stop(table->start_collective(context, nullptr, "Reduce", number)));
    }
    CHECK_SUCCESS(table->stop(old));
    CHECK_SUCCESS(table->stop(running));
    CHECK_SUCCESS(table->stop(running));
    CHECK_SUCCESS(table->state(old, nccl::ProfilerState::kSendWait, 1));
    void* const orphan = table->start_operation(context, old, false, 2, getpid());
    CHECK_SUCCESS(table->stop(table->start_step(context, orphan, 0)));
    CHECK_SUCCESS(table->stop(orphan));
    // A parent in another process's memory (PXN): the number may mean something here.
    void* const recent = table->start_collective(context, nullptr, "AllGather", 1);
    CHECK_SUCCESS(table->stop(table->start_operation(context, recent, true, 3, getpid() + 1)));
  });
  const trace_file::Trace trace(folder.root());
  CHECK_EQ(trace.named("AllReduce").size(), std::size_t{0});
  CHECK_EQ(trace.named("Reduce").size(), std::size_t{4999});
  CHECK_EQ(trace_file::number(trace.only("AllReduce send"), "channel"), 1);
  CHECK_EQ(trace_file::number(trace.only(" receive"), "channel"), 2);
  CHECK_EQ(trace_file::number(trace.only(" send"), "channel"), 3);
}

TEST_CASE(what_is_begun_together_is_shown_one_after_the_other) {
  const TemporaryTree folder;
  in_traced_process(folder, [](const ProfilerTable* table, void* context) {
    std::array<void*, 2> sends{};
    for (void*& send : sends) {
      void* const collective = table->start_collective(context, nullptr, "AllReduce", 0);
      send = table->start_operation(context, collective, true, 1, getpid());
      CHECK_SUCCESS(table->stop(collective));
    }
    for (void* send : sends) CHECK_SUCCESS(table->stop(send));
  });
  const trace_file::Trace trace(folder.root());
  for (const char* name : {"AllReduce", "AllReduce send"}) {
    std::vector<std::string> shown;
    for (const std::string& event : trace.named(name)) {
      if (trace_file::value(event, "ph") == "X") shown.push_back(event);
    }
    CHECK_EQ(shown.size(), std::size_t{2});
    for (const std::string& event : shown) {
      const bool is_send = trace_file::value(event, "name") != "AllReduce";
      CHECK_EQ(trace.track_of(event), (is_send ? "channel 1 to 0" : "collectives") + kWhose);
    }
    CHECK(trace_file::number(shown[1], "ts") >=
          trace_file::number(shown[0], "ts") + trace_file::number(shown[0], "dur"));
  }
}

TEST_CASE(a_trace_that_cannot_be_written_is_one_warning) {
  const TemporaryTree folder;
  for (const std::string& path : {folder.root(), folder.root() + "/none/trace.json"}) {
    in_own_process({{"BAGUA_NET_TRACE", path}}, [&] {
      for (int life = 0; life < 2; ++life) {
        const Session session(11);
        Connection connection = connect_both_ends(session.net(), session.ctx());
        exchange(session.net(), connection, 1000, 1000, 0, 0, 1);
        close_both_ends(session.net(), &connection);
      }
      CHECK_EQ(CapturedLog::get().count(nccl::LogLevel::kWarn, "BAGUA_NET_TRACE=" + path), 1);
      CHECK_WARNED("This process runs without a trace");
    });
  }
  CHECK(trace_file::Trace(folder.root()).paths().empty());
}

// ThreadSanitizer cannot follow a child that starts threads after its parent had some, and to LeakSanitizer what the
// parent's threads have is lost in the child.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
TEST_CASE(a_forked_child_writes_a_file_of_its_own) {
  const TemporaryTree folder;
  in_own_process(traced(folder), [&] {
    const Session session(11);
    Connection connection = connect_both_ends(session.net(), session.ctx());
    in_own_process({}, [] {
      const Session own(11);
      Connection theirs = connect_both_ends(own.net(), own.ctx());
      exchange(own.net(), theirs, 222, 222, 0, 0, 1);
      close_both_ends(own.net(), &theirs);
    });
    exchange(session.net(), connection, 111, 111, 0, 0, 1);
    close_both_ends(session.net(), &connection);
  });
  const trace_file::Trace trace(folder.root());
  CHECK_EQ(trace.paths().size(), std::size_t{2});
  const auto sends = trace.named("isend");
  CHECK_EQ(sends.size(), std::size_t{2});
  CHECK(trace_file::value(sends[0], "pid") != trace_file::value(sends[1], "pid"));
  for (const std::string& path : trace.paths()) {
    const std::string text = trace_file::content(path);
    CHECK_EQ(text.substr(text.size() - 3), "\n]\n");
  }
}
#endif

}  // namespace abi_test

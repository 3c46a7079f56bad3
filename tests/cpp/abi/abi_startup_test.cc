// What init makes of the environment: start, decline, fail, or refuse to be replaced; and what the user is told.
#include "abi_connection.h"

namespace abi_test {
namespace {

using bagua_net::nccl::LogLevel;

void with_table(int version, const std::function<void(const Net& net)>& body) {
  const PluginLibrary library;
  body(Net(library, version, &CapturedLog::log));
}

Result init_result(const Net& net) {
  void* ctx = slot_content(2);
  const Result result = net.init(&ctx);
  if (result != Result::kSuccess) CHECK(ctx == nullptr);
  // 2.28 to 2.29.3 finalize even after this.
  CHECK_SUCCESS(net.finalize(ctx));
  return result;
}

void starts_and_says_so(int version) {
  with_table(version, [&](const Net& net) {
    CHECK_RESULT(init_result(net), Result::kSuccess);
    CHECK_EQ(CapturedLog::get().count(LogLevel::kInfo, "active: table v" + std::to_string(version)), 1);
    CHECK(CapturedLog::get().informed("lo (127.0.0.1"));
    CHECK(CapturedLog::get().informed("workers 3"));
    CHECK(CapturedLog::get().informed("streams 2"));
    CHECK(CapturedLog::get().informed("devices 2"));
    // NCCL_DEBUG=INFO shows the subsystem INIT without further ado.
    for (const LogLine& line : CapturedLog::get().lines()) CHECK((line.flags & bagua_net::nccl::kLogInit) != 0);
  });
}

void declines_when_switched_off(int version) {
  with_table(version, [&](const Net& net) {
    CHECK(init_result(net) != Result::kSuccess);
    CHECK(CapturedLog::get().informed("ENABLE_BAGUA_NET=0"));
    // The user wanted this: no warning, not even about another knob.
    for (const LogLine& line : CapturedLog::get().lines()) CHECK(line.level != LogLevel::kWarn);
    int count = 1;
    CHECK(net.devices(&count) != Result::kSuccess);
    CHECK_EQ(count, 0);
  });
}

void fails_on_a_bad_knob(int version) {
  with_table(version, [&](const Net& net) {
    CHECK_RESULT(init_result(net), Result::kInvalidUsage);
    CHECK_WARNED("BAGUA_NET_NSTREAMS");
    CHECK_WARNED("=0");
    CHECK_WARNED("1 to 64");
    // Every communicator gets the answer.
    CHECK_RESULT(init_result(net), Result::kInvalidUsage);
  });
}

void fails_on_an_unknown_interface(int version) {
  with_table(version, [&](const Net& net) {
    CHECK(init_result(net) != Result::kSuccess);
    CHECK_WARNED("nosuchinterface7");
    CHECK_WARNED("lo");
  });
}

// [Note: BAGUA_NET_REQUIRED] in abi/process_instance.h: NCCL must not be able to fall back, and the reason must reach
// the job.
void refuses_to_be_replaced(int version, const std::string& reason) {
  with_table(version, [&](const Net& net) {
    void* ctx = nullptr;
    CHECK_SUCCESS(net.init(&ctx));
    CHECK_WARNED(reason);
    int count = 0;
    CHECK_SUCCESS(net.devices(&count));
    CHECK_EQ(count, 1);
    Properties props{};
    CHECK_SUCCESS(net.properties(0, &props));
    CHECK(props.name != nullptr);
    CHECK(props.speed > 0);
    CapturedLog::get().clear();
    Handle handle{};
    void* comm = slot_content(2);
    CHECK_RESULT(net.listen(ctx, 0, handle.data(), &comm), Result::kInvalidUsage);
    CHECK(comm == nullptr);
    CHECK_WARNED(reason);
    CapturedLog::get().clear();
    comm = slot_content(2);
    CHECK_RESULT(net.connect(ctx, 0, handle.data(), &comm), Result::kInvalidUsage);
    CHECK(comm == nullptr);
    CHECK_WARNED(reason);
    CHECK_SUCCESS(net.finalize(ctx));
  });
}

void fails_where_nccl_does_not_fall_back(int version) {
  with_table(version, [&](const Net& net) {
    CHECK_RESULT(init_result(net), Result::kInvalidUsage);
    CHECK_WARNED("BAGUA_NET_NSTREAMS");
  });
}

void warns_of_an_unknown_knob(int version) {
  with_table(version, [&](const Net& net) {
    CHECK_RESULT(init_result(net), Result::kSuccess);
    CHECK_WARNED("BAGUA_NET_NSTREAM ");
    CHECK_WARNED("Did you mean BAGUA_NET_NSTREAMS?");
  });
}

void works_without_a_logger(int version) {
  const PluginLibrary library;
  const Net net(library, version, nullptr);
  void* ctx = nullptr;
  CHECK_SUCCESS(net.init(&ctx));
  Connection connection = connect_both_ends(net, ctx);
  exchange(net, connection, 1000, 1000, 0, 0, 1);
  void* request = nullptr;
  CHECK_RESULT(net.iflush(connection.recv, nullptr, 0, nullptr, &request), Result::kInternalError);
  close_both_ends(net, &connection);
  CHECK_SUCCESS(net.finalize(ctx));
}

// The knobs may be mended between two attempts, and a failure leaves nothing behind.
void starts_after_a_failure(int version) {
  with_table(version, [&](const Net& net) {
    CHECK(init_result(net) != Result::kSuccess);
    CHECK_EQ(unsetenv("BAGUA_NET_NSTREAMS"), 0);
    void* ctx = nullptr;
    CHECK_SUCCESS(net.init(&ctx));
    Connection connection = connect_both_ends(net, ctx);
    exchange(net, connection, 1000, 1000, 0, 0, 1);
    close_both_ends(net, &connection);
    CHECK_SUCCESS(net.finalize(ctx));
  });
}

bool register_startup_cases() {
  const Environment bad{{"BAGUA_NET_NSTREAMS", "0"}};
  const auto with = [](Environment environment, const Environment& more) {
    environment.insert(environment.end(), more.begin(), more.end());
    return environment;
  };
  for (int version = kOldestVersion; version <= kNewestVersion; ++version) {
    const bool is_end = version == kOldestVersion || version == kNewestVersion;
    const auto add = [&](const std::string& name, const Environment& environment, std::function<void()> body) {
      register_case(name + "_v" + std::to_string(version), [=] { in_own_process(environment, body); });
    };
    add("starts_and_says_so", {{"BAGUA_NET_NWORKERS", "3"}, {"BAGUA_NET_NSTREAMS", "2"}, {"BAGUA_NET_RAILS", "2"}},
        [=] { starts_and_says_so(version); });
    add("declines_when_switched_off", {{"ENABLE_BAGUA_NET", "0"}}, [=] { declines_when_switched_off(version); });
    add("refuses_to_be_replaced", with(bad, {{"BAGUA_NET_REQUIRED", "1"}}),
        [=] { refuses_to_be_replaced(version, "BAGUA_NET_NSTREAMS"); });
    add("works_without_a_logger", {}, [=] { works_without_a_logger(version); });
    // What follows is the same for all tables.
    if (!is_end) continue;
    add("declines_with_a_bad_knob", with(bad, {{"ENABLE_BAGUA_NET", "0"}}),
        [=] { declines_when_switched_off(version); });
    add("fails_on_a_bad_knob", bad, [=] { fails_on_a_bad_knob(version); });
    add("fails_on_an_unknown_interface", {{"NCCL_SOCKET_IFNAME", "nosuchinterface7"}},
        [=] { fails_on_an_unknown_interface(version); });
    add("refuses_when_required_is_unreadable", {{"BAGUA_NET_REQUIRED", "maybe"}},
        [=] { refuses_to_be_replaced(version, "BAGUA_NET_REQUIRED=maybe"); });
    // NCCL's own transport neither encrypts nor keeps anybody out.
    add("refuses_without_the_secret", {{"BAGUA_NET_SECRET_FILE", "/nowhere/secret"}},
        [=] { refuses_to_be_replaced(version, "BAGUA_NET_SECRET_FILE=/nowhere/secret"); });
    add("refuses_when_it_cannot_encrypt", {{"BAGUA_NET_ENCRYPTION", "1"}},
        [=] { refuses_to_be_replaced(version, "BAGUA_NET_SECRET_FILE is not set"); });
    add("refuses_when_encryption_is_unreadable", {{"BAGUA_NET_ENCRYPTION", "maybe"}},
        [=] { refuses_to_be_replaced(version, "BAGUA_NET_ENCRYPTION=maybe"); });
    add("fails_on_a_bad_knob_without_encryption", with(bad, {{"BAGUA_NET_ENCRYPTION", "0"}}),
        [=] { fails_on_a_bad_knob(version); });
    add("required_and_chosen_fails_init", with(bad, {{"BAGUA_NET_REQUIRED", "1"}, {"NCCL_NET", "baguanet"}}),
        [=] { fails_where_nccl_does_not_fall_back(version); });
    add("warns_of_an_unknown_knob", {{"BAGUA_NET_NSTREAM", "3"}}, [=] { warns_of_an_unknown_knob(version); });
    add("starts_after_a_failure", bad, [=] { starts_after_a_failure(version); });
  }
  return true;
}

const bool startup_cases_registered = register_startup_cases();

}  // namespace
}  // namespace abi_test

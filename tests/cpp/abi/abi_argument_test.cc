// What each table tells NCCL of itself, and what it answers to arguments that are wrong.
#include <cmath>
#include <set>

#include "abi_connection.h"

namespace abi_test {
namespace {

void describes_itself(int version) {
  const Session session(version);
  const Net& net = session.net();
  CHECK_EQ(std::string(net.name()), "BaguaNet");
  int count = 0;
  CHECK_SUCCESS(net.devices(&count));
  CHECK(count > 0);
  std::set<std::string> names;
  std::set<std::uint64_t> guids;
  for (int dev = 0; dev < count; ++dev) {
    Properties props{};
    CHECK_SUCCESS(net.properties(dev, &props));
    CHECK(props.name != nullptr);
    CHECK_EQ(std::string(props.name).substr(0, 2), "lo");
    CHECK(names.insert(props.name).second);
    CHECK(guids.insert(props.guid).second);
    CHECK(props.pciPath == nullptr);  // loopback is not on a bus
    CHECK_EQ(props.ptrSupport, bagua_net::nccl::kPointerHost);
    CHECK(props.speed > 0);
    CHECK(props.port >= 0);
    CHECK_EQ(props.latency, 0.0F);
    CHECK_EQ(props.maxComms, 65536);
    CHECK_EQ(props.maxRecvs, 1);
    if (version >= 7) {
      CHECK_EQ(static_cast<int>(props.netDeviceType), 0);
      CHECK_EQ(props.netDeviceVersion, 0);
    }
    if (version >= 8) CHECK_EQ(props.regIsGlobal, 0);
    if (version >= 9) {
      CHECK_EQ(props.forceFlush, 0);
      CHECK_EQ(props.vProps.ndevs, 1);
      CHECK_EQ(props.vProps.devs[0], dev);
      CHECK_EQ(props.maxP2pBytes, std::size_t{1} << 30);
      CHECK_EQ(props.maxCollBytes, std::size_t{1} << 30);
    }
    if (version >= 11) CHECK_EQ(props.maxMultiRequestSize, 1);
    if (version >= 12) {
      CHECK_EQ(props.railId, -1);
      CHECK_EQ(props.planeId, -1);
    }
    // NCCL keeps the pointers: the same ones every time.
    Properties again{};
    CHECK_SUCCESS(net.properties(dev, &again));
    CHECK(again.name == props.name);
  }
  for (const int dev : {-1, count, 1 << 20}) {
    Properties props{};
    CHECK_RESULT(net.properties(dev, &props), Result::kInvalidArgument);
  }
  CHECK_WARNED("device -1 does not exist");
}

void refuses_wrong_arguments(int version) {
  const Session session(version);
  const Net& net = session.net();
  Connection connection = connect_both_ends(net, session.ctx());
  Buffer buffer(64);
  void* const send_handle = register_buffer(net, connection.send, &buffer);
  void* const recv_handle = register_buffer(net, connection.recv, &buffer);
  void* request = slot_content(1);
  void* data = buffer.data();

  // A grouped receive: maxRecvs says 1.
  void* two_buffers[2] = {data, data};
  void* two_handles[2] = {recv_handle, recv_handle};
  CHECK_RESULT(net.irecv(connection.recv, 2, two_buffers, 8, 0, two_handles, &request), Result::kInvalidArgument);
  CHECK(request == nullptr);
  CHECK_WARNED("n=2");
  CHECK_WARNED("limit is 1");
  request = slot_content(2);
  CHECK_RESULT(net.irecv(connection.recv, 0, two_buffers, 8, 0, two_handles, &request), Result::kInvalidArgument);
  CHECK(request == nullptr);

  // Sizes below 0, and above what the properties allow.
  for (const std::int64_t bytes : {std::int64_t{-1}, (std::int64_t{1} << 30) + 1}) {
    request = slot_content(2);
    CHECK_RESULT(net.isend(connection.send, data, bytes, 0, send_handle, &request), Result::kInvalidArgument);
    CHECK(request == nullptr);
    request = slot_content(1);
    CHECK_RESULT(net.irecv(connection.recv, 1, &data, bytes, 0, two_handles, &request), Result::kInvalidArgument);
    CHECK(request == nullptr);
    CHECK_WARNED(std::to_string(bytes) + " bytes");
  }

  // Memory that TCP cannot use.
  for (const int type : {bagua_net::nccl::kPointerCuda, bagua_net::nccl::kPointerDmaBuf, 0, 8}) {
    void* mhandle = slot_content(2);
    CHECK_RESULT(net.reg_mr(connection.send, data, 64, type, &mhandle), Result::kInvalidArgument);
    CHECK(mhandle == nullptr);
  }
  CHECK_WARNED("pointer type 2 is not supported");
  void* mhandle = slot_content(2);
  CHECK_RESULT(net.reg_mr(connection.send, data, -1, bagua_net::nccl::kPointerHost, &mhandle),
               Result::kInvalidArgument);
  CHECK(mhandle == nullptr);

  // Never used with host memory.
  request = slot_content(2);
  CHECK_RESULT(net.iflush(connection.recv, data, 8, recv_handle, &request), Result::kInternalError);
  CHECK(request == nullptr);

  // The wrong end, and no end at all.
  request = slot_content(2);
  CHECK_RESULT(net.isend(connection.recv, data, 8, 0, send_handle, &request), Result::kInvalidArgument);
  CHECK(request == nullptr);
  request = slot_content(2);
  CHECK_RESULT(net.irecv(connection.send, 1, &data, 8, 0, two_handles, &request), Result::kInvalidArgument);
  CHECK(request == nullptr);
  CHECK_RESULT(net.isend(nullptr, data, 8, 0, nullptr, &request), Result::kInvalidArgument);
  int done = 1;
  CHECK_RESULT(net.test(nullptr, &done, nullptr), Result::kInvalidArgument);
  CHECK_EQ(done, 0);
  Handle handle{};
  void* comm = slot_content(2);
  for (const int dev : {-1, 1000}) {
    CHECK(net.listen(session.ctx(), dev, handle.data(), &comm) != Result::kSuccess);
    CHECK(comm == nullptr);
    comm = slot_content(2);
  }

  // A handle that is not one of ours: a peer without the plugin, or with another version of it.
  CapturedLog::get().clear();
  handle.fill(0x5A);
  comm = slot_content(2);
  CHECK_RESULT(net.connect(session.ctx(), 0, handle.data(), &comm), Result::kRemoteError);
  CHECK(comm == nullptr);
  CHECK_WARNED("connect: ");

  // The bytes of the protocol version, see wire/connect_handle.h.
  void* listen = nullptr;
  CHECK_SUCCESS(net.listen(session.ctx(), 0, handle.data(), &listen));
  handle[8] = 99;
  comm = slot_content(2);
  CHECK_RESULT(net.connect(session.ctx(), 0, handle.data(), &comm), Result::kRemoteError);
  CHECK(comm == nullptr);
  CHECK_WARNED("version 99");
  CHECK_SUCCESS(net.close_listen(listen));

  // After all of that the connection still works.
  exchange(net, connection, 64, 64, 0, 0, 9);
  CHECK_SUCCESS(net.dereg_mr(connection.send, nullptr));
  CHECK_SUCCESS(net.dereg_mr(connection.send, send_handle));
  CHECK_SUCCESS(net.dereg_mr(connection.recv, recv_handle));
  close_both_ends(net, &connection);
}

bool register_argument_cases() {
  for (int version = kOldestVersion; version <= kNewestVersion; ++version) {
    const std::string suffix = "_v" + std::to_string(version);
    register_case("describes_itself" + suffix, [=] { in_own_process({}, [=] { describes_itself(version); }); });
    register_case("describes_rails" + suffix, [=] {
      in_own_process({{"BAGUA_NET_RAILS", "4"}}, [=] {
        describes_itself(version);
        const Session session(version);
        int count = 0;
        CHECK_SUCCESS(session.net().devices(&count));
        CHECK_EQ(count, 4);
      });
    });
    register_case("refuses_wrong_arguments" + suffix,
                  [=] { in_own_process({}, [=] { refuses_wrong_arguments(version); }); });
  }
  return true;
}

const bool argument_cases_registered = register_argument_cases();

}  // namespace
}  // namespace abi_test

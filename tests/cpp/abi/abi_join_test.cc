// Joined devices: those of BAGUA_NET_JOIN_NICS in every table, and those that NCCL asks for (makeVDevice) in the tables
// that have it.
#include <ifaddrs.h>
#include <net/if.h>
#include <sched.h>
#include <sys/mount.h>

#include <cstdio>
#include <cstdlib>

#include "abi_connection.h"

namespace abi_test {
namespace {

constexpr int kOldestJoining = 9;

void run(const std::string& command) {
  if (std::system(command.c_str()) != 0) throw std::runtime_error("failed: " + command);
}

// Two NICs with 25 and 10 Gb/s, and a virtual interface, in a network and a /sys of this process. False: it cannot have
// these, for want of root, of `ip` or of the kernel's veth.
bool enter_host_with_nics() {
  if (::unshare(CLONE_NEWNET | CLONE_NEWNS) != 0) return false;
  if (::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) return false;
  if (::mount("sysfs", "/sys", "tmpfs", 0, nullptr) != 0) return false;
  if (std::system("ip link add probe type veth peer name peer-probe 2>&1 && ip link del probe") != 0) return false;
  run("ip link set lo up");
  const struct {
    const char* name;
    const char* pci;
    int mbps;
  } nics[] = {{"nic0", "0000:3b:00.0", 25000}, {"nic1", "0000:3b:00.1", 10000}, {"tun0", nullptr, 0}};
  int number = 0;
  for (const auto& nic : nics) {
    const std::string name = nic.name;
    const std::string peer = "peer-" + name;
    run("ip link add " + name + " type veth peer name " + peer + " && ip link set " + peer +
        " up && ip addr add 10.1." + std::to_string(number++) + ".1/24 dev " + name + " && ip link set " + name +
        " up");
    // The kernel notices the carrier a moment later, and the plugin uses no interface without it.
    run("for i in $(seq 1000); do ip link show " + name + " | grep -q 'state UP' && exit 0; sleep 0.01; done; exit 1");
    run("mkdir -p /sys/class/net/" + name);
    if (nic.pci == nullptr) continue;
    const std::string device = std::string("/sys/devices/pci0000:3a/") + nic.pci;
    run("mkdir -p " + device + " && ln -s " + device + " /sys/class/net/" + name + "/device && echo 0 > " + device +
        "/numa_node && echo " + std::to_string(nic.mbps) + " > /sys/class/net/" + name + "/speed");
  }
  // The kernel reports the carrier a moment later, up to a second if links change often.
  for (const auto& nic : nics) {
    wait_until("a link that is up", [&] {
      ifaddrs* rows = nullptr;
      if (::getifaddrs(&rows) != 0) return false;
      bool is_running = false;
      for (const ifaddrs* row = rows; row != nullptr; row = row->ifa_next) {
        is_running |= std::string(row->ifa_name) == nic.name && (row->ifa_flags & IFF_RUNNING) != 0;
      }
      ::freeifaddrs(rows);
      return is_running;
    });
  }
  return true;
}

void joins_nics(int version) {
  if (!enter_host_with_nics()) {
    std::puts("skipped: it takes root, ip and veth to make a network");
    return;
  }
  int first = -1;
  int count = 0;
  {
    const Session session(version);
    const Net& net = session.net();
    CHECK_SUCCESS(net.devices(&count));
    CHECK_EQ(count, 6);  // two rails each
    CHECK_SUCCESS(net.make_virtual_device(&first, {0, 1, 3, 4}));
    CHECK_EQ(first, 6);
    CHECK_SUCCESS(net.devices(&count));
    CHECK_EQ(count, 8);  // rails stay apart
    std::uint64_t guids[2];
    for (int rail = 0; rail < 2; ++rail) {
      Properties props{};
      CHECK_SUCCESS(net.properties(first + rail, &props));
      CHECK_EQ(std::string(props.name), rail == 0 ? "nic0+nic1" : "nic0+nic1#1");
      CHECK_EQ(props.speed, 17500);
      CHECK_EQ(std::string(props.pciPath), "/sys/devices/pci0000:3a/0000:3b:00.0");
      CHECK_EQ(props.vProps.ndevs, 2);
      CHECK_EQ(props.vProps.devs[0], 3 * rail);
      CHECK_EQ(props.vProps.devs[1], 3 * rail + 1);
      guids[rail] = props.guid;
      Properties part{};
      CHECK_SUCCESS(net.properties(3 * rail, &part));
      CHECK(part.guid != props.guid);
    }
    CHECK(guids[0] != guids[1]);
    CHECK(CapturedLog::get().informed("NCCL joined nic0+nic1, 17500 Mb/s"));

    const struct {
      std::vector<int> devs;
      const char* why;
    } refused[] = {
        {{0, 1}, "nic0 is in nic0+nic1 already"},
        {{0, 2}, "tun0 is not a PCI device"},
        {{0, 6}, "only devices 0 to 5 can be joined"},
    };
    for (const auto& [devs, why] : refused) {
      int made = -1;
      CHECK_RESULT(net.make_virtual_device(&made, devs), Result::kInvalidUsage);
      CHECK_WARNED(why);
    }
    CHECK_SUCCESS(net.devices(&count));
    CHECK_EQ(count, 8);

    Connection connection = connect_both_ends(net, session.ctx(), first);
    for (const std::size_t bytes : {std::size_t{8}, std::size_t{3} << 20})
      exchange(net, connection, bytes, bytes, 0, 3, 1);
    close_both_ends(net, &connection);
  }
  if (version < 11) return;
  // All communicators were finalized. NCCL goes on with the number that it has, or counts again and joins again.
  const Session again(version);
  Properties props{};
  CHECK_SUCCESS(again.net().properties(first, &props));
  CHECK_EQ(std::string(props.name), "nic0+nic1");
  CHECK_SUCCESS(again.net().devices(&count));
  CHECK_EQ(count, 6);
  int second = -1;
  CHECK_SUCCESS(again.net().make_virtual_device(&second, {0, 1}));
  CHECK_EQ(second, first);
  CHECK_SUCCESS(again.net().make_virtual_device(&second, {3, 4}));
  CHECK_EQ(second, first + 1);
  CHECK_SUCCESS(again.net().devices(&count));
  CHECK_EQ(count, 8);
}

// BAGUA_NET_JOIN_NICS needs nothing of a table.
void shows_what_the_setting_joins(int version) {
  if (!enter_host_with_nics()) {
    std::puts("skipped: it takes root, ip and veth to make a network");
    return;
  }
  const Session session(version);
  const Net& net = session.net();
  int count = 0;
  CHECK_SUCCESS(net.devices(&count));
  CHECK_EQ(count, 2);
  Properties props{};
  CHECK_SUCCESS(net.properties(0, &props));
  CHECK_EQ(std::string(props.name), "nic0+nic1");
  CHECK_EQ(props.speed, 35000);
  CHECK_EQ(std::string(props.pciPath), "/sys/devices/pci0000:3a/0000:3b:00.0");
  if (version >= 9) {
    CHECK_EQ(props.vProps.ndevs, 1);
    CHECK_EQ(props.vProps.devs[0], 0);
  }
  CHECK(CapturedLog::get().informed("joined nic0+nic1"));
  Connection connection = connect_both_ends(net, session.ctx());
  for (const std::size_t bytes : {std::size_t{8}, std::size_t{3} << 20})
    exchange(net, connection, bytes, bytes, 0, 3, 1);
  close_both_ends(net, &connection);
}

void refuses_what_cannot_be_joined(int version) {
  const Session session(version);
  const Net& net = session.net();
  int count = 0;
  CHECK_SUCCESS(net.devices(&count));
  CHECK_EQ(count, 4);  // rails of lo
  const struct {
    std::vector<int> devs;
    const char* why;
  } refused[] = {
      {{}, "it takes one at least"},
      {{0, 4}, "only devices 0 to 3 can be joined"},
      {{-1, 0}, "only devices 0 to 3 can be joined"},
      {{1, 1}, "lo#1 and itself cannot be one device: each can be in it once"},
      {{0, 1}, "lo, lo#1 cannot be one device: some are rails of one interface"},
  };
  for (const auto& [devs, why] : refused) {
    int made = -1;
    CHECK_RESULT(net.make_virtual_device(&made, devs), Result::kInvalidUsage);
    CHECK_EQ(made, -1);
    CHECK_WARNED(why);
  }
  CHECK_SUCCESS(net.devices(&count));
  CHECK_EQ(count, 4);

  // NCCL up to 2.26 does so with each device that it leaves alone.
  int made = -1;
  CHECK_SUCCESS(net.make_virtual_device(&made, {2}));
  CHECK_EQ(made, 4);
  Properties props{};
  CHECK_SUCCESS(net.properties(4, &props));
  CHECK_EQ(std::string(props.name), "lo#2");
  CHECK_EQ(props.vProps.ndevs, 1);
  CHECK_EQ(props.vProps.devs[0], 2);
  Connection connection = connect_both_ends(net, session.ctx(), made);
  exchange(net, connection, 64, 64, 0, 0, 1);
  close_both_ends(net, &connection);
}

bool register_join_cases() {
  for (int version = kOldestVersion; version <= kNewestVersion; ++version) {
    const std::string suffix = "_v" + std::to_string(version);
    register_case("shows_what_the_setting_joins" + suffix, [=] {
      in_own_process(
          {{"BAGUA_NET_JOIN_NICS", "nic0+nic1"}, {"NCCL_SOCKET_IFNAME", "nic,tun"}, {"BAGUA_NET_RAILS", "1"}},
          [=] { shows_what_the_setting_joins(version); });
    });
    if (version < kOldestJoining) continue;
    register_case("joins_nics" + suffix, [=] {
      in_own_process(
          {{"NCCL_NET_FORCE_MERGE", "nic0,nic1"}, {"NCCL_SOCKET_IFNAME", "nic,tun"}, {"BAGUA_NET_RAILS", "2"}},
          [=] { joins_nics(version); });
    });
    register_case("refuses_what_cannot_be_joined" + suffix, [=] {
      in_own_process({{"NCCL_NET_FORCE_MERGE", "lo"}, {"BAGUA_NET_RAILS", "4"}},
                     [=] { refuses_what_cannot_be_joined(version); });
    });
  }
  return true;
}

const bool join_cases_registered = register_join_cases();

}  // namespace
}  // namespace abi_test

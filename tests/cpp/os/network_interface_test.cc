// NCCL's interface rules over made-up machines, and the real lo of this one.
#include "os/network_interface.h"

#include <arpa/inet.h>
#include <net/if.h>

#include "support/check.h"
#include "support/variables.h"

using bagua_net::InterfaceAddress;
using bagua_net::InterfaceVerdict;
using bagua_net::reader;
using bagua_net::SocketAddress;
using bagua_net::Status;
using bagua_net::Variables;
using check::contains;

namespace {

constexpr unsigned kRunning = IFF_UP | IFF_RUNNING;

SocketAddress ip(const std::string& text, unsigned scope = 0) {
  sockaddr_in ipv4{};
  ipv4.sin_family = AF_INET;
  if (inet_pton(AF_INET, text.c_str(), &ipv4.sin_addr) == 1) {
    return {reinterpret_cast<const sockaddr*>(&ipv4), sizeof ipv4};
  }
  sockaddr_in6 ipv6{};
  ipv6.sin6_family = AF_INET6;
  ipv6.sin6_scope_id = scope;
  CHECK_EQ(inet_pton(AF_INET6, text.c_str(), &ipv6.sin6_addr), 1);
  return {reinterpret_cast<const sockaddr*>(&ipv6), sizeof ipv6};
}

// A machine, built in the order of getifaddrs: links first, then IPv4, then IPv6 addresses.
class Machine {
 public:
  Machine& link(const std::string& name, unsigned flags = kRunning) {
    rows_.push_back({name, flags, {}, {}});
    flags_[name] = flags;
    return *this;
  }
  Machine& add(const std::string& name, const std::string& address, const std::string& netmask, unsigned scope = 0) {
    rows_.push_back({name, flags_.count(name) != 0 ? flags_[name] : kRunning, ip(address, scope), ip(netmask)});
    return *this;
  }
  Machine& add(const std::string& name, const std::string& address) { return add(name, address, "255.255.255.0"); }
  const std::vector<InterfaceAddress>& rows() const { return rows_; }

 private:
  std::vector<InterfaceAddress> rows_;
  std::map<std::string, unsigned> flags_;
};

struct Outcome {
  Status status;
  std::vector<InterfaceVerdict> verdicts;

  // "eth0=10.0.0.1 eth1=10.0.1.1"
  std::string used() const {
    std::string text;
    for (const auto& verdict : verdicts) {
      if (verdict.used) text += (text.empty() ? "" : " ") + verdict.name + "=" + verdict.address.host();
    }
    return text;
  }
  std::string reason(const std::string& name) const {
    for (const auto& verdict : verdicts) {
      if (verdict.name == name) return verdict.reason;
    }
    return "no verdict for " + name;
  }
};

Outcome select(const Machine& machine, const Variables& variables = {}) {
  Outcome outcome;
  outcome.status = bagua_net::select_interfaces(machine.rows(), reader(variables), &outcome.verdicts);
  return outcome;
}

std::string used(const Machine& machine, const Variables& variables = {}) {
  const Outcome outcome = select(machine, variables);
  CHECK_OK(outcome.status);
  return outcome.used();
}

std::string failure(const Machine& machine, const Variables& variables = {}) {
  const Outcome outcome = select(machine, variables);
  CHECK(!outcome.status.is_ok());
  CHECK(outcome.status.code() == bagua_net::StatusCode::kInvalidUsage);
  CHECK_EQ(outcome.used(), std::string());
  return outcome.status.message();
}

Machine workstation() {
  return Machine()
      .link("lo", kRunning | IFF_LOOPBACK)
      .link("eth0")
      .link("eth1")
      .link("eth10")
      .link("docker0")
      .link("virbr0")
      .add("lo", "127.0.0.1", "255.0.0.0")
      .add("eth0", "10.0.0.1")
      .add("eth1", "10.0.1.1")
      .add("eth10", "10.0.10.1")
      .add("docker0", "172.17.0.1", "255.255.0.0")
      .add("virbr0", "192.168.122.1")
      .add("lo", "::1", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff")
      .add("eth0", "fd00::1", "ffff:ffff:ffff:ffff::")
      .add("eth1", "fe80::2", "ffff:ffff:ffff:ffff::", 3);
}

Variables ifname(const std::string& filter) { return {{"NCCL_SOCKET_IFNAME", filter}}; }

}  // namespace

// --- without a filter ---

TEST_CASE(ordinary_interfaces_are_taken_and_the_rest_is_explained) {
  const Outcome outcome = select(workstation());
  CHECK_OK(outcome.status);
  CHECK_EQ(outcome.used(), "eth0=10.0.0.1 eth1=10.0.1.1 eth10=10.0.10.1");
  CHECK_EQ(outcome.verdicts.size(), std::size_t{6});
  CHECK(outcome.verdicts[0].used && outcome.verdicts[2].used && !outcome.verdicts[3].used);
  CHECK_EQ(outcome.reason("eth0"), "running, and not docker, lo or virbr");
  CHECK_EQ(outcome.reason("lo"), "skipped: NCCL prefers eth0");
  CHECK_EQ(outcome.reason("docker0"), "skipped: NCCL prefers eth0");
}

TEST_CASE(ib_comes_before_everything) {
  Machine machine = workstation();
  machine.add("ib0", "10.9.0.1").add("ibs3", "10.9.1.1");
  const Outcome outcome = select(machine, {{"NCCL_COMM_ID", "10.0.0.7:5000"}});
  CHECK_EQ(outcome.used(), "ib0=10.9.0.1 ibs3=10.9.1.1");
  CHECK_EQ(outcome.reason("eth0"), "skipped: NCCL prefers ib0");
}

TEST_CASE(an_ib_interface_that_is_down_does_not_count) {
  CHECK_EQ(used(Machine().link("ib0", IFF_UP).add("ib0", "10.9.0.1").add("eth0", "10.0.0.1")), "eth0=10.0.0.1");
}

TEST_CASE(docker_then_lo_then_virbr) {
  const Machine all = Machine().add("virbr0", "192.168.122.1").add("lo", "127.0.0.1").add("docker0", "172.17.0.1");
  CHECK_EQ(used(all), "docker0=172.17.0.1");
  const Outcome loopback = select(Machine().add("virbr0", "192.168.122.1").add("lo", "127.0.0.1"));
  CHECK_EQ(loopback.used(), "lo=127.0.0.1");
  CHECK_EQ(loopback.reason("lo"), "loopback, because no other interface is usable");
  CHECK_EQ(used(Machine().add("virbr0", "192.168.122.1")), "virbr0=192.168.122.1");
}

TEST_CASE(the_defaults_go_by_prefix_not_by_flag) {
  // "lo..." is left out whatever it is: lowpan0 only counts when nothing better is there, together with lo.
  CHECK_EQ(used(Machine().add("lo", "127.0.0.1").add("lowpan0", "10.1.0.1").add("eth0", "10.0.0.1")), "eth0=10.0.0.1");
  CHECK_EQ(used(Machine().add("lo", "127.0.0.1").add("lowpan0", "10.1.0.1")), "lo=127.0.0.1 lowpan0=10.1.0.1");
  CHECK_EQ(used(Machine().add("br-4f2a", "172.18.0.1").add("veth9", "10.3.0.1")), "br-4f2a=172.18.0.1 veth9=10.3.0.1");
}

TEST_CASE(not_running_and_address_less_interfaces_are_skipped) {
  const Outcome outcome = select(Machine()
                                     .link("eth0")
                                     .link("eth1", IFF_UP)
                                     .link("tun0")
                                     .link("ifb0", 0)
                                     .add("eth0", "10.0.0.1")
                                     .add("eth1", "10.0.1.1"));
  CHECK_EQ(outcome.used(), "eth0=10.0.0.1");
  CHECK_EQ(outcome.reason("eth1"), "skipped: not running (down, or no carrier)");
  CHECK_EQ(outcome.reason("tun0"), "skipped: no IPv4 or IPv6 address");
  CHECK_EQ(outcome.reason("ifb0"), "skipped: not running (down, or no carrier)");
}

TEST_CASE(the_first_address_of_a_name_wins) {
  CHECK_EQ(used(Machine().link("eth0").add("eth0", "10.0.0.9").add("eth0", "10.0.0.1").add("eth0", "fd00::1")),
           "eth0=10.0.0.9");
  CHECK_EQ(used(Machine().link("eth0").add("eth0", "fd00::1", "ffff::").add("eth0", "10.0.0.9")), "eth0=fd00::1");
}

TEST_CASE(a_machine_without_interfaces) {
  CHECK_EQ(failure(Machine()),
           "no usable network interface. This host has no interface.\n"
           "Bring an interface up, or give one an address.");
  CHECK(contains(failure(Machine().link("eth0", 0)), "This host has eth0 (skipped: not running"));
}

// --- NCCL_SOCKET_IFNAME ---

TEST_CASE(filter_by_prefix) {
  CHECK_EQ(used(workstation(), ifname("eth")), "eth0=10.0.0.1 eth1=10.0.1.1 eth10=10.0.10.1");
  CHECK_EQ(used(workstation(), ifname("eth1")), "eth1=10.0.1.1 eth10=10.0.10.1");
  CHECK_EQ(used(workstation(), ifname("lo")), "lo=127.0.0.1");
  // The kernel's order, not the list's.
  CHECK_EQ(used(workstation(), ifname("virbr,eth0")), "eth0=10.0.0.1 virbr0=192.168.122.1");
}

TEST_CASE(filter_by_exact_name) {
  CHECK_EQ(used(workstation(), ifname("=eth1")), "eth1=10.0.1.1");
  CHECK_EQ(used(workstation(), ifname("=eth1,eth10")), "eth1=10.0.1.1 eth10=10.0.10.1");
  CHECK(contains(failure(workstation(), ifname("=eth")), "NCCL_SOCKET_IFNAME==eth: no usable network interface"));
}

TEST_CASE(filter_negated) {
  CHECK_EQ(used(workstation(), ifname("^eth,lo")), "docker0=172.17.0.1 virbr0=192.168.122.1");
  // Only the first character turns the list round; here the second name begins with "^" and matches nothing.
  CHECK_EQ(used(workstation(), ifname("eth0,^lo")), "eth0=10.0.0.1");
}

TEST_CASE(filter_negated_exact) {
  CHECK_EQ(used(workstation(), ifname("^=eth1,lo,docker0,virbr0")), "eth0=10.0.0.1 eth10=10.0.10.1");
  // The other order is an exact list whose first name begins with "^".
  CHECK(contains(failure(workstation(), ifname("=^eth1")), "NCCL_SOCKET_IFNAME==^eth1"));
}

TEST_CASE(filter_oddities_are_nccls) {
  // One character, or none, is no filter.
  CHECK_EQ(used(workstation(), ifname("l")), used(workstation()));
  CHECK_EQ(used(workstation(), ifname("^")), used(workstation()));
  CHECK_EQ(used(workstation(), ifname("")), used(workstation()));
  // A port is cut off, empty names are ignored, a list of nothing is everything, and its negation nothing.
  CHECK_EQ(used(workstation(), ifname("eth0:1234")), "eth0=10.0.0.1");
  CHECK_EQ(used(workstation(), ifname(",,eth0,,")), "eth0=10.0.0.1");
  CHECK_EQ(select(workstation(), ifname(",,")).verdicts.size(), std::size_t{6});
  CHECK(contains(used(workstation(), ifname(",,")), "virbr0"));
  failure(workstation(), ifname("^="));
  // Blanks are part of a name.
  CHECK_EQ(used(workstation(), ifname("eth0, eth1")), "eth0=10.0.0.1");
  // NCCL_COMM_ID has no say where there is a filter, not even a bad one.
  CHECK_EQ(used(workstation(), {{"NCCL_SOCKET_IFNAME", "eth0"}, {"NCCL_COMM_ID", "[nonsense"}}), "eth0=10.0.0.1");
}

TEST_CASE(at_most_16_names_and_16_interfaces) {
  Machine machine;
  std::string names;
  for (int i = 0; i < 20; ++i) {
    machine.add("eth" + std::to_string(i), "10.0." + std::to_string(i) + ".1");
    names += (i == 0 ? "=eth" : ",eth") + std::to_string(19 - i);
  }
  const Outcome first16 = select(machine, ifname("eth"));
  CHECK(contains(first16.used(), "eth15="));
  CHECK(!contains(first16.used(), "eth16="));
  CHECK_EQ(first16.reason("eth16"), "skipped: NCCL uses at most 16 interfaces");
  // eth19 to eth4 are the first 16 of the list: eth3 is beyond it.
  const Outcome listed = select(machine, ifname(names));
  CHECK(!contains(listed.used(), "eth3="));
  CHECK(contains(listed.used(), "eth4="));
  CHECK(contains(listed.used(), "eth19="));
}

TEST_CASE(a_filter_that_matches_nothing_names_itself_and_what_exists) {
  const std::string message = failure(
      Machine().link("lo").link("eth0").link("eth1", 0).add("lo", "127.0.0.1").add("eth0", "10.0.0.1"), ifname("ens"));
  CHECK_EQ(message,
           "NCCL_SOCKET_IFNAME=ens: no usable network interface matches. This host has lo (127.0.0.1, "
           "skipped: does not match NCCL_SOCKET_IFNAME=ens), eth0 (10.0.0.1, skipped: does not match "
           "NCCL_SOCKET_IFNAME=ens), eth1 (skipped: not running (down, or no carrier)).\n"
           "Name one of these in NCCL_SOCKET_IFNAME, or unset it.");
}

TEST_CASE(a_filter_that_matches_only_a_dead_interface_says_so) {
  const std::string message = failure(Machine().link("eth1", IFF_UP).add("eth1", "10.0.1.1"), ifname("eth1"));
  CHECK(contains(message, "eth1 (10.0.1.1, skipped: not running (down, or no carrier))"));
}

// --- NCCL_SOCKET_FAMILY ---

TEST_CASE(family_chooses_the_address) {
  CHECK_EQ(used(workstation(), {{"NCCL_SOCKET_FAMILY", "AF_INET"}}), "eth0=10.0.0.1 eth1=10.0.1.1 eth10=10.0.10.1");
  const Outcome ipv6 = select(workstation(), {{"NCCL_SOCKET_FAMILY", "AF_INET6"}});
  CHECK_EQ(ipv6.used().substr(0, 25), "eth0=fd00::1 eth1=fe80::2");
  CHECK_EQ(ipv6.reason("eth10"), "skipped: no IPv6 address, and NCCL_SOCKET_FAMILY=AF_INET6");
}

TEST_CASE(ipv6_link_local_keeps_its_scope) {
  const Outcome outcome = select(workstation(), {{"NCCL_SOCKET_FAMILY", "AF_INET6"}, {"NCCL_SOCKET_IFNAME", "eth1"}});
  CHECK_EQ(outcome.verdicts[0].name, "eth1");
  CHECK_EQ(reinterpret_cast<const sockaddr_in6*>(outcome.verdicts[0].address.data())->sin6_scope_id, 3u);
}

TEST_CASE(ipv6_loopback_is_never_used) {
  const Variables variables = {{"NCCL_SOCKET_FAMILY", "AF_INET6"}, {"NCCL_SOCKET_IFNAME", "lo"}};
  const std::string message = failure(workstation(), variables);
  CHECK(contains(message, "lo (127.0.0.1, skipped: NCCL never uses the IPv6 loopback address)"));
  CHECK(contains(message, "NCCL_SOCKET_FAMILY may exclude the right one."));
  // Nor when lo has nothing else.
  failure(Machine().add("lo", "::1", "ffff::"));
}

TEST_CASE(a_bad_family_is_an_error) {
  for (const char* bad : {"AF_INET4", "af_inet", "inet", "6", " AF_INET"}) {
    CHECK_EQ(failure(workstation(), {{"NCCL_SOCKET_FAMILY", bad}}),
             std::string("NCCL_SOCKET_FAMILY=") + bad +
                 ": must be AF_INET (IPv4) or AF_INET6 (IPv6), or not set for either");
  }
  CHECK_EQ(used(workstation(), {{"NCCL_SOCKET_FAMILY", ""}}), used(workstation()));
}

// --- NCCL_COMM_ID ---

TEST_CASE(comm_id_picks_the_one_interface_of_its_subnet) {
  const Outcome outcome = select(workstation(), {{"NCCL_COMM_ID", "10.0.1.77:5000"}});
  CHECK_EQ(outcome.used(), "eth1=10.0.1.1");
  CHECK_EQ(outcome.reason("eth1"), "in the subnet of NCCL_COMM_ID=10.0.1.77:5000");
  CHECK_EQ(outcome.reason("eth0"), "skipped: eth1 is in the subnet of NCCL_COMM_ID=10.0.1.77:5000");
  // One interface, though the subnet of docker0's mask would hold two.
  CHECK_EQ(used(workstation(), {{"NCCL_COMM_ID", "172.17.200.1:1"}}), "docker0=172.17.0.1");
  CHECK_EQ(used(workstation(), {{"NCCL_COMM_ID", "127.0.0.1:5000"}}), "lo=127.0.0.1");
}

TEST_CASE(comm_id_outside_every_subnet_changes_nothing) {
  CHECK_EQ(used(workstation(), {{"NCCL_COMM_ID", "10.200.0.1:5000"}}), used(workstation()));
}

TEST_CASE(comm_id_with_ipv6) {
  CHECK_EQ(used(workstation(), {{"NCCL_COMM_ID", "[fd00::99]:5000"}}), "eth0=fd00::1");
  CHECK_EQ(used(workstation(), {{"NCCL_COMM_ID", "[fd01::99]:5000"}}), used(workstation()));
  // A link-local address without a scope is on no particular link: every link has that subnet.
  CHECK_EQ(used(workstation(), {{"NCCL_COMM_ID", "[fe80::99]:5000"}}), used(workstation()));
}

TEST_CASE(comm_id_that_cannot_be_read_is_an_error) {
  CHECK(contains(failure(workstation(), {{"NCCL_COMM_ID", "[fd00::99"}}),
                 "NCCL_COMM_ID=[fd00::99: must be <IPv4 address or host name>:<port>"));
  CHECK(contains(failure(workstation(), {{"NCCL_COMM_ID", "[10.0.0.1]:5000"}}), "NCCL_COMM_ID=[10.0.0.1]:5000: "));
  CHECK(contains(failure(workstation(), {{"NCCL_COMM_ID", ":5000"}}), "no such host"));
}

TEST_CASE(an_interface_without_netmask_is_in_no_subnet) {
  std::vector<InterfaceAddress> rows = {{"tun0", kRunning, ip("10.0.0.1"), {}}, {"eth0", kRunning, ip("10.0.1.1"), {}}};
  std::vector<InterfaceVerdict> verdicts;
  CHECK_OK(bagua_net::select_interfaces(rows, reader({{"NCCL_COMM_ID", "10.0.0.1:5000"}}), &verdicts));
  CHECK(verdicts[0].used && verdicts[1].used);
}

// --- this machine ---

TEST_CASE(the_loopback_of_this_machine_can_be_chosen) {
  std::vector<bagua_net::InterfaceChoice> choices;
  CHECK_OK(bagua_net::choose_network_interfaces(
      reader({{"NCCL_SOCKET_IFNAME", "=lo"}, {"NCCL_SOCKET_FAMILY", "AF_INET"}}), &choices));
  CHECK(!choices.empty());
  CHECK(choices[0].used);
  CHECK_EQ(choices[0].interface.name, "lo");
  CHECK_EQ(choices[0].interface.address.to_string(), "127.0.0.1:0");
  CHECK_EQ(choices[0].interface.speed_mbps, 0);
  CHECK_EQ(choices[0].interface.pci_path, std::string());
  CHECK(choices[0].interface.is_loopback);
  for (std::size_t i = 1; i < choices.size(); ++i) {
    CHECK(!choices[i].used);
    CHECK(choices[i].reason.rfind("skipped: ", 0) == 0);
  }
}

TEST_CASE(a_filter_that_this_machine_does_not_meet_still_lists_it) {
  std::vector<bagua_net::InterfaceChoice> choices;
  const Status status =
      bagua_net::choose_network_interfaces(reader({{"NCCL_SOCKET_IFNAME", "=no-such-nic"}}), &choices);
  CHECK(!status.is_ok());
  CHECK(contains(status.message(), "NCCL_SOCKET_IFNAME==no-such-nic"));
  CHECK(contains(status.message(), "lo (127.0.0.1"));
  CHECK(!choices.empty());
}

// What the kernel's messages about interfaces say, whole and cut short, and the states that follow from its tables.
// Real interfaces: tests/net/test_link_watch.py.
#include "os/link_watch.h"

#include <arpa/inet.h>
#include <linux/rtnetlink.h>
#include <net/if.h>

#include <cstring>
#include <string>
#include <vector>

#include "os/network_interface.h"
#include "support/check.h"

namespace bagua_net {
namespace {

constexpr unsigned kUp = IFF_UP | IFF_RUNNING;

SocketAddress ipv4(const std::string& text) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  CHECK_EQ(inet_pton(AF_INET, text.c_str(), &address.sin_addr), 1);
  return {reinterpret_cast<const sockaddr*>(&address), sizeof address};
}

NetworkInterface interface(const std::string& name, const std::string& address) {
  NetworkInterface made;
  made.name = name;
  made.address = ipv4(address);
  return made;
}

const std::vector<NetworkInterface>& watched() {
  static const std::vector<NetworkInterface> all = {interface("eth0", "10.0.0.1"),
                                                    interface("thunderbolt0", "10.0.1.1")};
  return all;
}

// thunderbolt0 is unplugged.
const std::vector<unsigned> kIndices = {7, 0};

template <typename Body>
std::string message(unsigned short type, const Body& body, const std::string& attributes = "") {
  nlmsghdr header{};
  header.nlmsg_type = type;
  header.nlmsg_len = static_cast<unsigned>(sizeof header + sizeof body + attributes.size());
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof header);
  bytes.append(reinterpret_cast<const char*>(&body), sizeof body);
  bytes += attributes;
  bytes.resize((bytes.size() + 3) / 4 * 4);
  return bytes;
}

std::string attribute(unsigned short type, const std::string& value) {
  rtattr header{};
  header.rta_type = type;
  header.rta_len = static_cast<unsigned short>(sizeof header + value.size());
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof header);
  bytes += value;
  bytes.resize((bytes.size() + 3) / 4 * 4);
  return bytes;
}

std::string link(unsigned short type, int index, const std::string& name) {
  ifinfomsg body{};
  body.ifi_index = index;
  return message(type, body, attribute(IFLA_MTU, "\x05\xdc") + attribute(IFLA_IFNAME, name + '\0'));
}

std::string address(unsigned short type, unsigned index) {
  ifaddrmsg body{};
  body.ifa_family = AF_INET;
  body.ifa_index = index;
  return message(type, body, attribute(IFA_LOCAL, "\x0a\x01"));
}

std::string route(unsigned short type, unsigned char table, unsigned flags = 0) {
  rtmsg body{};
  body.rtm_family = AF_INET;
  body.rtm_table = table;
  body.rtm_flags = flags;
  return message(type, body);
}

// "": nothing; "i", "r", "ir".
std::string told(const std::string& datagram) {
  // In memory of just that size, so that a sanitizer sees what is read behind the end.
  const std::vector<char> bytes(datagram.begin(), datagram.end());
  const LinkMessages found = read_link_messages(bytes.data(), bytes.size(), watched(), kIndices);
  return std::string(found.interfaces ? "i" : "") + (found.routes ? "r" : "");
}

}  // namespace

TEST_CASE(messages_about_watched_interfaces_are_found) {
  CHECK_EQ(told(link(RTM_NEWLINK, 7, "eth0")), "i");
  CHECK_EQ(told(link(RTM_DELLINK, 7, "eth0")), "i");
  CHECK_EQ(told(address(RTM_NEWADDR, 7)), "i");
  CHECK_EQ(told(address(RTM_DELADDR, 7)), "i");
  // Plugged in again: it has another number than before.
  CHECK_EQ(told(link(RTM_NEWLINK, 12, "thunderbolt0")), "i");
}

TEST_CASE(messages_about_other_interfaces_are_not) {
  CHECK_EQ(told(""), "");
  CHECK_EQ(told(link(RTM_NEWLINK, 8, "veth1a2b3c")), "");
  CHECK_EQ(told(link(RTM_DELLINK, 8, "veth1a2b3c")), "");
  CHECK_EQ(told(link(RTM_NEWLINK, 9, "eth0.100")), "");
  CHECK_EQ(told(link(RTM_NEWLINK, 9, "eth")), "");
  CHECK_EQ(told(address(RTM_NEWADDR, 8)), "");
  CHECK_EQ(told(message(RTM_NEWNEIGH, ndmsg{})), "");
}

TEST_CASE(routes_are_told_from_those_of_addresses_and_of_the_cache) {
  CHECK_EQ(told(route(RTM_NEWROUTE, RT_TABLE_MAIN)), "r");
  CHECK_EQ(told(route(RTM_DELROUTE, 100)), "r");
  CHECK_EQ(told(route(RTM_NEWROUTE, RT_TABLE_LOCAL)), "");
  CHECK_EQ(told(route(RTM_NEWROUTE, RT_TABLE_MAIN, RTM_F_CLONED)), "");
}

TEST_CASE(every_message_of_a_datagram_is_read) {
  const std::string other = link(RTM_DELLINK, 8, "veth1");
  CHECK_EQ(told(other + other + address(RTM_DELADDR, 7)), "i");
  CHECK_EQ(told(other + route(RTM_DELROUTE, RT_TABLE_MAIN) + link(RTM_NEWLINK, 7, "eth0") + other), "ir");
}

TEST_CASE(what_is_cut_short_counts_as_a_change) {
  const std::string other = link(RTM_NEWLINK, 8, "veth1a2b3c");
  for (std::size_t bytes = 1; bytes < other.size(); ++bytes) {
    CHECK_EQ(told(other.substr(0, bytes)), "ir");
    CHECK_EQ(told(other + other.substr(0, bytes)), "ir");
  }
}

TEST_CASE(lengths_that_cannot_be_are_a_change) {
  for (const unsigned length : {0u, 4u, 15u, 16u, 31u, 4096u, 0xffffffffu}) {
    std::string datagram = link(RTM_NEWLINK, 8, "veth1");
    std::memcpy(datagram.data(), &length, sizeof length);
    CHECK(told(datagram).find('i') != std::string::npos);
  }
  for (const int length : {0, 3, 200, 0xffff}) {
    ifinfomsg body{};
    body.ifi_index = 8;
    std::string attributes = attribute(IFLA_IFNAME, "veth1");
    const auto bytes = static_cast<unsigned short>(length);
    std::memcpy(attributes.data(), &bytes, sizeof bytes);
    CHECK_EQ(told(message(RTM_NEWLINK, body, attributes)), "i");
  }
}

TEST_CASE(a_name_without_an_end_is_read_within_its_attribute) {
  ifinfomsg body{};
  body.ifi_index = 8;
  CHECK_EQ(told(message(RTM_NEWLINK, body, attribute(IFLA_IFNAME, "eth0"))), "i");
  CHECK_EQ(told(message(RTM_NEWLINK, body, attribute(IFLA_IFNAME, "eth0x"))), "");
}

TEST_CASE(states_follow_from_the_kernels_tables) {
  const NetworkInterface& eth0 = watched()[0];
  const InterfaceAddress other{"eth1", kUp, ipv4("10.0.0.1"), {}};
  CHECK(link_state(eth0, {}) == LinkState::kAbsent);
  CHECK(link_state(eth0, {other}) == LinkState::kAbsent);
  CHECK(link_state(eth0, {{"eth0", 0, ipv4("10.0.0.1"), {}}}) == LinkState::kDown);
  CHECK(link_state(eth0, {{"eth0", IFF_UP, ipv4("10.0.0.1"), {}}}) == LinkState::kNoCarrier);
  // Just set up.
  CHECK(link_state(eth0, {{"eth0", IFF_UP | 1u << 16, ipv4("10.0.0.1"), {}}}) == LinkState::kUsable);
  CHECK(link_state(eth0, {{"eth0", kUp, {}, {}}, other}) == LinkState::kNoAddress);
  CHECK(link_state(eth0, {{"eth0", kUp, ipv4("10.0.0.2"), {}}}) == LinkState::kNoAddress);
  CHECK(
      link_state(eth0, {{"eth0", kUp, {}, {}}, {"eth0", kUp, ipv4("10.0.0.2"), {}}, {"eth0", kUp, eth0.address, {}}}) ==
      LinkState::kUsable);
}

TEST_CASE(states_are_described_with_names_and_addresses) {
  CHECK_EQ(describe(LinkState::kNoCarrier, watched()[0]), "eth0 has no carrier");
  CHECK_EQ(describe(LinkState::kNoAddress, watched()[0]), "eth0 lost its address 10.0.0.1");
}

TEST_CASE(a_quiet_machine_reports_nothing) {
  LinkWatch watch;
  CHECK_OK(watch.open({interface("lo", "127.0.0.1"), interface("nosuch0", "10.0.0.1")}));
  CHECK(watch.state(0) == LinkState::kUsable);
  CHECK(watch.state(1) == LinkState::kAbsent);
  const LinkWatch::Changes changes = watch.update(1000);
  CHECK(changes.interfaces.empty());
}

TEST_CASE(a_route_over_an_interface_is_told_from_one_over_another) {
  const NetworkInterface lo = interface("lo", "127.0.0.1");
  CHECK(has_route_over(ipv4("127.0.0.1"), lo));
  // 192.0.2.0/24 is for documentation: at most a default route leads there, over another interface.
  CHECK(!has_route_over(ipv4("192.0.2.1"), lo));
  CHECK(!has_route_over(ipv4("127.0.0.1"), interface("nosuch0", "127.0.0.1")));
}

}  // namespace bagua_net

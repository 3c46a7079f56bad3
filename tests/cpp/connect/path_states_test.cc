// Which pairs of network interfaces a comm's connections use. What is known of these paths: which are used, which are
// left out and until when, and how it is found that one works again.
#include "transport/connect/path_states.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <optional>
#include <string>
#include <vector>

#include "support/check.h"
#include "support/connection_ends.h"
#include "support/cut_connections.h"
#include "support/raw_handshake.h"
#include "transport/connect/nic_paths.h"

namespace bagua_net {
namespace {

constexpr NicPairing kNear{true, false};
constexpr NicPairing kRouted{false, true};
constexpr NicPairing kFar{false, false};

using Pairs = std::vector<std::pair<std::size_t, std::size_t>>;

}  // namespace

TEST_CASE(each_interface_has_a_pair_in_its_own_subnet) {
  CHECK((pair_nics({{kNear, kFar}, {kFar, kNear}}) == Pairs{{0, 0}, {1, 1}}));
  // The peer lists them in another order, and the kernel would send to both over the first.
  CHECK((pair_nics({{kRouted, kNear}, {kNear, kRouted}}) == Pairs{{0, 1}, {1, 0}}));
  // All in one subnet.
  CHECK((pair_nics({{kNear, kNear}, {kNear, kNear}}) == Pairs{{0, 0}, {1, 1}}));
}

TEST_CASE(hosts_with_different_numbers_of_interfaces) {
  CHECK((pair_nics({{kNear, kFar}}) == Pairs{{0, 0}}));
  CHECK((pair_nics({{kNear, kRouted}}) == Pairs{{0, 0}, {0, 1}}));
  CHECK((pair_nics({{kNear}, {kNear}}) == Pairs{{0, 0}, {1, 0}}));
  CHECK((pair_nics({{kNear}, {kFar}}) == Pairs{{0, 0}}));
  CHECK((pair_nics({{kNear, kNear, kNear, kNear}}) == Pairs{{0, 0}, {0, 1}, {0, 2}, {0, 3}}));
  CHECK((pair_nics({{kFar}, {kNear}}) == Pairs{{1, 0}}));
}

TEST_CASE(a_pair_that_is_used_already_stays) {
  // The fourth address was not known when the connection was opened.
  const std::vector<std::vector<NicPairing>> flat(4, std::vector<NicPairing>(4, kNear));
  CHECK((pair_nics(flat, {{1, 1}}) == Pairs{{1, 1}, {0, 0}, {2, 2}, {3, 3}}));
  CHECK((pair_nics(flat, {{3, 0}}) == Pairs{{3, 0}, {1, 1}, {2, 2}, {0, 3}}));
}

TEST_CASE(without_a_route_there_is_no_pair_but_one_to_fail_with) {
  CHECK((pair_nics({{kRouted, kRouted}, {kFar, kFar}}) == Pairs{{0, 0}, {0, 1}}));
  CHECK((pair_nics({{kFar, kFar}, {kFar, kFar}}) == Pairs{{0, 0}}));
}

TEST_CASE(large_messages_have_each_path_whichever_the_first_stream_has) {
  using Indices = std::vector<std::size_t>;
  CHECK((share_paths(1, 2, 1, false) == Indices{1}));
  CHECK((share_paths(2, 2, 0, false) == Indices{0, 1}));
  CHECK((share_paths(2, 2, 1, false) == Indices{1, 0}));
  CHECK((share_paths(3, 3, 1, false) == Indices{1, 2, 0}));
  CHECK((share_paths(5, 2, 0, true) == Indices{0, 0, 1, 0, 1}));
  CHECK((share_paths(5, 2, 1, true) == Indices{1, 1, 0, 1, 0}));
  CHECK((share_paths(4, 1, 0, true) == Indices{0, 0, 0, 0}));
}

TEST_CASE(paths_to_a_peer_with_further_addresses) {
  NetworkInterface lo;
  lo.name = "lo";
  lo.address = SocketAddress(AF_INET, {127, 0, 0, 1}, 0, 0);
  lo.is_loopback = true;
  ConnectHandle handle;
  handle.address = {127, 0, 0, 1};
  handle.port = 7;
  handle.further = {{{127, 0, 0, 2}, 8}};
  // On one host all interfaces are the same memory.
  const auto paths = find_paths({lo, lo}, {4, 5}, handle);
  CHECK_EQ(paths.size(), std::size_t{1});
  CHECK_EQ(paths[0].address.to_string(), std::string("127.0.0.1:7"));
  CHECK_EQ(paths[0].port, 4);
  CHECK(describe_mismatch({lo}, handle, paths).text.empty());
}

TEST_CASE(interfaces_without_a_pair_of_their_own_are_named) {
  const std::vector<NicPath> paths = {path_to("eth0", 1), path_to("eth1", 2)};
  const auto said = [&](std::vector<NicPath> pairs, std::size_t here, std::size_t further, std::size_t unnamed = 0) {
    std::vector<NetworkInterface> interfaces;
    for (std::size_t nic = 0; nic < here; ++nic) interfaces.push_back(path_to("eth", 9).interface);
    ConnectHandle handle;
    handle.further.resize(further);
    handle.unnamed = unnamed;
    return describe_mismatch(interfaces, handle, pairs).text;
  };
  CHECK_EQ(said(paths, 2, 1), "");
  CHECK_EQ(said({paths[0]}, 1, 0), "");
  CHECK(said({paths[0], path_to("eth1", 1)}, 2, 0)
            .find("1 interface of the peer at 10.0.0.1 are used as eth0 to 10.0.0.1, eth1 to 10.0.0.1") !=
        std::string::npos);
  CHECK(said({paths[0]}, 2, 1).find("2 interfaces of the peer") != std::string::npos);  // no route between the others
  CHECK(said(paths, 2, 1, 1).find("3 interfaces of the peer") != std::string::npos);
}

// --- what is known of paths

namespace {

const Status no_answer = Status::system_error("connect", ETIMEDOUT);

using Indices = std::vector<std::size_t>;

}  // namespace

// Each comm that is made while a path is silent would wait for it.
TEST_CASE(a_path_is_left_out_from_its_silence_on_until_it_works) {
  PathStates states;
  const std::vector<NicPath> paths = {path_to("eth0", 1), path_to("eth1", 2)};
  for (const NicPath& path : paths) states.on_connected(path, 0, 1000);
  states.on_silent(paths[1], 2000);
  CHECK((states.usable(paths, 100000) == Indices{0}));
  for (int comm = 0; comm < 3; ++comm) CHECK_EQ(states.begin_comm(paths, 100000), std::size_t{0});
  states.on_connected(paths[1], 0, 100000);
  CHECK((states.usable(paths, 100000) == Indices{0, 1}));
}

TEST_CASE(a_path_that_is_gone_is_left_out_until_it_is_back) {
  PathStates states;
  const std::vector<NicPath> paths = {path_to("eth0", 1), path_to("eth1", 2)};
  CHECK(states.why_gone(paths[1]).empty());
  states.set_link(paths[1].interface, false);
  CHECK_EQ(states.why_gone(paths[1]), "the network interface eth1 is gone");
  CHECK((states.usable(paths, 0) == Indices{0}));
  states.set_link(paths[1].interface, true);
  CHECK((states.usable(paths, 0) == Indices{0, 1}));
  states.on_address_lost(paths[0]);
  CHECK_EQ(states.why_gone(paths[0]), "the peer has lost its address 10.0.0.1");
  CHECK((states.usable(paths, 0) == Indices{1}));
  states.on_connected(paths[0], 0, 1000);
  CHECK((states.usable(paths, 0) == Indices{0, 1}));
  // There never was a route, as far as the kernel says, and it works.
  states.look_at_routes();
  CHECK((states.usable(paths, 0) == Indices{0, 1}));
}

TEST_CASE(a_pair_that_never_worked_is_left_out_for_a_while) {
  PathStates states;
  const std::vector<NicPath> paths = {path_to("eth0", 1), path_to("eth1", 2)};
  CHECK((states.usable(paths, 0) == Indices{0, 1}));
  // One packet may be lost.
  CHECK(states.on_failed(paths[1], no_answer, 0).text.empty());
  CHECK((states.usable(paths, 0) == Indices{0, 1}));
  CHECK(!states.on_failed(paths[1], no_answer, 0).text.empty());
  CHECK((states.usable(paths, 0) == Indices{0}));
  CHECK(states.is_left_out(paths[1], 1000));
  CHECK((states.usable(paths, 60000) == Indices{0, 1}));
  // Better one that may not work than none.
  for (int i = 0; i < 2; ++i) states.on_failed(paths[0], no_answer, 0);
  CHECK((states.usable(paths, 1000) == Indices{0, 1}));
}

// What has been left out before may work again, and is tried as well then.
TEST_CASE(a_pair_that_has_worked_is_left_out_for_seconds_only) {
  PathStates states;
  const NicPath path = path_to("eth0", 1);
  states.on_connected(path, 0, 0);
  CHECK(states.on_failed(path, no_answer, 0).text.empty());
  CHECK(!states.is_left_out(path, 0));
  for (int i = 1; i < 10; ++i) CHECK(states.on_failed(path, no_answer, i).text.empty());
  CHECK(states.is_left_out(path, 10));
  CHECK(!states.is_left_out(path, 10000));
}

TEST_CASE(first_streams_take_turns_on_the_fastest_of_the_near_paths) {
  const auto begin = [&](std::vector<int> speeds_mbps, const std::vector<std::int64_t>& round_trips_us,
                         int handshakes = 1) {
    PathStates states;
    std::vector<NicPath> paths;
    for (const int mbps : speeds_mbps) {
      const int number = static_cast<int>(paths.size());
      paths.push_back(path_to(("eth" + std::to_string(number)).c_str(), static_cast<std::uint8_t>(number)));
      paths.back().interface.speed_mbps = mbps;
    }
    for (std::size_t path = 0; path < handshakes * round_trips_us.size(); ++path) {
      const std::size_t index = path % round_trips_us.size();
      states.on_connected(paths[index], round_trips_us[index], 0);
    }
    std::string begun;
    for (int comm = 0; comm < 4; ++comm) begun += std::to_string(states.begin_comm(paths, 0));
    return begun;
  };
  CHECK_EQ(begin({100, 100}, {}), "0101");
  CHECK_EQ(begin({100, 100, 100}, {}), "0120");
  CHECK_EQ(begin({100, 25}, {}), "0000");
  CHECK_EQ(begin({25, 100, 100}, {}), "1212");
  CHECK_EQ(begin({100, 100}, {30, 500}), "0101");  // handshakes vary by so much where a CPU is busy,
  CHECK_EQ(begin({100, 100}, {30, 550}), "0000");
  CHECK_EQ(begin({100, 100}, {30, 100}, 4), "0101");  // and the shortest of several by this much
  CHECK_EQ(begin({100, 100}, {30, 200}, 4), "0000");
  CHECK_EQ(begin({100, 100, 100}, {2000, 100, 150}), "1212");
  CHECK_EQ(begin({100, 25}, {2000, 100}), "1111");
  // The kernel may say it of none, or of some.
  CHECK_EQ(begin({0, 0}, {}), "0000");
  CHECK_EQ(begin({0, 100}, {}), "0000");
  CHECK_EQ(begin({100, 0}, {}), "0000");
}

TEST_CASE(first_streams_are_spread_to_each_peer_and_to_all_and_of_all_processes) {
  for (std::size_t process = 0; process < 3; ++process) {
    PathStates states(process);
    const auto begin = [&](std::uint8_t peer) {
      std::vector<NicPath> paths = {path_to("eth0", peer), path_to("eth1", static_cast<std::uint8_t>(peer + 100))};
      for (NicPath& path : paths) path.interface.speed_mbps = 100;
      return states.begin_comm(paths, 0);
    };
    for (std::size_t round = 0; round < 3; ++round) {
      for (std::uint8_t peer = 0; peer < 9; ++peer) CHECK_EQ(begin(peer), (process + peer + round) % 2);
    }
  }
}

// Nor does it catch up once it works.
TEST_CASE(a_path_that_cannot_connect_has_no_turn) {
  PathStates states;
  std::vector<NicPath> paths = {path_to("eth0", 1), path_to("eth1", 2)};
  for (NicPath& path : paths) path.interface.speed_mbps = 100;
  for (int i = 0; i < 2; ++i) states.on_failed(paths[1], no_answer, 0);
  for (int comm = 0; comm < 10; ++comm) CHECK_EQ(states.begin_comm(paths, 0), std::size_t{0});
  states.on_connected(paths[1], 0, 0);
  for (std::size_t comm = 0; comm < 4; ++comm) CHECK_EQ(states.begin_comm(paths, 0), comm % 2);
}

TEST_CASE(a_first_stream_stays_unless_another_path_is_much_shorter) {
  PathStates states;
  const std::vector<NicPath> paths = {path_to("eth0", 1), path_to("eth1", 2)};
  CHECK_EQ(states.nearest(paths, 1, 0), std::size_t{1});
  states.on_connected(paths[0], 100, 0);
  states.on_connected(paths[1], 550, 0);
  CHECK_EQ(states.nearest(paths, 1, 0), std::size_t{1});  // handshakes vary by so much
  states.on_connected(paths[0], 20, 0);
  CHECK_EQ(states.nearest(paths, 1, 0), std::size_t{0});
}

TEST_CASE(a_path_works_again_once_a_connection_was_opened_over_it) {
  PathStates probes;
  std::optional<RawListener> listener(std::in_place);
  const NicPath path = path_to(listener->address);
  std::int64_t now_ms = 1000000;
  CHECK(!probes.works(path, now_ms));
  wait_until([&] { return probes.works(path, now_ms); }, "the connection");
  // All comms of the process get that answer, for a second.
  listener.reset();
  CHECK(probes.works(path, now_ms + 999));
  for (int look = 0; look < 5; ++look) {
    now_ms += 1000;
    CHECK(!probes.works(path, now_ms));
  }
}

// As where a switch has a smaller MTU.
TEST_CASE(a_path_that_loses_large_packets_does_not_work) {
  PathStates probes;
  const RawListener listener;
  const NicPath path = path_to(listener.address);
  lose_packets(listener.socket.get(), 1000);
  std::int64_t now_ms = 1000000;
  const auto works = [&] { return probes.works(path, now_ms); };
  const auto send_packet = [&] { wait_until([&] { return works() || probes.is_due(path); }, "the connection"); };
  const auto lose_packet = [&] {
    now_ms += 1000;
    CHECK(!works());
    send_packet();
  };
  send_packet();
  lose_packet();
  CHECK_EQ(probes.take_lost_packet_bytes(path), 0u);
  lose_packet();
  CHECK(probes.take_lost_packet_bytes(path) > 1000);
  lose_packet();
  CHECK_EQ(probes.take_lost_packet_bytes(path), 0u);  // it was said
  CHECK_EQ(probes.answered_ms(path), 0);
  hear_again(listener.socket.get());  // of what connects from now on
  now_ms += 1000;
  wait_until(works, "the answer");
  CHECK(probes.answered_ms(path) > 0);
}

// However many comms ask, and however soon the answer comes: a firewall may refuse a pair for as long as the job runs.
TEST_CASE(a_path_is_tried_once_a_second) {
  PathStates probes;
  PortOfNobody port;
  const NicPath path = path_to(port.address);
  std::int64_t now_ms = 1000000;
  CHECK(!probes.works(path, now_ms));
  port.listen();
  const auto was_tried = [&] {
    pollfd state{port.socket.get(), POLLIN, 0};
    return ::poll(&state, 1, 0) > 0;
  };
  for (int comm = 0; comm < 10; ++comm) CHECK(!probes.works(path, now_ms += 99));
  CHECK(!was_tried());
  CHECK(!probes.works(path, now_ms += 10));
  CHECK(was_tried());
}

}  // namespace bagua_net

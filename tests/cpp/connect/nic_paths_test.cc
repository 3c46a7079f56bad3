// Which pairs of network interfaces a comm's connections use, and when a pair is left out.
#include "transport/connect/nic_paths.h"

#include <sys/socket.h>

#include <cerrno>

#include "support/check.h"

namespace bagua_net {
namespace {

constexpr NicPairing kNear{true, false};
constexpr NicPairing kRouted{false, true};
constexpr NicPairing kFar{false, false};

const Status no_answer = Status::system_error("connect", ETIMEDOUT);

using Pairs = std::vector<std::pair<std::size_t, std::size_t>>;

NicPath path_to(const char* interface, std::uint8_t last_byte) {
  NicPath path;
  path.interface.name = interface;
  path.address = SocketAddress(AF_INET, {10, 0, 0, last_byte}, 1, 0);
  return path;
}

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
  CHECK((share_paths(5, 2, 1, true) == Indices{1, 0, 1, 0, 1}));
  CHECK((share_paths(4, 1, 0, true) == Indices{0, 0, 0, 0}));
}

TEST_CASE(a_pair_that_never_worked_is_left_out_for_a_while) {
  RareLog log;
  PathExperience experience(&log);
  const std::vector<NicPath> paths = {path_to("eth0", 1), path_to("eth1", 2)};
  using Indices = std::vector<std::size_t>;
  CHECK((experience.usable(paths, 0) == Indices{0, 1}));
  // One packet may be lost.
  experience.on_failed(paths[1], no_answer, 0);
  CHECK((experience.usable(paths, 0) == Indices{0, 1}));
  experience.on_failed(paths[1], no_answer, 0);
  CHECK((experience.usable(paths, 0) == Indices{0}));
  CHECK(experience.is_left_out(paths[1], 1000));
  CHECK_EQ(log.take().size(), std::size_t{1});
  CHECK((experience.usable(paths, 60000) == Indices{0, 1}));
  // Better one that may not work than none.
  for (int i = 0; i < 2; ++i) experience.on_failed(paths[0], no_answer, 0);
  CHECK((experience.usable(paths, 1000) == Indices{0, 1}));
}

TEST_CASE(a_pair_that_has_worked_is_never_left_out) {
  RareLog log;
  PathExperience experience(&log);
  const NicPath path = path_to("eth0", 1);
  experience.on_connected(path, 0);
  for (int i = 0; i < 10; ++i) experience.on_failed(path, no_answer, i);
  CHECK(!experience.is_left_out(path, 10));
  CHECK(log.take().empty());
}

TEST_CASE(first_streams_take_turns_on_the_fastest_of_the_near_paths) {
  RareLog log;
  const auto begin = [&](std::vector<int> speeds_mbps, const std::vector<std::int64_t>& round_trips_us) {
    PathExperience experience(&log);
    std::vector<NicPath> paths;
    for (const int mbps : speeds_mbps) {
      const int number = static_cast<int>(paths.size());
      paths.push_back(path_to(("eth" + std::to_string(number)).c_str(), static_cast<std::uint8_t>(number)));
      paths.back().interface.speed_mbps = mbps;
    }
    for (std::size_t path = 0; path < round_trips_us.size(); ++path) {
      experience.on_connected(paths[path], round_trips_us[path]);
    }
    std::string begun;
    for (int comm = 0; comm < 4; ++comm) begun += std::to_string(experience.begin_comm(paths, 0));
    return begun;
  };
  CHECK_EQ(begin({100, 100}, {}), "0101");
  CHECK_EQ(begin({100, 100, 100}, {}), "0120");
  CHECK_EQ(begin({100, 25}, {}), "0000");
  CHECK_EQ(begin({25, 100, 100}, {}), "1212");
  CHECK_EQ(begin({100, 100}, {30, 100}), "0101");  // handshakes vary by so much
  CHECK_EQ(begin({100, 100}, {30, 200}), "0000");
  CHECK_EQ(begin({100, 100, 100}, {2000, 100, 150}), "1212");
  CHECK_EQ(begin({100, 25}, {2000, 100}), "1111");
  // The kernel may say it of none, or of some.
  CHECK_EQ(begin({0, 0}, {}), "0000");
  CHECK_EQ(begin({0, 100}, {}), "0000");
  CHECK_EQ(begin({100, 0}, {}), "0000");
}

TEST_CASE(first_streams_are_spread_to_each_peer_and_to_all_and_of_all_processes) {
  for (std::size_t process = 0; process < 3; ++process) {
    RareLog log;
    PathExperience experience(&log, process);
    const auto begin = [&](std::uint8_t peer) {
      std::vector<NicPath> paths = {path_to("eth0", peer), path_to("eth1", static_cast<std::uint8_t>(peer + 100))};
      for (NicPath& path : paths) path.interface.speed_mbps = 100;
      return experience.begin_comm(paths, 0);
    };
    for (std::size_t round = 0; round < 3; ++round) {
      for (std::uint8_t peer = 0; peer < 9; ++peer) CHECK_EQ(begin(peer), (process + peer + round) % 2);
    }
  }
}

// Nor does it catch up once it works.
TEST_CASE(a_path_that_cannot_connect_has_no_turn) {
  RareLog log;
  PathExperience experience(&log);
  std::vector<NicPath> paths = {path_to("eth0", 1), path_to("eth1", 2)};
  for (NicPath& path : paths) path.interface.speed_mbps = 100;
  for (int i = 0; i < 2; ++i) experience.on_failed(paths[1], no_answer, 0);
  for (int comm = 0; comm < 10; ++comm) CHECK_EQ(experience.begin_comm(paths, 0), std::size_t{0});
  experience.on_connected(paths[1], 0);
  for (std::size_t comm = 0; comm < 4; ++comm) CHECK_EQ(experience.begin_comm(paths, 0), comm % 2);
}

TEST_CASE(a_first_stream_stays_unless_another_path_is_much_shorter) {
  RareLog log;
  PathExperience experience(&log);
  const std::vector<NicPath> paths = {path_to("eth0", 1), path_to("eth1", 2)};
  CHECK_EQ(experience.nearest(paths, 1, 0), std::size_t{1});
  experience.on_connected(paths[0], 100);
  experience.on_connected(paths[1], 550);
  CHECK_EQ(experience.nearest(paths, 1, 0), std::size_t{1});  // handshakes vary by so much
  experience.on_connected(paths[0], 20);
  CHECK_EQ(experience.nearest(paths, 1, 0), std::size_t{0});
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

}  // namespace bagua_net

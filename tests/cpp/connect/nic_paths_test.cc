// Which pairs of network interfaces a comm's connections use.
#include "transport/connect/nic_paths.h"

#include "support/connection_ends.h"

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

}  // namespace bagua_net

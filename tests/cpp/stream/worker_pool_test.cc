// WorkerPool: which workers serve a comm, by what lies between its ends.
#include "transport/stream/worker_pool.h"

#include <algorithm>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "support/check.h"
#include "support/comm_parts.h"
#include "support/process_limits.h"

namespace bagua_net {
namespace {

constexpr int kStreams = 16;

std::set<EventLoopWorker*> workers_of(WorkerPool& pool, PeerLocation location, int comms) {
  std::set<EventLoopWorker*> found;
  for (int comm = 0; comm < comms; ++comm) {
    for (const Direction direction : {Direction::kSend, Direction::kReceive}) {
      const WorkerPool::Lane lane = pool.open_lane(direction, location, static_cast<std::size_t>(comm));
      for (int index = 1; index < kStreams; ++index) {
        EventLoopWorker* worker = nullptr;
        CHECK_OK(pool.assign(lane, index, &worker));
        found.insert(worker);
      }
    }
  }
  return found;
}

TEST_CASE(connections_between_hosts_get_the_first_workers_only) {
  WorkerPool pool(6, 50, any_cpu(), 2);
  const std::set<EventLoopWorker*> network = workers_of(pool, PeerLocation::kBetweenHosts, 5);
  const std::set<EventLoopWorker*> all = workers_of(pool, PeerLocation::kWithinHost, 5);
  CHECK_EQ(network.size(), std::size_t{2});
  CHECK_EQ(all.size(), std::size_t{6});
  for (EventLoopWorker* worker : network) CHECK(all.count(worker) == 1);
  pool.stop();
}

TEST_CASE(the_workers_of_a_network_follow_from_its_speed_and_the_cipher) {
  for (const int mbps : {1'000, 10'000, 50'000}) CHECK_EQ(network_workers(mbps, Cipher::kNone, 64), 4);
  for (const int mbps : {0, 100'000}) CHECK_EQ(network_workers(mbps, Cipher::kNone, 64), 8);
  CHECK_EQ(network_workers(0, Cipher::kAes256Gcm, 64), 10);
  CHECK_EQ(network_workers(0, Cipher::kChaCha20Poly1305, 64), 20);
  for (const int mbps : {1'000, 10'000, 48'000}) {
    CHECK_EQ(network_workers(mbps, Cipher::kAes256Gcm, 64), 6);
    CHECK_EQ(network_workers(mbps, Cipher::kChaCha20Poly1305, 64), 12);
  }
  CHECK_EQ(network_workers(50'001, Cipher::kNone, 64), 5);
  CHECK_EQ(network_workers(400'000, Cipher::kNone, 64), 32);
  CHECK_EQ(network_workers(100'000, Cipher::kAes256Gcm, 64), 13);
  // Half of the CPUs, but four, unless they encrypt.
  CHECK_EQ(network_workers(0, Cipher::kNone, 12), 6);
  CHECK_EQ(network_workers(0, Cipher::kNone, 2), 4);
  CHECK_EQ(network_workers(0, Cipher::kAes256Gcm, 12), 10);
  CHECK_EQ(network_workers(50'000, Cipher::kNone, 16, true), 6);
  CHECK_EQ(network_workers(200'000, Cipher::kNone, 64, true), 24);
  CHECK_EQ(network_workers(50'000, Cipher::kNone, 2, true), 4);
}

TEST_CASE(connections_between_hosts_get_all_workers_of_a_small_pool) {
  WorkerPool pool(2, 50, any_cpu(), 4);
  CHECK_EQ(workers_of(pool, PeerLocation::kBetweenHosts, 3).size(), std::size_t{2});
  pool.stop();
}

TEST_CASE(the_first_streams_of_both_directions_have_different_workers) {
  for (const PeerLocation location : {PeerLocation::kWithinHost, PeerLocation::kBetweenHosts}) {
    WorkerPool pool(8, 50, any_cpu(), 4);
    EventLoopWorker* sending = nullptr;
    EventLoopWorker* receiving = nullptr;
    CHECK_OK(pool.assign(pool.open_lane(Direction::kSend, location, 0), 1, &sending));
    CHECK_OK(pool.assign(pool.open_lane(Direction::kReceive, location, 0), 1, &receiving));
    CHECK(sending != receiving);
    pool.stop();
  }
}

// All-reduce of 1 MiB uses the first two channels between hosts, and other messages all of them.
TEST_CASE(the_first_streams_of_the_first_channels_meet_no_others_whichever_handshake_ends_first) {
  std::mt19937 random(1);
  for (const int width : {4, 6, 8}) {
    std::vector<std::pair<Direction, std::size_t>> comms;
    for (std::size_t turn = 0; turn < 8; ++turn) {
      for (const Direction direction : {Direction::kSend, Direction::kReceive}) comms.emplace_back(direction, turn);
    }
    std::shuffle(comms.begin(), comms.end(), random);
    WorkerPool pool(10, 50, any_cpu(), width);
    std::set<EventLoopWorker*> first;
    for (const auto& [direction, turn] : comms) {
      EventLoopWorker* worker = nullptr;
      CHECK_OK(pool.assign(pool.open_lane(direction, PeerLocation::kBetweenHosts, turn), 1, &worker));
      if (turn < static_cast<std::size_t>(width) / 2) CHECK(first.insert(worker).second);
    }
    pool.stop();
  }
}

TEST_CASE(comms_within_the_host_leave_no_worker_of_the_network_idle) {
  WorkerPool pool(8, 50, any_cpu(), 4);
  std::set<EventLoopWorker*> network;
  for (std::size_t turn = 0; turn < 8; ++turn) {
    const PeerLocation location = turn % 2 == 0 ? PeerLocation::kWithinHost : PeerLocation::kBetweenHosts;
    EventLoopWorker* worker = nullptr;
    CHECK_OK(pool.assign(pool.open_lane(Direction::kSend, location, turn), 1, &worker));
    if (location == PeerLocation::kBetweenHosts) network.insert(worker);
  }
  CHECK_EQ(network.size(), std::size_t{4});
  pool.stop();
}

}  // namespace
TEST_CASE(fewer_workers_do_where_the_system_has_no_more) {
  WorkerPool pool(4, 50, any_cpu());
  {
    const DescriptorLimit limit(next_descriptor() + 5);  // two workers have two each
    CHECK_EQ(workers_of(pool, PeerLocation::kWithinHost, 2).size(), 2u);
  }
  CHECK_EQ(pool.size(), 2);
  pool.stop();
  const DescriptorLimit limit(next_descriptor());
  pool.open_lane(Direction::kSend, PeerLocation::kWithinHost, 0);
  CHECK_EQ(pool.size(), 0);
  CHECK(pool.recovery() == nullptr);
  pool.stop();
}

}  // namespace bagua_net

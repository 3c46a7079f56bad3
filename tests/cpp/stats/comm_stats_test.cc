// What comms count: messages by path and size, what is outstanding, chunks that come before their receive, failures.
#include <memory>
#include <string>
#include <vector>

#include "stats/comm_stats.h"
#include "support/comm_pair.h"
#include "support/stalling_stream.h"

namespace bagua_net {
namespace {

int outstanding(const CommSlot* slot) {
  int count = 0;
  for (const Word& posted : slot->posted_ms) count += posted.load() != 0 ? 1 : 0;
  return count;
}

}  // namespace

TEST_CASE(messages_are_counted_by_path_and_size) {
  CommPair connection(over_pipes(1));
  const auto small = make_message(0, 100);
  const auto large = make_message(1, 5000);
  std::vector<std::uint8_t> room(5000);
  std::vector<std::uint8_t> more_room(5000);
  Request* const first = connection.receive(room);
  Request* const second = connection.receive(more_room);
  CHECK_EQ(outstanding(connection.receiving_slot), 2);
  Request* const sent = connection.send(small);
  CHECK_EQ(outstanding(connection.sending_slot), 1);
  CHECK_OK(outcome({sent, first}));
  CHECK_EQ(outstanding(connection.sending_slot), 0);
  CHECK_EQ(outstanding(connection.receiving_slot), 1);
  CHECK_OK(outcome({connection.send(large), second}));
  CHECK_EQ(outstanding(connection.receiving_slot), 0);
  const CommCounters& near = connection.sending_slot->counters;
  CHECK_EQ(near.inline_messages.get(), std::uint64_t{2});
  CHECK_EQ(near.inline_bytes.get(), std::uint64_t{5100});
  CHECK_EQ(near.striped_messages.get(), std::uint64_t{0});
  CHECK_EQ(near.message_sizes[0].get(), std::uint64_t{1});
  CHECK_EQ(near.message_sizes[3].get(), std::uint64_t{1});
  const CommCounters& far = connection.receiving_slot->counters;
  CHECK_EQ(far.received_messages.get(), std::uint64_t{2});
  CHECK_EQ(far.received_bytes.get(), std::uint64_t{5100});
}

TEST_CASE(large_messages_count_as_striped_and_as_a_decision) {
  CommPair connection(over_tcp(3, 2));
  const auto message = make_message(0, 4u << 20);
  std::vector<std::uint8_t> room(message.size());
  Request* const received = connection.receive(room);
  CHECK_OK(outcome({connection.send(message), received}));
  CHECK(room == message);
  const CommCounters& near = connection.sending_slot->counters;
  CHECK_EQ(near.striped_messages.get(), std::uint64_t{1});
  CHECK_EQ(near.striped_bytes.get(), std::uint64_t{4u << 20});
  CHECK_EQ(near.handed_to_asleep.get() + near.handed_to_awake.get(), std::uint64_t{1});
}

TEST_CASE(a_chunk_before_its_receive_is_a_stall_of_the_receiver) {
  const auto page = std::make_shared<StatsPage>(false, JobPosition{}, "node1", 0);
  CommStats stats(page, {CommDirection::kReceive, true, "lo", "sender"});
  StreamStats stream = stats.open_stream(0);
  stream.park();
  stream.park();  // looked at again, and still not posted
  CHECK_EQ(stream->parked.get(), std::uint64_t{1});
  CHECK_EQ(stream.slot().state.load(), static_cast<std::uint32_t>(SlotState::kParked));
  stream.resume();
  stream.resume();
  CHECK_EQ(stream.slot().state.load(), static_cast<std::uint32_t>(SlotState::kLive));
  CHECK(stream->parked_ns.get() > 0);
}

TEST_CASE(a_stream_shows_what_the_kernel_says_of_it) {
  auto [near, far] = tcp_pair();
  ChunkScheduler scheduler({1, 65536, 524288});
  IgnoredFailures failures;
  SendStream stream(make_tcp_byte_stream(std::move(near)), &failures, 0, &scheduler, false, nullptr);
  const auto page = std::make_shared<StatsPage>(false, JobPosition{}, "node1", 0);
  CommStats stats(page, {CommDirection::kSend, false, "lo", "receiver"});
  StreamStats shown = stats.open_stream(0);
  const StreamSlot& slot = shown.slot();
  stream.set_stats(std::move(shown));
  CHECK_EQ(slot.sampled_ms.get(), std::uint64_t{0});
  stream.sample_delivery();
  CHECK(slot.sampled_ms.get() > 0);
  CHECK(slot.round_trip_us.get() > 0);
}

// One slot of the page for each place of a comm, whatever connections were lost.
TEST_CASE(a_stream_goes_on_counting_where_the_one_it_replaces_ended) {
  const auto page = std::make_shared<StatsPage>(false, JobPosition{}, "node1", 0);
  CommStats stats(page, {CommDirection::kSend, false, "lo", "receiver"});
  StreamStats lost = stats.open_stream(0);
  lost->bytes.add(5);
  lost.set_kernel({3, 700, 0, 0});
  lost.set_state(SlotState::kLost);
  const StreamStats next = stats.open_stream(0);
  CHECK_EQ(next.slot().state.load(), static_cast<std::uint32_t>(SlotState::kLive));
  next->bytes.add(6);
  next.set_kernel({1, 20, 0, 0});
  CHECK_EQ(next->bytes.get(), 11u);
  CHECK_EQ(next->retransmits.get(), 4u);
  CHECK_EQ(next->busy_us.get(), 720u);
  const StreamStats other = stats.open_stream(1);
  CHECK_EQ(other->bytes.get(), 0u);
}

TEST_CASE(a_failed_comm_says_so_in_the_page) {
  const auto page = std::make_shared<StatsPage>(false, JobPosition{}, "node1", 0);
  CommStats stats(page, {CommDirection::kReceive, true, "lo", "sender"});
  const CommSlot& slot = stats.slot();
  WorkerPool pool(0, 0, any_cpu());
  std::vector<std::unique_ptr<ByteStream>> streams;
  streams.push_back(TwoWayEnd::make({}, {}, 1).second);
  std::unique_ptr<RecvComm> receiver;
  CHECK_OK(RecvComm::create(std::move(streams), "sender", nullptr, &pool, &receiver, RecvPolicy{}, std::move(stats)));
  receiver->fail(Status::remote_error("the peer is gone"));
  receiver->fail(Status::remote_error("a second failure"));
  CHECK_EQ(slot.state.load(), static_cast<std::uint32_t>(CommState::kFailed));
}

}  // namespace bagua_net

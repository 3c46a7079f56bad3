// Send and receive comms over byte streams that deliver one byte at a time, interrupt and refuse: whatever the
// streams do, every message arrives whole, in its own receive, exactly once.
#include <cerrno>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "support/comm_pair.h"
#include "support/traffic.h"
#include "wire/frames.h"

namespace bagua_net {
namespace {

SendPolicy striping(std::size_t inline_bytes, std::size_t min_chunk_bytes, std::size_t max_chunk_bytes) {
  SendPolicy policy;
  policy.inline_bytes = inline_bytes;
  policy.min_chunk_bytes = min_chunk_bytes;
  policy.max_chunk_bytes = max_chunk_bytes;
  return policy;
}

// A connection without threads: the test's own calls drive both ends.
CommPair::Settings connection(std::size_t streams, TwoWayBehaviour behaviour = {}, unsigned seed = 1,
                              const SendPolicy& policy = {}) {
  CommPair::Settings settings = over_pipes(streams, behaviour, seed);
  settings.sending = policy;
  return settings;
}

// In a random order, as deep as the comm allows; each receive has room for `extra` bytes more than its message.
void exchange(CommPair& pair, const std::vector<std::size_t>& sizes, unsigned seed, std::size_t extra) {
  Traffic(*pair.sender, *pair.receiver, {0, 1 + seed % 4, extra, seed}).run(sizes);
}

Status test_until_error(Request* request) {
  for (int i = 0; i < 10000; ++i) {
    bool done = false;
    std::size_t bytes = 0;
    const Status status = request->test(&done, &bytes);
    if (!status.is_ok()) return status;
    CHECK(!done);
  }
  return Status::ok();
}

std::vector<std::uint8_t> frame_of(const FrameHeader& header, std::uint8_t value = 7) {
  std::vector<std::uint8_t> frame(kFrameHeaderBytes + header.payload_bytes, value);
  encode_frame_header(header, frame.data());
  return frame;
}

// The network broke the connection before it had carried anything.
class ResetStream final : public ByteStream {
 public:
  ssize_t read(const iovec*, std::size_t) override { return refuse(); }
  ssize_t write(const iovec*, std::size_t) override { return refuse(); }
  int fd() const override { return -1; }
  void shutdown() override {}

 private:
  static ssize_t refuse() {
    errno = ECONNRESET;
    return -1;
  }
};

// A frame as a broken or hostile peer could send it, against one posted receive of 16 bytes; returns the error.
Status receive_hostile_frame(const FrameHeader& header) {
  CommPair pair(connection(1));
  std::vector<std::uint8_t> room(16);
  Request* request = pair.receive(room);
  std::vector<std::uint8_t> bytes(kFrameHeaderBytes);
  encode_frame_header(header, bytes.data());
  pair.near_ends[0]->write_all(bytes);
  return test_until_error(request);
}

}  // namespace

TEST_CASE(messages_survive_streams_that_move_few_bytes_interrupt_and_refuse) {
  for (unsigned seed = 1; seed <= static_cast<unsigned>(check::rounds(20)); ++seed) {
    std::mt19937 random(seed);
    std::vector<std::size_t> sizes;
    TwoWayBehaviour behaviour{1, 1, 20, 30, 64};
    if (seed <= 5) {
      // A byte at a time, on one stream.
      CommPair pair(connection(1, behaviour, seed));
      exchange(pair, {0, 1, 31, 32, 33, 0, 100, 1000, 0}, seed, 0);
      // On four, in chunks.
      CommPair other(connection(4, behaviour, seed, striping(64, 16, 64)));
      exchange(other, {700, 0, 1, 4097, 15, 16, 17, 333, 0, 64}, seed, 0);
    }
    // Deeper than the ring of requests.
    const std::size_t most = 1 + random() % 200;
    behaviour = {most, most, 10, 10, 1 + random() % 500};
    for (int i = 0; i < 200; ++i) sizes.push_back(random() % 3 == 0 ? random() % 8 : random() % 1500);
    CommPair pair(connection(1 + seed % 5, behaviour, seed, striping(128, 32, 256)));
    exchange(pair, sizes, seed, seed % 3);
  }
}

TEST_CASE(messages_larger_than_the_staging_buffer) {
  CommPair pair(connection(2, {60000, 60000, 5, 5, 100000}, 3, striping(65536, 4096, 16384)));
  exchange(pair, {100000, 8191, 8192, 8193, 8160, 40000}, 3, 100);
}

TEST_CASE(failure_is_sticky_and_reaches_the_peer) {
  CommPair pair(connection(2));
  std::uint8_t byte = 7;
  Request* receive = pair.receive(&byte, 1);
  pair.receiver->fail(Status::remote_error("first"));
  pair.receiver->fail(Status::remote_error("second"));
  check_contains(test_until_error(receive).message(), "first");
  Request* again = receive;
  check_contains(pair.receiver->irecv(&byte, 1, nullptr, &again).message(), "first");
  CHECK(again == nullptr);
  const std::vector<std::uint8_t> message(1000);
  CHECK(test_until_error(pair.send(message)).code() == StatusCode::kRemoteError);
}

// The peer was stopped, and its connections were shut down and left open: there is never room again, and no error.
TEST_CASE(a_blocked_sender_notices_that_its_peer_has_closed) {
  for (const std::size_t streams : {1, 3}) {
    TwoWayBehaviour narrow;
    narrow.capacity = 64;
    CommPair pair(connection(streams, narrow, 1, striping(64, 64, 256)));
    const std::vector<std::uint8_t> message(10000);
    Request* send = pair.send(message);
    for (int i = 0; i < 10; ++i) CHECK(!is_done(send));
    for (TwoWayEnd* const far : pair.far_ends) far->end_output();
    const Status status = test_until_error(send);
    CHECK(status.code() == StatusCode::kRemoteError);
    CHECK(status.message().find("before it had received message 0") != std::string::npos ||
          status.message().find("before the peer had received message 0") != std::string::npos);
  }
}

TEST_CASE(end_between_messages_fails_only_waiting_receives) {
  CommPair pair(connection(3));
  const std::vector<std::uint8_t> message{7};
  std::vector<std::uint8_t> room(1);
  pair.send(message);
  pair.sender.reset();
  CHECK(is_done(pair.receive(room)));
  CHECK(room == message);
  check_names(test_until_error(pair.receive(room)), "sender");
}

TEST_CASE(end_of_one_stream_leaves_the_others_alone) {
  CommPair pair(connection(2));
  std::uint8_t room = 0;
  Request* receive = pair.receive(&room, 1);
  pair.near_ends[0]->end_output();
  for (int i = 0; i < 10; ++i) CHECK(!is_done(receive));
  pair.near_ends[1]->write_all(frame_of({1, 0, 0, 1}));
  CHECK(is_done(receive));
  CHECK_EQ(int{room}, 7);
}

// What stands behind a chunk whose receive is not posted is not read, and so its stream does not show its end.
TEST_CASE(the_end_is_noticed_while_a_stream_waits_for_a_later_receive) {
  CommPair pair(connection(3));
  pair.near_ends[1]->write_all(frame_of({16, 1, 0, 16}));
  std::vector<std::uint8_t> room(16);
  Request* receive = pair.receive(room);
  for (int i = 0; i < 10; ++i) CHECK(!is_done(receive));
  pair.near_ends[0]->end_output();
  // Message 0 may still come on the third.
  for (int i = 0; i < 10; ++i) CHECK(!is_done(receive));
  for (TwoWayEnd* const near : pair.near_ends) near->end_output();
  check_names(test_until_error(receive), "waits for message 0");
}

// What the sender has written on it is lost, and it may never write there again.
TEST_CASE(a_stream_that_is_reset_before_it_was_used_fails_the_comm) {
  WorkerPool no_workers{0, 0, any_cpu()};
  std::vector<std::unique_ptr<ByteStream>> streams;
  auto [near, far] = TwoWayEnd::make({}, {}, 1);
  streams.push_back(std::move(far));
  streams.push_back(std::make_unique<ResetStream>());
  std::unique_ptr<RecvComm> receiver;
  CHECK_OK(RecvComm::create(std::move(streams), "sender", nullptr, &no_workers, &receiver));
  std::uint8_t room = 0;
  Request* receive = nullptr;
  CHECK_OK(receiver->irecv(&room, 1, nullptr, &receive));
  CHECK(test_until_error(receive).code() == StatusCode::kRemoteError);
}

TEST_CASE(end_in_a_message_names_the_message) {
  for (const std::size_t cut : {std::size_t{1}, kFrameHeaderBytes - 1, kFrameHeaderBytes, kFrameHeaderBytes + 5}) {
    CommPair pair(connection(1));
    std::vector<std::uint8_t> frame = frame_of({16, 0, 0, 16});
    frame.resize(cut);
    pair.near_ends[0]->write_all(frame);
    pair.near_ends[0]->end_output();
    std::vector<std::uint8_t> room(16);
    check_contains(test_until_error(pair.receive(room)).message(), "in the middle of message 0");
  }
}

TEST_CASE(hostile_frames_are_refused) {
  const std::uint64_t huge = ~std::uint64_t{0};
  CHECK(receive_hostile_frame({16, 0, 0, 17}).code() == StatusCode::kInvalidUsage);    // larger than the receive
  CHECK(receive_hostile_frame({16, 0, 1, 16}).code() == StatusCode::kRemoteError);     // beyond the message
  CHECK(receive_hostile_frame({16, 0, huge, 16}).code() == StatusCode::kRemoteError);  // offset wraps
  CHECK(receive_hostile_frame({16, 0, huge - 8, huge}).code() == StatusCode::kRemoteError);
  CHECK(receive_hostile_frame({0, 0, 0, 16}).code() == StatusCode::kRemoteError);  // no progress
  CHECK(receive_hostile_frame({0xffffffff, 0, 0, huge}).code() == StatusCode::kInvalidUsage);
}

// The sender says how much it has sent: a comm that was cut is told from one that is complete.
TEST_CASE(the_end_of_a_comm_is_checked_against_what_came) {
  for (const auto& [sent, what] : {std::pair{0, "broke the protocol"}, std::pair{1, "it has sent 1: the ranks call"},
                                   std::pair{2, "it has sent and which was lost"}}) {
    CommPair::Settings settings = connection(1);
    settings.receiving.recovers = true;
    CommPair pair(settings);
    FrameHeader end;
    end.end = true;
    end.message_number = static_cast<std::uint64_t>(sent);
    pair.near_ends[0]->write_all(frame_of({4, 0, 0, 4}));
    pair.near_ends[0]->write_all(frame_of(end));
    std::vector<std::uint8_t> room(4);
    pair.receive(room);
    check_contains(test_until_error(pair.receive(room)).message(), what);
  }
}

TEST_CASE(chunk_of_a_finished_message_is_refused) {
  CommPair pair(connection(1));
  for (int i = 0; i < 2; ++i) pair.near_ends[0]->write_all(frame_of({4, 0, 0, 4}));
  std::vector<std::uint8_t> room(4);
  pair.receive(room);
  check_contains(test_until_error(pair.receive(room)).message(), "already complete");
}

// Otherwise the first chunk would go on into memory that is no longer the receive's.
TEST_CASE(a_message_is_not_done_while_a_chunk_of_it_is_under_way) {
  // All of it again on another stream; and, of one that has come on the first, a part.
  for (const bool has_come : {false, true}) {
    CommPair pair(connection(2));
    std::vector<std::uint8_t> frame = frame_of({16, 0, 0, has_come ? 32u : 16u});
    if (!has_come) frame.resize(kFrameHeaderBytes + 5);
    pair.near_ends[0]->write_all(frame);
    std::vector<std::uint8_t> room(32);
    Request* receive = pair.receive(room);
    for (int i = 0; i < 10; ++i) CHECK(!is_done(receive));
    pair.near_ends[1]->write_all(has_come ? frame_of({16, 0, 8, 32}) : frame_of({16, 0, 0, 16}));
    check_contains(test_until_error(receive).message(), "do not fit together");
  }
}

// Chunks may be small, but a sender leaves no more gaps than it may have chunks unacknowledged.
TEST_CASE(a_message_in_endless_pieces_is_refused) {
  ReceiveTable table;
  Request posted;
  constexpr std::size_t kBytes = 1u << 20;
  std::vector<std::uint8_t> room(kBytes);
  table.post(&posted, nullptr, 0, room.data(), room.size(), nullptr);
  Status status = Status::ok();
  std::size_t pieces = 0;
  for (std::size_t offset = 0; offset < kBytes && status.is_ok(); offset += 2, ++pieces) {
    const FrameHeader header{1, 0, offset, kBytes};
    Request* found = nullptr;
    Arrival arrival = Arrival::kWanted;
    status = table.find(header, 0, &found, &arrival);
    if (status.is_ok()) table.finish(header, 0);
  }
  check_contains(status.message(), "pieces with gaps");
  CHECK(pieces > kMaxStreams * kMaxUnacknowledgedChunks && pieces < 100'000);
}

TEST_CASE(a_message_without_bytes_comes_once) {
  ReceiveTable table;
  Request posted;
  table.post(&posted, nullptr, 0, nullptr, 0, nullptr);
  Request* found = nullptr;
  Arrival arrival = Arrival::kNotPosted;
  CHECK_OK(table.find({0, 0, 0, 0}, 0, &found, &arrival));
  CHECK(found == &posted);
  CHECK(arrival == Arrival::kWanted);
  CHECK(!table.find({0, 0, 0, 0}, 1, &found, &arrival).is_ok());
}

TEST_CASE(deregistration_stops_io_and_fails_requests) {
  CommPair pair(connection(2, {}, 1, striping(64, 64, 256)));
  std::vector<std::uint8_t> room(1000);
  MemoryRegistration* registration = nullptr;
  CHECK_OK(pair.receiver->register_memory(room.data(), room.size(), &registration));
  Request* receive = pair.receive(room.data(), room.size(), registration);
  CHECK_OK(pair.receiver->deregister_memory(registration));
  pair.near_ends[0]->write_all(frame_of({16, 0, 0, 16}));
  CHECK(test_until_error(receive).code() == StatusCode::kRemoteError);
  for (const std::uint8_t byte : room) CHECK_EQ(int{byte}, 0);
  CHECK(pair.receiver->deregister_memory(registration).code() == StatusCode::kInternalError);
}

TEST_CASE(deregistration_of_idle_memory_leaves_the_comm_alone) {
  CommPair pair(connection(1));
  std::uint8_t other = 0;
  MemoryRegistration* registration = nullptr;
  CHECK_OK(pair.receiver->register_memory(&other, 1, &registration));
  CHECK_OK(pair.receiver->deregister_memory(registration));
  exchange(pair, {3, 4, 5}, 1, 0);
}

}  // namespace bagua_net

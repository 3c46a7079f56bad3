// Send and receive comms over byte streams that deliver one byte at a time, interrupt and refuse: whatever the
// streams do, every message arrives whole, in its own receive, exactly once.
#include <cerrno>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "support/byte_pipe.h"
#include "support/check.h"
#include "support/comm_parts.h"
#include "support/two_way_pipe.h"
#include "transport/comm/recv_comm.h"
#include "transport/comm/send_comm.h"
#include "wire/acknowledgement.h"
#include "wire/frame_header.h"

namespace bagua_net {
namespace {

SendPolicy striping(std::size_t inline_bytes, std::size_t min_chunk_bytes) {
  SendPolicy policy;
  policy.inline_bytes = inline_bytes;
  policy.min_chunk_bytes = min_chunk_bytes;
  return policy;
}

// A connection without threads: the test's own calls drive both ends.
struct Connection {
  WorkerPool no_workers{0, 0, any_cpu()};
  std::vector<std::shared_ptr<PipeState>> pipes;
  std::unique_ptr<SendComm> sender;
  std::unique_ptr<RecvComm> receiver;

  Connection(std::size_t streams, PipeBehaviour behaviour, unsigned seed, SendPolicy policy = {},
             std::size_t max_chunk_bytes = 524288) {
    std::vector<std::unique_ptr<ByteStream>> sending;
    std::vector<std::unique_ptr<ByteStream>> receiving;
    for (std::size_t i = 0; i < streams; ++i) {
      pipes.push_back(std::make_shared<PipeState>());
      sending.push_back(std::make_unique<BytePipeEnd>(pipes.back(), PipeRole::kWriter, behaviour, seed + 2 * i));
      receiving.push_back(std::make_unique<BytePipeEnd>(pipes.back(), PipeRole::kReader, behaviour, seed + 2 * i + 1));
    }
    policy.max_chunk_bytes = max_chunk_bytes;
    CHECK_OK(SendComm::create(std::move(sending), "receiver", nullptr, policy, &no_workers, &sender));
    CHECK_OK(RecvComm::create(std::move(receiving), "sender", nullptr, &no_workers, &receiver));
  }
};

// Posts and tests in a random order, as deep as the comm allows, until every message has arrived; each receive has
// room for `extra` bytes more than its message, and they must stay untouched.
void exchange(Connection& connection, const std::vector<std::size_t>& sizes, unsigned seed, std::size_t extra) {
  std::mt19937 random(seed);
  std::vector<std::vector<std::uint8_t>> sent;
  std::vector<std::vector<std::uint8_t>> received;
  for (std::size_t number = 0; number < sizes.size(); ++number) {
    sent.push_back(make_message(number, sizes[number]));
    received.emplace_back(sizes[number] + extra, 0xee);
  }
  std::vector<Request*> sends;
  std::vector<Request*> receives;
  std::size_t sends_done = 0;
  std::size_t receives_done = 0;
  // Bounded: with a byte a call and half the calls refused, 64 calls a byte are plenty.
  std::size_t total = 4096;
  for (const std::size_t size : sizes) total += size + kFrameHeaderBytes;
  for (std::size_t step = 0; step < total * 64; ++step) {
    if (sends_done == sizes.size() && receives_done == sizes.size()) break;
    switch (random() % 4) {
      case 0: {
        if (sends.size() == sizes.size()) break;
        Request* request = nullptr;
        auto& message = sent[sends.size()];
        CHECK_OK(connection.sender->isend(message.data(), message.size(), nullptr, &request));
        if (request != nullptr) sends.push_back(request);
        break;
      }
      case 1: {
        if (receives.size() == sizes.size()) break;
        Request* request = nullptr;
        auto& room = received[receives.size()];
        CHECK_OK(connection.receiver->irecv(room.data(), room.size(), nullptr, &request));
        if (request != nullptr) receives.push_back(request);
        break;
      }
      case 2: {
        if (sends_done == sends.size()) break;
        bool done = false;
        std::size_t bytes = 0;
        CHECK_OK(sends[sends_done]->test(&done, &bytes));
        if (!done) break;
        CHECK_EQ(bytes, sizes[sends_done]);
        ++sends_done;
        break;
      }
      default: {
        if (receives_done == receives.size()) break;
        bool done = false;
        std::size_t bytes = 0;
        CHECK_OK(receives[receives_done]->test(&done, &bytes));
        if (!done) break;
        CHECK_EQ(bytes, sizes[receives_done]);
        ++receives_done;
      }
    }
  }
  CHECK_EQ(sends_done, sizes.size());
  CHECK_EQ(receives_done, sizes.size());
  for (std::size_t number = 0; number < sizes.size(); ++number) {
    for (std::size_t i = 0; i < sizes[number] + extra; ++i) {
      CHECK_EQ(int{received[number][i]}, int{i < sizes[number] ? sent[number][i] : 0xee});
    }
  }
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

void write_raw(PipeState& pipe, const std::uint8_t* bytes, std::size_t count) {
  pipe.bytes.insert(pipe.bytes.end(), bytes, bytes + count);
}

constexpr PipeBehaviour kSmooth{1 << 20, 0, 0};

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
  Connection connection(1, kSmooth, 1);
  connection.pipes[0]->capacity = 1 << 20;
  std::vector<std::uint8_t> room(16);
  Request* request = nullptr;
  CHECK_OK(connection.receiver->irecv(room.data(), room.size(), nullptr, &request));
  std::uint8_t bytes[kFrameHeaderBytes];
  encode_frame_header(header, bytes);
  write_raw(*connection.pipes[0], bytes, sizeof bytes);
  return test_until_error(request);
}

}  // namespace

TEST_CASE(one_byte_at_a_time_on_one_stream) {
  for (unsigned seed = 1; seed <= 5; ++seed) {
    Connection connection(1, {1, 20, 30}, seed);
    exchange(connection, {0, 1, 31, 32, 33, 0, 100, 1000, 0}, seed, 0);
  }
}

TEST_CASE(one_byte_at_a_time_on_four_streams) {
  for (unsigned seed = 1; seed <= 5; ++seed) {
    Connection connection(4, {1, 20, 30}, seed, striping(64, 16), 64);
    exchange(connection, {700, 0, 1, 4097, 15, 16, 17, 333, 0, 64}, seed, 0);
  }
}

TEST_CASE(random_pieces_deeper_than_the_ring) {
  for (unsigned seed = 1; seed <= 20; ++seed) {
    std::mt19937 random(seed);
    Connection connection(1 + seed % 5, {1 + random() % 200, 10, 10}, seed, striping(128, 32), 256);
    for (auto& pipe : connection.pipes) pipe->capacity = 1 + random() % 500;
    std::vector<std::size_t> sizes;
    for (int i = 0; i < 200; ++i) sizes.push_back(random() % 3 == 0 ? random() % 8 : random() % 1500);
    exchange(connection, sizes, seed, seed % 3);
  }
}

TEST_CASE(messages_larger_than_the_staging_buffer) {
  Connection connection(2, {60000, 5, 5}, 3, striping(65536, 4096), 16384);
  for (auto& pipe : connection.pipes) pipe->capacity = 100000;
  exchange(connection, {100000, 8191, 8192, 8193, 8160, 40000}, 3, 100);
}

TEST_CASE(full_ring_answers_later) {
  Connection connection(1, kSmooth, 1);
  std::uint8_t byte = 7;
  std::vector<Request*> requests;
  for (std::size_t i = 0; i < kMaxRequestsPerComm; ++i) {
    Request* request = nullptr;
    CHECK_OK(connection.receiver->irecv(&byte, 1, nullptr, &request));
    CHECK(request != nullptr);
    requests.push_back(request);
  }
  Request* request = requests[0];
  CHECK_OK(connection.receiver->irecv(&byte, 1, nullptr, &request));
  CHECK(request == nullptr);
}

TEST_CASE(send_larger_than_receive_is_invalid_usage) {
  Connection connection(1, kSmooth, 1);
  std::vector<std::uint8_t> message(100);
  std::vector<std::uint8_t> room(99);
  Request* send = nullptr;
  Request* receive = nullptr;
  connection.pipes[0]->capacity = 1000;
  CHECK_OK(connection.sender->isend(message.data(), message.size(), nullptr, &send));
  CHECK_OK(connection.receiver->irecv(room.data(), room.size(), nullptr, &receive));
  const Status status = test_until_error(receive);
  CHECK(status.code() == StatusCode::kInvalidUsage);
  CHECK(status.message().find("100 bytes") != std::string::npos);
  CHECK(status.message().find("99 bytes") != std::string::npos);
}

TEST_CASE(failure_is_sticky_and_reaches_the_peer) {
  Connection connection(2, kSmooth, 1);
  std::uint8_t byte = 7;
  Request* receive = nullptr;
  CHECK_OK(connection.receiver->irecv(&byte, 1, nullptr, &receive));
  connection.receiver->fail(Status::remote_error("first"));
  connection.receiver->fail(Status::remote_error("second"));
  CHECK(test_until_error(receive).message().find("first") != std::string::npos);
  Request* again = receive;
  const Status refused = connection.receiver->irecv(&byte, 1, nullptr, &again);
  CHECK(refused.message().find("first") != std::string::npos);
  CHECK(again == nullptr);
  // More than there is room for: as with TCP, that is how a writer finds out.
  const std::vector<std::uint8_t> message(1000);
  Request* send = nullptr;
  CHECK_OK(connection.sender->isend(message.data(), message.size(), nullptr, &send));
  CHECK(test_until_error(send).code() == StatusCode::kRemoteError);
}

// The peer was stopped, and its connections were shut down and left open: there is never room again, and no error.
TEST_CASE(a_blocked_sender_notices_that_its_peer_has_closed) {
  for (const std::size_t streams : {1, 3}) {
    Connection connection(streams, kSmooth, 1, striping(64, 64), 256);
    const std::vector<std::uint8_t> message(10000);
    Request* send = nullptr;
    CHECK_OK(connection.sender->isend(message.data(), message.size(), nullptr, &send));
    bool done = false;
    std::size_t bytes = 0;
    for (int i = 0; i < 10; ++i) CHECK_OK(send->test(&done, &bytes));
    CHECK(!done);
    for (auto& pipe : connection.pipes) pipe->reader_closed = true;
    const Status status = test_until_error(send);
    CHECK(status.code() == StatusCode::kRemoteError);
    CHECK(status.message().find("before it had received message 0") != std::string::npos ||
          status.message().find("before the peer had received message 0") != std::string::npos);
  }
}

TEST_CASE(end_between_messages_fails_only_waiting_receives) {
  Connection connection(3, kSmooth, 1);
  std::uint8_t byte = 7;
  Request* send = nullptr;
  CHECK_OK(connection.sender->isend(&byte, 1, nullptr, &send));
  connection.sender.reset();
  std::uint8_t room = 0;
  Request* receive = nullptr;
  CHECK_OK(connection.receiver->irecv(&room, 1, nullptr, &receive));
  bool done = false;
  std::size_t bytes = 0;
  CHECK_OK(receive->test(&done, &bytes));
  CHECK(done);
  CHECK_EQ(int{room}, 7);
  CHECK_OK(connection.receiver->irecv(&room, 1, nullptr, &receive));
  const Status status = test_until_error(receive);
  CHECK(status.code() == StatusCode::kRemoteError);
  CHECK(status.message().find("sender") != std::string::npos);
}

TEST_CASE(end_of_one_stream_leaves_the_others_alone) {
  Connection connection(2, kSmooth, 1);
  connection.pipes[1]->capacity = 1 << 20;
  std::uint8_t room = 0;
  Request* receive = nullptr;
  CHECK_OK(connection.receiver->irecv(&room, 1, nullptr, &receive));
  connection.pipes[0]->closed = true;
  bool done = false;
  std::size_t bytes = 0;
  for (int i = 0; i < 10; ++i) {
    CHECK_OK(receive->test(&done, &bytes));
    CHECK(!done);
  }
  std::vector<std::uint8_t> frame(kFrameHeaderBytes + 1, 7);
  encode_frame_header({1, 0, 0, 1}, frame.data());
  write_raw(*connection.pipes[1], frame.data(), frame.size());
  CHECK_OK(receive->test(&done, &bytes));
  CHECK(done);
  CHECK_EQ(int{room}, 7);
}

// What stands behind a chunk whose receive is not posted is not read, and so its stream does not show its end.
TEST_CASE(the_end_is_noticed_while_a_stream_waits_for_a_later_receive) {
  Connection connection(3, kSmooth, 1);
  connection.pipes[1]->capacity = 1 << 20;
  std::vector<std::uint8_t> frame(kFrameHeaderBytes + 16, 7);
  encode_frame_header({16, 1, 0, 16}, frame.data());
  write_raw(*connection.pipes[1], frame.data(), frame.size());
  std::vector<std::uint8_t> room(16);
  Request* receive = nullptr;
  CHECK_OK(connection.receiver->irecv(room.data(), room.size(), nullptr, &receive));
  bool done = false;
  std::size_t bytes = 0;
  for (int i = 0; i < 10; ++i) {
    CHECK_OK(receive->test(&done, &bytes));
    CHECK(!done);
  }
  connection.pipes[0]->closed = true;
  // Message 0 may still come on the third.
  for (int i = 0; i < 10; ++i) {
    CHECK_OK(receive->test(&done, &bytes));
    CHECK(!done);
  }
  for (auto& pipe : connection.pipes) pipe->closed = true;
  const Status status = test_until_error(receive);
  CHECK(status.code() == StatusCode::kRemoteError);
  CHECK(status.message().find("waits for message 0") != std::string::npos);
}

// What the sender has written on it is lost, and it may never write there again.
TEST_CASE(a_stream_that_is_reset_before_it_was_used_fails_the_comm) {
  WorkerPool no_workers{0, 0, any_cpu()};
  std::vector<std::unique_ptr<ByteStream>> streams;
  streams.push_back(std::make_unique<BytePipeEnd>(std::make_shared<PipeState>(), PipeRole::kReader, kSmooth, 1));
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
    Connection connection(1, kSmooth, 1);
    std::vector<std::uint8_t> frame(kFrameHeaderBytes + 16);
    encode_frame_header({16, 0, 0, 16}, frame.data());
    write_raw(*connection.pipes[0], frame.data(), cut);
    connection.pipes[0]->closed = true;
    std::vector<std::uint8_t> room(16);
    Request* receive = nullptr;
    CHECK_OK(connection.receiver->irecv(room.data(), room.size(), nullptr, &receive));
    CHECK(test_until_error(receive).message().find("in the middle of message 0") != std::string::npos);
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
    WorkerPool no_workers{0, 0, any_cpu()};
    auto [near, far] = TwoWayEnd::make({}, {}, 1);
    std::vector<std::uint8_t> frames(2 * kFrameHeaderBytes + 4);
    encode_frame_header({4, 0, 0, 4}, frames.data());
    FrameHeader end;
    end.end = true;
    end.message_number = static_cast<std::uint64_t>(sent);
    encode_frame_header(end, frames.data() + kFrameHeaderBytes + 4);
    for (std::size_t written = 0; written < frames.size();) {
      const iovec piece{frames.data() + written, frames.size() - written};
      written += static_cast<std::size_t>(std::max<ssize_t>(near->write(&piece, 1), 0));
    }
    std::vector<std::unique_ptr<ByteStream>> streams;
    streams.push_back(std::move(far));
    RecvPolicy policy;
    policy.recovers = true;
    std::unique_ptr<RecvComm> receiver;
    CHECK_OK(RecvComm::create(std::move(streams), "sender", nullptr, &no_workers, &receiver, policy));
    std::vector<std::uint8_t> room(4);
    Request* receives[2] = {};
    for (Request*& receive : receives) CHECK_OK(receiver->irecv(room.data(), room.size(), nullptr, &receive));
    const Status status = test_until_error(receives[1]);
    if (status.message().find(what) == std::string::npos) check::fail(__FILE__, __LINE__, status.message());
    receiver.reset();
    no_workers.stop();
  }
}

TEST_CASE(chunk_of_a_finished_message_is_refused) {
  Connection connection(1, kSmooth, 1);
  connection.pipes[0]->capacity = 1 << 20;
  std::vector<std::uint8_t> frame(kFrameHeaderBytes + 4);
  encode_frame_header({4, 0, 0, 4}, frame.data());
  write_raw(*connection.pipes[0], frame.data(), frame.size());
  write_raw(*connection.pipes[0], frame.data(), frame.size());
  std::vector<std::uint8_t> room(4);
  Request* first = nullptr;
  Request* second = nullptr;
  CHECK_OK(connection.receiver->irecv(room.data(), room.size(), nullptr, &first));
  CHECK_OK(connection.receiver->irecv(room.data(), room.size(), nullptr, &second));
  CHECK(test_until_error(second).message().find("already complete") != std::string::npos);
}

// Otherwise the first chunk would go on into memory that is no longer the receive's.
TEST_CASE(a_message_is_not_done_while_a_chunk_of_it_is_under_way) {
  Connection connection(2, kSmooth, 1);
  for (auto& pipe : connection.pipes) pipe->capacity = 1 << 20;
  std::vector<std::uint8_t> frame(kFrameHeaderBytes + 16, 7);
  encode_frame_header({16, 0, 0, 16}, frame.data());
  write_raw(*connection.pipes[0], frame.data(), kFrameHeaderBytes + 5);
  std::vector<std::uint8_t> room(16);
  Request* receive = nullptr;
  CHECK_OK(connection.receiver->irecv(room.data(), room.size(), nullptr, &receive));
  bool done = false;
  std::size_t bytes = 0;
  for (int i = 0; i < 10; ++i) CHECK_OK(receive->test(&done, &bytes));
  write_raw(*connection.pipes[1], frame.data(), frame.size());
  const Status status = test_until_error(receive);
  CHECK(status.message().find("do not fit together") != std::string::npos);
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
  CHECK(status.message().find("pieces with gaps") != std::string::npos);
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
  Connection connection(2, kSmooth, 1, striping(64, 64), 256);
  std::vector<std::uint8_t> room(1000);
  MemoryRegistration* registration = nullptr;
  CHECK_OK(connection.receiver->register_memory(room.data(), room.size(), &registration));
  Request* receive = nullptr;
  CHECK_OK(connection.receiver->irecv(room.data(), room.size(), registration, &receive));
  CHECK_OK(connection.receiver->deregister_memory(registration));
  std::vector<std::uint8_t> frame(kFrameHeaderBytes + 16, 0x55);
  encode_frame_header({16, 0, 0, 16}, frame.data());
  write_raw(*connection.pipes[0], frame.data(), frame.size());
  CHECK(test_until_error(receive).code() == StatusCode::kRemoteError);
  for (const std::uint8_t byte : room) CHECK_EQ(int{byte}, 0);
  CHECK(connection.receiver->deregister_memory(registration).code() == StatusCode::kInternalError);
}

TEST_CASE(deregistration_of_idle_memory_leaves_the_comm_alone) {
  Connection connection(1, kSmooth, 1);
  std::uint8_t other = 0;
  MemoryRegistration* registration = nullptr;
  CHECK_OK(connection.receiver->register_memory(&other, 1, &registration));
  CHECK_OK(connection.receiver->deregister_memory(registration));
  exchange(connection, {3, 4, 5}, 1, 0);
}

}  // namespace bagua_net

CHECK_MAIN

// What a peer says, and how it ends, while chunks wait for its acknowledgement; and a receiver that has no room to say
// it.
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "support/stalling_stream.h"
#include "support/zero_copy_connection.h"
#include "support/zero_copy_peer.h"
#include "transport/stream/event_loop_worker.h"
#include "transport/stream/send_stream.h"

namespace bagua_net {
namespace {

struct FirstFailure final : FailureSink {
  void fail(Status status) override {
    const std::lock_guard<std::mutex> lock(mutex);
    if (failure.is_ok()) failure = std::move(status);
  }
  Status get() {
    const std::lock_guard<std::mutex> lock(mutex);
    return failure;
  }
  std::mutex mutex;
  Status failure;
};

}  // namespace

TEST_CASE(an_acknowledgement_may_come_byte_by_byte) {
  Sender sender;
  std::vector<std::uint8_t>& message = sender.buffers.keep(make_message(0, kReferred));
  Request* send = sender.send(message);
  CHECK(read_frame(sender.peers[1].get()).payload == message);
  const std::vector<std::uint8_t> bytes = acknowledgement(1);
  for (const std::uint8_t byte : bytes) {
    for (int j = 0; j < 100; ++j) CHECK(!is_done(send));
    write_all(sender.peers[1].get(), {byte});
  }
  CHECK_OK(test_until_done(send));
}

TEST_CASE(a_wrong_acknowledgement_fails_the_comm) {
  for (const std::uint64_t received : {std::uint64_t{5}, ~std::uint64_t{0}}) {
    Sender sender;
    std::vector<std::uint8_t>& message = sender.buffers.keep(make_message(0, kReferred));
    Request* send = sender.send(message);
    CHECK(read_frame(sender.peers[1].get()).payload == message);
    write_all(sender.peers[1].get(), acknowledgement(received));
    const Status status = test_until_done(send);
    check_names(status, "acknowledged " + std::to_string(received) + " chunks");
    check_names(status, "that host");
    CHECK(has_ended(sender.peers[0].get()));
  }
}

TEST_CASE(the_end_names_the_message_that_is_not_acknowledged) {
  for (const bool resets : {false, true}) {
    for (const bool read_before : {false, true}) {
      Sender sender;
      std::vector<std::uint8_t>& message = sender.buffers.keep(make_message(0, kReferred));
      Request* first = sender.send(message);
      read_frame(sender.peers[1].get());
      write_all(sender.peers[1].get(), acknowledgement(1));
      CHECK_OK(test_until_done(first));
      Request* second = sender.send(message);
      sender.written.wait_for(2 * (kReferred + kFrameHeaderBytes));
      if (read_before) read_frame(sender.peers[1].get());
      resets ? close_with_reset(sender.peers[1]) : sender.peers[1].reset();
      const Status status = test_until_done(second);
      check_names(status, "message 1");
      check_names(status, "that host");
      CHECK(has_ended(sender.peers[0].get()));
    }
  }
}

TEST_CASE(a_peer_that_ended_before_fails_the_next_message) {
  for (const bool resets : {false, true}) {
    Sender sender;
    resets ? close_with_reset(sender.peers[1]) : sender.peers[1].reset();
    std::vector<std::uint8_t>& message = sender.buffers.keep(make_message(0, 16 * kReferred));
    check_names(test_until_done(sender.send(message)), "that host");
  }
}

TEST_CASE(a_peer_that_ends_in_the_middle_of_a_message_fails_it) {
  for (const bool resets : {false, true}) {
    Sender sender;
    std::vector<std::uint8_t>& message = sender.buffers.keep(make_message(0, 64 * kReferred));
    Request* send = sender.send(message);
    read_exactly(sender.peers[1].get(), kReferred);
    resets ? close_with_reset(sender.peers[1]) : sender.peers[1].reset();
    check_names(test_until_done(send), "that host");
  }
}

// The worker looks at the stream when an acknowledgement and the end have both come: one event tells of both.
TEST_CASE(the_end_right_behind_an_acknowledgement_is_noticed) {
  for (const bool resets : {false, true}) {
    for (const std::size_t acknowledged : {1, 16}) {
      FirstFailure failures;
      auto [stalling_socket, stalling_peer] = connected();
      auto [near, far] = connected();
      StallingStream stalling(std::move(stalling_socket), &failures);
      Connection idle;  // the owner of the requests
      ChunkScheduler scheduler({2, kMinChunk, kMinChunk});
      SendStream stream(make_tcp_byte_stream(std::move(near)), &failures, 0, &scheduler, true, nullptr);
      EventLoopWorker worker(50, any_cpu());
      CHECK_OK(worker.start(0));
      std::uint64_t stream_id = 0;
      std::uint64_t stalling_id = 0;
      stream.set_polled();
      CHECK_OK(worker.attach(&stream, &stream_id));

      const std::vector<std::uint8_t> message = make_message(0, (acknowledged + 1) * kMinChunk + kReferred);
      const std::size_t chunks = message.size() / kMinChunk;
      Request request;
      request.start(idle.sender.get(), 7, const_cast<std::uint8_t*>(message.data()), message.size(), nullptr);
      scheduler.push(&request);
      worker.kick(stream_id);
      for (std::size_t i = 0; i < chunks; ++i) CHECK(read_frame(far.get()).header.acknowledge);

      CHECK_OK(worker.attach(&stalling, &stalling_id));
      worker.kick(stalling_id);
      stalling.wait_until_stalling();
      for (std::size_t i = 1; i <= acknowledged; ++i) write_all(far.get(), acknowledgement(i));
      resets ? close_with_reset(far) : far.reset();
      stalling.release();
      const std::int64_t end_ms = monotonic_ms() + kDeadlineMs;
      while (failures.get().is_ok() && monotonic_ms() < end_ms) sched_yield();
      worker.detach(&stalling, stalling_id);
      worker.detach(&stream, stream_id);
      check_names(failures.get(), "message 7");
    }
  }
}

// A receiver that has everything closes at once, as at the end of a job.
TEST_CASE(a_receiver_that_is_done_may_close_at_once) {
  for (const int receiving_workers : {0, 2}) {
    for (int round = 0; round < 20; ++round) {
      Connection::Settings settings;
      settings.receiving_workers = receiving_workers;
      settings.policy.max_chunk_bytes = kMinChunk;
      Connection connection(settings);
      std::vector<std::uint8_t>& message = connection.buffers.keep(make_message(0, 4 * kReferred));
      std::vector<std::uint8_t>& room = connection.buffers.room(message.size());
      Request* receive = connection.receive(room.data(), room.size());
      Request* send = connection.send(message.data(), message.size());
      CHECK_OK(test_until_done(receive));
      connection.receiver.reset();
      CHECK_OK(test_until_done(send));
      CHECK(room == message);
    }
  }
}
// The other end does not read acknowledgements until there is no room for more: all are said in the end.
TEST_CASE(acknowledgements_that_found_no_room_are_written_later) {
  for (const int workers : {0, 1}) {
    constexpr std::size_t kChunks = 20000;
    std::vector<std::uint8_t> room(kChunks);
    std::uint8_t byte = 0;
    WorkerPool pool(workers, 50, any_cpu());
    std::vector<std::unique_ptr<ByteStream>> streams;
    std::array<OwnedFd, 2> peers;
    for (OwnedFd& peer : peers) {
      auto [near, far] = connected();
      set_buffer(near, SO_RCVBUF, 20000);
      set_buffer(far, SO_SNDBUF, 1);
      peer = std::move(near);
      streams.push_back(make_tcp_byte_stream(std::move(far)));
    }
    std::unique_ptr<RecvComm> comm;
    CHECK_OK(RecvComm::create(std::move(streams), "sender", nullptr, &pool, &comm));
    Request* receive = nullptr;
    CHECK_OK(comm->irecv(room.data(), room.size(), nullptr, &receive));
    const std::int64_t end_ms = monotonic_ms() + kDeadlineMs;
    std::vector<std::uint8_t> frames;
    for (std::size_t i = 0; i < kChunks; ++i) {
      std::vector<std::uint8_t> frame(kFrameHeaderBytes + 1, static_cast<std::uint8_t>(i));
      encode_frame_header({1, 0, i, kChunks, true}, frame.data());
      frames.insert(frames.end(), frame.begin(), frame.end());
    }
    std::size_t sent = 0;
    bool received = false;
    while (sent < frames.size() || !received) {
      CHECK(monotonic_ms() < end_ms);
      const ssize_t moved =
          ::send(peers[1].get(), frames.data() + sent, frames.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (moved > 0) sent += static_cast<std::size_t>(moved);
      if (!received) received = is_done(receive);
    }
    for (std::size_t i = 0; i < kChunks; ++i) CHECK_EQ(int{room[i]}, int{static_cast<std::uint8_t>(i)});
    // Without workers, it is the next call of the comm that goes on.
    CHECK_OK(comm->irecv(&byte, 1, nullptr, &receive));
    std::uint64_t last = 0;
    std::vector<std::uint8_t> bytes;
    while (last < kChunks) {
      CHECK(monotonic_ms() < end_ms);
      std::array<std::uint8_t, 1000> some;
      const ssize_t got = ::recv(peers[1].get(), some.data(), some.size(), MSG_DONTWAIT);
      if (got > 0) bytes.insert(bytes.end(), some.begin(), some.begin() + got);
      for (; bytes.size() >= kAcknowledgementBytes; bytes.erase(bytes.begin(), bytes.begin() + kAcknowledgementBytes)) {
        Acknowledgement acknowledged;
        CHECK_OK(decode_acknowledgement(bytes.data(), &acknowledged));
        CHECK(acknowledged.chunks > last);
        last = acknowledged.chunks;
      }
      if (workers == 0) CHECK(!is_done(receive));
    }
    CHECK_EQ(last, std::uint64_t{kChunks});
    comm.reset();
    pool.stop();
  }
}

}  // namespace bagua_net

CHECK_MAIN

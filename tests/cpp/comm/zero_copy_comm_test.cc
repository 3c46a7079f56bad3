// Comms whose workers send by reference: a request is done when the peer has the bytes and not before, and the memory
// is the caller's from then on, also when the sender gives up. What a peer says, and how it ends, meanwhile.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "support/process_limits.h"
#include "support/stalling_stream.h"
#include "support/traffic.h"
#include "support/zero_copy_peer.h"

namespace bagua_net {
namespace {

CommPair::Settings referring_pair(std::size_t worker_streams, int receiving_workers) {
  CommPair::Settings settings;
  settings.streams = 1 + worker_streams;
  settings.sending_workers = 2;
  settings.receiving_workers = receiving_workers;
  settings.sending = referring();
  settings.watched = CommPair::Watched::kSenders;
  return settings;
}

std::vector<std::size_t> random_sizes(std::mt19937& random, std::size_t count) {
  std::vector<std::size_t> sizes;
  for (std::size_t i = 0; i < count; ++i) {
    sizes.push_back(random() % 4 == 0 ? random() % 1000 : random() % (4 * kReferred));
  }
  return sizes;
}

// One message from memory that is overwritten when the sender has given it up.
struct Abandoned {
  std::vector<std::uint8_t> message = make_message(0, kReferred);
  std::vector<std::uint8_t> room = std::vector<std::uint8_t>(kReferred);

  void overwrite() { std::fill(message.begin(), message.end(), std::uint8_t{0x5a}); }
  void receive_nothing_forged(CommPair& pair) {
    if (outcome(pair.receive(room)).is_ok()) CHECK(room == make_message(0, kReferred));
  }
};

}  // namespace

TEST_CASE(messages_survive_a_sender_that_overwrites_them) {
  for (unsigned seed = 1; seed <= static_cast<unsigned>(check::rounds(8)); ++seed) {
    std::mt19937 random(seed);
    // The peer's settings may differ.
    CommPair::Settings settings = referring_pair(1 + seed % 3, seed % 2 == 0 ? 0 : 2);
    if (seed > 6) settings.buffer_bytes = 30000;
    CommPair pair(settings);
    Traffic traffic(*pair.sender, *pair.receiver, {seed % 3 == 0 ? 30 : random() % 4, 1, 1, seed});
    traffic.run(random_sizes(random, seed > 6 ? 20 : 60));
  }
}

TEST_CASE(more_chunks_than_can_be_unacknowledged) {
  CommPair::Settings settings = referring_pair(2, 2);
  settings.sending.max_chunk_bytes = kMinChunk;
  CommPair pair(settings);
  Traffic(*pair.sender, *pair.receiver, {2}).run({32 * kReferred, kReferred, 32 * kReferred});
}

TEST_CASE(without_pipes_messages_are_copied) {
  for (const std::size_t worker_streams : {1, 2}) {
    CommPair pair(referring_pair(worker_streams, 2));
    const DescriptorLimit none(0);  // no pipe either, whatever other processes of the user give back
    Traffic(*pair.sender, *pair.receiver).run(std::vector<std::size_t>(8, kReferred));
  }
}

TEST_CASE(a_send_is_done_when_the_receiver_has_it_and_not_before) {
  for (const int receiving_workers : {0, 2}) {
    Abandoned one;
    CommPair pair(referring_pair(1, receiving_workers));
    Request* send = pair.send(one.message);
    wait_until_written(&pair.watched, kFrameHeaderBytes + kReferred);
    for (int i = 0; i < 1000; ++i) CHECK(!is_done(send));
    CHECK_OK(outcome({pair.receive(one.room), send}));
    one.overwrite();
    CHECK(one.room == make_message(0, kReferred));
  }
}

// One stream only: where there are two, one may move all messages, and the other asks when its turn comes.
TEST_CASE(a_stream_that_was_refused_a_pipe_asks_no_more) {
  SenderToTest sender;
  const DescriptorLimit none(0);  // no pipe either, whatever other processes of the user give back
  for (int i = 0; i < 20; ++i) {
    Request* send = sender.send();
    const Frame frame = sender.read_frame();
    CHECK_EQ(frame.header.acknowledge, i == 0);
    CHECK(frame.payload == sender.message);
    if (i == 0) sender.acknowledge(1);
    CHECK_OK(outcome(send));
  }
}

// Pages that the kernel cannot refer to any more when the message is half sent: it is an error, and no other byte
// arrives in its place.
TEST_CASE(memory_that_cannot_be_read_is_an_error) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  SenderToTest sender;
  void* const data = ::mmap(nullptr, kReferred, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(data != MAP_FAILED);
  CHECK_EQ(::mprotect(static_cast<char*>(data) + kReferred / 2, page, PROT_NONE), 0);
  const Status status = outcome(sender.send(data, kReferred));
  check_names(status, "Bad address");
  check_names(status, "that host");
  ::munmap(data, kReferred);
}

// Small chunks, what goes on the first stream, what goes on the only one, and to a peer that cannot acknowledge.
TEST_CASE(what_is_copied_asks_for_nothing) {
  SendPolicy some_inline = referring();
  some_inline.inline_bytes = 1000;
  SendPolicy none = referring();
  none.zero_copy = false;
  struct Way {
    SendPolicy policy;
    std::size_t streams;
    std::size_t bytes;
    std::size_t stream;
  };
  for (const Way& way : {Way{some_inline, 2, 200, 0}, Way{some_inline, 2, 10000, 1}, Way{referring(), 1, kReferred, 0},
                         Way{none, 2, kReferred, 1}}) {
    SenderToTest sender(way.policy, way.streams);
    Request* send = sender.send(sender.message.data(), way.bytes);
    // Of the only stream just the beginning: the calling thread writes no more while nobody tests the request.
    CHECK(!sender.read_header(way.stream).acknowledge);
    if (way.streams > 1) CHECK_OK(outcome(send));
  }
}

TEST_CASE(an_acknowledgement_that_cannot_be_right_fails_the_comm) {
  for (const std::uint64_t received : {std::uint64_t{5}, ~std::uint64_t{0}}) {
    SenderToTest sender;
    Request* send = sender.send();
    CHECK(sender.read_frame().payload == sender.message);
    sender.acknowledge(received);
    const Status status = outcome(send);
    check_names(status, "acknowledged " + std::to_string(received) + " chunks");
    check_names(status, "that host");
    CHECK(has_ended(sender.peers[0].get()));
  }
}

TEST_CASE(a_peer_that_ends_fails_what_it_has_not_acknowledged) {
  enum class Moment { kBefore, kMidMessage, kUnread, kRead };
  for (const bool resets : {false, true}) {
    for (const Moment moment : {Moment::kBefore, Moment::kMidMessage, Moment::kUnread, Moment::kRead}) {
      SenderToTest sender;
      if (moment != Moment::kBefore) {
        Request* first = sender.send();
        sender.read_frame();
        sender.acknowledge(1);
        CHECK_OK(outcome(first));
      } else {
        sender.end(resets);
      }
      // In the middle it is more than the kernel takes.
      const bool is_large = moment == Moment::kBefore || moment == Moment::kMidMessage;
      if (is_large) sender.message = make_message(1, 64 * kReferred);
      Request* second = sender.send();
      if (moment == Moment::kMidMessage) read_bytes(sender.peers[1], std::vector<char>(kReferred).data(), kReferred);
      if (!is_large) wait_until_written(&sender.watched, 2 * (kReferred + kFrameHeaderBytes));
      if (moment == Moment::kRead) sender.read_frame();
      sender.watched.clear();
      if (moment != Moment::kBefore) sender.end(resets);
      const Status status = outcome(second);
      check_names(status, "that host");
      if (!is_large) check_names(status, "message 1");
      CHECK(has_ended(sender.peers[0].get()));
    }
  }
}

// The worker looks at the stream when an acknowledgement and the end have both come: one event tells of both.
TEST_CASE(the_end_right_behind_an_acknowledgement_is_noticed) {
  for (const bool resets : {false, true}) {
    for (const std::size_t acknowledged : {1, 16}) {
      SenderToTest sender;
      // Each of them is one chunk, since there is one stream for workers.
      std::vector<Request*> sends;
      for (std::size_t i = 0; i <= acknowledged; ++i) sends.push_back(sender.send());
      for (std::size_t i = 0; i <= acknowledged; ++i) CHECK(sender.read_frame().header.acknowledge);
      StalledWorker stalled(&sender.pool);
      for (std::size_t i = 1; i <= acknowledged; ++i) sender.acknowledge(i);
      sender.watched.clear();
      sender.end(resets);
      stalled.release();
      check_names(outcome(sends.back()), "message " + std::to_string(acknowledged));
    }
  }
}

// A receiver that has everything closes at once, as at the end of a job.
TEST_CASE(a_receiver_that_is_done_may_close_at_once) {
  for (int round = 0; round < 40; ++round) {
    std::vector<std::uint8_t> message = make_message(0, 4 * kReferred);
    std::vector<std::uint8_t> room(message.size());
    CommPair::Settings settings = referring_pair(2, round % 2 == 0 ? 0 : 2);
    settings.watched = CommPair::Watched::kNothing;
    settings.sending.max_chunk_bytes = kMinChunk;
    CommPair pair(settings);
    Request* receive = pair.receive(room);
    Request* send = pair.send(message);
    CHECK_OK(outcome(receive));
    pair.receiver.reset();
    CHECK_OK(outcome(send));
    CHECK(room == message);
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
      auto [near, far] = tcp_pair();
      set_buffer(near, SO_RCVBUF, 20000);
      set_buffer(far, SO_SNDBUF, 1);
      peer = std::move(near);
      streams.push_back(make_tcp_byte_stream(std::move(far)));
    }
    std::unique_ptr<RecvComm> comm;
    CHECK_OK(RecvComm::create(std::move(streams), "sender", nullptr, &pool, &comm));
    Request* receive = nullptr;
    CHECK_OK(comm->irecv(room.data(), room.size(), nullptr, &receive));
    std::vector<std::uint8_t> frames;
    for (std::size_t i = 0; i < kChunks; ++i) {
      std::vector<std::uint8_t> frame(kFrameHeaderBytes + 1, static_cast<std::uint8_t>(i));
      encode_frame_header({1, 0, i, kChunks, true}, frame.data());
      frames.insert(frames.end(), frame.begin(), frame.end());
    }
    std::size_t sent = 0;
    bool received = false;
    wait_until(
        [&] {
          const ssize_t moved =
              ::send(peers[1].get(), frames.data() + sent, frames.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
          if (moved > 0) sent += static_cast<std::size_t>(moved);
          received = received || is_done(receive);
          return received && sent == frames.size();
        },
        "the message");
    for (std::size_t i = 0; i < kChunks; ++i) CHECK_EQ(int{room[i]}, int{static_cast<std::uint8_t>(i)});
    // Without workers, it is the next call of the comm that goes on.
    CHECK_OK(comm->irecv(&byte, 1, nullptr, &receive));
    std::uint64_t last = 0;
    std::vector<std::uint8_t> bytes;
    wait_until(
        [&] {
          std::array<std::uint8_t, 1000> some;
          const ssize_t got = ::recv(peers[1].get(), some.data(), some.size(), MSG_DONTWAIT);
          if (got > 0) bytes.insert(bytes.end(), some.begin(), some.begin() + got);
          for (; bytes.size() >= kAcknowledgementBytes;
               bytes.erase(bytes.begin(), bytes.begin() + kAcknowledgementBytes)) {
            Acknowledgement acknowledged;
            CHECK_OK(decode_acknowledgement(bytes.data(), &acknowledged));
            CHECK(acknowledged.chunks > last);
            last = acknowledged.chunks;
          }
          if (workers == 0) CHECK(!is_done(receive));
          return last == kChunks;
        },
        "acknowledgements");
    comm.reset();
    pool.stop();
  }
}

// The process's deadline tells if it does.
TEST_CASE(closing_a_sender_does_not_wait_for_acknowledgements) {
  Abandoned one;
  CommPair pair(referring_pair(1, 2));
  pair.send(one.message);
  wait_until_written(&pair.watched, kFrameHeaderBytes + kReferred);
  pair.sender.reset();
}

TEST_CASE(deregistered_memory_may_go_at_once) {
  for (const std::size_t bytes : {kReferred, 64 * kReferred}) {
    std::vector<std::uint8_t> room(bytes);
    CommPair pair(referring_pair(2, 2));
    void* const data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(data != MAP_FAILED);
    MemoryRegistration* registration = nullptr;
    CHECK_OK(pair.sender->register_memory(data, bytes, &registration));
    Request* send = pair.send(data, bytes, registration);
    wait_until_written(&pair.watched, kReferred);
    CHECK_OK(pair.sender->deregister_memory(registration));
    CHECK_EQ(::munmap(data, bytes), 0);
    check_names(outcome(send), "aborted");
    // Nothing is left that could touch it: this would find the memory gone.
    [[maybe_unused]] const Status ignored = outcome(pair.receive(room));
  }
}

// The caller may overwrite what it deregistered. Whatever the receiver reports as received must not be that, wherever
// the bytes are when the sender gives up: in its own socket, in the receiver's, or in front of others that the receiver
// has no room for, and that an end of the stream would wait behind.
TEST_CASE(an_aborted_sender_does_not_forge_messages) {
  enum class Where { kSendersSocket, kReceiversSocket, kInFrontOfOthers };
  for (const Where where : {Where::kSendersSocket, Where::kReceiversSocket, Where::kInFrontOfOthers}) {
    for (const bool closes : {false, true}) {
      Abandoned one;
      const std::vector<std::uint8_t> others(64 * kReferred);
      CommPair::Settings settings = referring_pair(1, 2);
      if (where == Where::kReceiversSocket) {
        settings.receive_buffer_bytes = 4 * kReferred;
        settings.watched = CommPair::Watched::kReceivers;
      }
      CommPair pair(settings);
      MemoryRegistration* registration = nullptr;
      CHECK_OK(pair.sender->register_memory(one.message.data(), kReferred, &registration));
      pair.send(one.message.data(), kReferred, registration);
      if (where == Where::kInFrontOfOthers) pair.send(others);
      std::size_t bytes = kFrameHeaderBytes + kReferred;
      if (where == Where::kReceiversSocket) {
        int granted = 0;
        socklen_t length = sizeof granted;
        CHECK_EQ(::getsockopt(pair.watched[1].get(), SOL_SOCKET, SO_RCVBUF, &granted, &length), 0);
        if (granted < settings.receive_buffer_bytes) {
          std::printf("        net.core.rmem_max is too small for a message\n");
          continue;
        }
        wait_until([&] { return bytes_received(pair.watched[1].get()) >= bytes; }, "bytes at the receiver");
      } else {
        if (where == Where::kInFrontOfOthers) bytes += kReferred / 2;
        wait_until_written(&pair.watched, bytes);
      }
      CHECK_OK(pair.sender->deregister_memory(registration));
      if (closes) pair.sender.reset();
      one.overwrite();
      one.receive_nothing_forged(pair);
    }
  }
}

// A caller that was told of an error may think that its request is over, and use the memory before it closes the comm.
TEST_CASE(a_failed_sender_does_not_forge_messages) {
  for (const bool told_by_test : {false, true}) {
    Abandoned one;
    CommPair pair(referring_pair(1, 2));
    Request* send = pair.send(one.message);
    wait_until_written(&pair.watched, kFrameHeaderBytes + kReferred);
    pair.sender->fail(Status::remote_error("broken"));  // as another stream does
    const Status told =
        told_by_test ? outcome(send) : pair.sender->isend(one.message.data(), kReferred, nullptr, &send);
    CHECK(!told.is_ok());
    one.overwrite();
    one.receive_nothing_forged(pair);
  }
}

// Streams are shut down while workers write: an error, and no signal that ends the process.
TEST_CASE(a_failure_in_mid_traffic_ends_both_comms) {
  for (int round = 0; round < 20; ++round) {
    std::vector<std::uint8_t> message = make_message(0, 8 * kReferred);
    std::vector<std::uint8_t> room(message.size());
    CommPair pair(referring_pair(2, 2));
    Request* receive = pair.receive(room);
    Request* send = pair.send(message);
    wait_until_written(&pair.watched, static_cast<std::size_t>(round) * kMinChunk + 1);
    Comm& failing = round % 2 == 0 ? static_cast<Comm&>(*pair.sender) : *pair.receiver;
    failing.fail(Status::remote_error("broken"));
    const Status sent = outcome(send);
    const Status received = outcome(receive);
    CHECK(!(sent.is_ok() || received.is_ok()) || room == message);
  }
}

}  // namespace bagua_net

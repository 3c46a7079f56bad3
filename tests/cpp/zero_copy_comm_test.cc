// Comms whose workers send by reference: a request is done when the peer has the bytes and not before, and the memory
// is the caller's from then on.
#include <sys/mman.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "support/process_limits.h"
#include "support/zero_copy_connection.h"
#include "support/zero_copy_peer.h"

namespace bagua_net {
namespace {

// Messages of these sizes, with as many under way as the comm takes; the sender overwrites each the moment that it is
// done, and receives are posted when so many messages were sent.
void exchange(Connection& connection, const std::vector<std::size_t>& sizes, std::size_t lag) {
  std::vector<std::vector<std::uint8_t>*> sent;
  std::vector<std::vector<std::uint8_t>*> received;
  std::vector<Request*> sends;
  std::vector<Request*> receives;
  std::size_t sends_done = 0;
  std::size_t receives_done = 0;
  const Deadline deadline;
  while (sends_done < sizes.size() || receives_done < sizes.size()) {
    deadline.check("messages");
    Request* request = nullptr;
    if (sends.size() < sizes.size()) {
      if (sent.size() == sends.size()) {
        sent.push_back(&connection.buffers.keep(make_message(sends.size(), sizes[sends.size()])));
      }
      const std::vector<std::uint8_t>& message = *sent.back();
      CHECK_OK(connection.sender->isend(message.data(), message.size(), nullptr, &request));
      if (request != nullptr) sends.push_back(request);
    }
    if (receives.size() < sizes.size() && (receives.size() + lag < sends.size() || sends.size() == sizes.size())) {
      if (received.size() == receives.size()) {
        const std::size_t bytes = sizes[receives.size()] + 1;
        received.push_back(&connection.buffers.keep(std::vector<std::uint8_t>(bytes, 0xee)));
      }
      std::vector<std::uint8_t>& room = *received.back();
      CHECK_OK(connection.receiver->irecv(room.data(), room.size(), nullptr, &request));
      if (request != nullptr) receives.push_back(request);
    }
    if (sends_done < sends.size() && is_done(sends[sends_done])) {
      std::fill(sent[sends_done]->begin(), sent[sends_done]->end(), std::uint8_t{0x5a});
      ++sends_done;
    }
    if (receives_done < receives.size() && is_done(receives[receives_done])) {
      std::vector<std::uint8_t>& room = *received[receives_done];
      CHECK_EQ(int{room.back()}, 0xee);
      room.pop_back();
      CHECK(room == make_message(receives_done, sizes[receives_done]));
      ++receives_done;
    }
  }
}

std::vector<std::size_t> random_sizes(std::mt19937& random, std::size_t count) {
  std::vector<std::size_t> sizes;
  for (std::size_t i = 0; i < count; ++i) {
    sizes.push_back(random() % 4 == 0 ? random() % 1000 : random() % (4 * kReferred));
  }
  return sizes;
}

}  // namespace

TEST_CASE(messages_survive_a_sender_that_overwrites_them) {
  for (unsigned seed = 1; seed <= static_cast<unsigned>(check::rounds(6)); ++seed) {
    std::mt19937 random(seed);
    Connection::Settings settings;
    settings.worker_streams = 1 + seed % 3;
    settings.receiving_workers = seed % 2 == 0 ? 0 : 2;  // the peer's settings may differ
    Connection connection(settings);
    exchange(connection, random_sizes(random, 60), seed % 3 == 0 ? 30 : random() % 4);
  }
}

TEST_CASE(messages_survive_small_socket_buffers) {
  for (const unsigned receiving_workers : {0U, 2U}) {
    std::mt19937 random(receiving_workers);
    Connection::Settings settings;
    settings.receiving_workers = static_cast<int>(receiving_workers);
    settings.buffer_bytes = 30000;
    Connection connection(settings);
    exchange(connection, random_sizes(random, 20), 3);
  }
}

TEST_CASE(more_chunks_than_can_be_unacknowledged) {
  Connection::Settings settings;
  settings.policy.max_chunk_bytes = kMinChunk;
  Connection connection(settings);
  exchange(connection, {32 * kReferred, kReferred, 32 * kReferred}, 2);
}

TEST_CASE(a_send_is_done_when_the_receiver_has_it_and_not_before) {
  for (const int receiving_workers : {0, 2}) {
    Connection connection(one_worker_stream(receiving_workers));
    std::vector<std::uint8_t>& message = connection.buffers.keep(make_message(0, kReferred));
    Request* send = connection.send(message.data(), message.size());
    connection.written.wait_for(kFrameHeaderBytes + message.size());
    for (int i = 0; i < 1000; ++i) CHECK(!is_done(send));
    std::vector<std::uint8_t>& room = connection.buffers.room(message.size());
    Request* receive = connection.receive(room.data(), room.size());
    CHECK_OK(test_until_done(receive));
    CHECK_OK(test_until_done(send));
    std::fill(message.begin(), message.end(), std::uint8_t{0x5a});
    CHECK(room == make_message(0, kReferred));
  }
}

TEST_CASE(without_pipes_messages_are_copied) {
  for (const std::size_t worker_streams : {1, 2}) {
    Connection::Settings settings;
    settings.worker_streams = worker_streams;
    Connection connection(settings);
    const DescriptorLimit none(0);  // no pipe either, whatever other processes of the user give back
    exchange(connection, std::vector<std::size_t>(8, kReferred), 0);
  }
}

// One stream only: where there are two, one may move all messages, and the other asks when its turn comes.
TEST_CASE(a_stream_that_was_refused_a_pipe_asks_no_more) {
  Sender sender;
  const DescriptorLimit none(0);  // no pipe either, whatever other processes of the user give back
  std::vector<std::uint8_t>& message = sender.buffers.keep(make_message(0, kReferred));
  Request* send = sender.send(message);
  Frame frame = read_frame(sender.peers[1].get());
  CHECK(frame.header.acknowledge);
  CHECK(frame.payload == message);
  write_all(sender.peers[1].get(), acknowledgement(1));
  CHECK_OK(test_until_done(send));
  for (int i = 0; i < 20; ++i) {
    send = sender.send(message);
    frame = read_frame(sender.peers[1].get());
    CHECK(!frame.header.acknowledge);
    CHECK(frame.payload == message);
    CHECK_OK(test_until_done(send));
  }
}

// Pages that the kernel cannot refer to any more when the message is half sent: it is an error, and no other byte
// arrives in its place.
TEST_CASE(memory_that_cannot_be_read_is_an_error) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  Sender sender;
  void* const data = ::mmap(nullptr, kReferred, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(data != MAP_FAILED);
  CHECK_EQ(::mprotect(static_cast<char*>(data) + kReferred / 2, page, PROT_NONE), 0);
  Request* send = nullptr;
  CHECK_OK(sender.comm->isend(data, kReferred, nullptr, &send));
  const Status status = test_until_done(send);
  check_names(status, "Bad address");
  check_names(status, "that host");
  ::munmap(data, kReferred);
}

TEST_CASE(small_chunks_and_the_first_stream_ask_for_nothing) {
  const std::vector<std::uint8_t> whole(200, 1);      // on stream 0
  const std::vector<std::uint8_t> striped(10000, 2);  // for the worker
  SendPolicy policy = referring();
  policy.inline_bytes = 1000;
  Sender sender(policy);
  CHECK_OK(test_until_done(sender.send(whole)));
  CHECK_OK(test_until_done(sender.send(striped)));
  CHECK(!read_frame(sender.peers[0].get()).header.acknowledge);
  CHECK(!read_frame(sender.peers[1].get()).header.acknowledge);
}

TEST_CASE(one_stream_asks_for_nothing) {
  const std::vector<std::uint8_t> message = make_message(0, kReferred);
  WorkerPool pool(1, 50, any_cpu());
  std::vector<std::unique_ptr<ByteStream>> streams;
  auto [near, far] = connected();
  streams.push_back(make_tcp_byte_stream(std::move(near)));
  std::unique_ptr<SendComm> comm;
  CHECK_OK(SendComm::create(std::move(streams), "receiver", nullptr, referring(), &pool, &comm));
  Request* send = nullptr;
  CHECK_OK(comm->isend(message.data(), message.size(), nullptr, &send));
  // Only the beginning: the calling thread writes no more while nobody tests the request.
  FrameHeader header;
  CHECK_OK(decode_frame_header(read_exactly(far.get(), kFrameHeaderBytes).data(), &header));
  CHECK(!header.acknowledge);
  comm.reset();
  pool.stop();
}

TEST_CASE(a_peer_that_cannot_acknowledge_gets_copies) {
  SendPolicy policy = referring();
  policy.zero_copy = false;
  Sender sender(policy);
  std::vector<std::uint8_t>& message = sender.buffers.keep(make_message(0, kReferred));
  Request* send = sender.send(message);
  const Frame frame = read_frame(sender.peers[1].get());
  CHECK(!frame.header.acknowledge);
  CHECK(frame.payload == message);
  CHECK_OK(test_until_done(send));
}

}  // namespace bagua_net

CHECK_MAIN

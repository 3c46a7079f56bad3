// Senders that give up: what they sent by reference is theirs again, and no receiver takes for a message what it finds.
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <vector>

#include "support/zero_copy_connection.h"
#include "support/zero_copy_peer.h"

namespace bagua_net {
namespace {

// Sends a message, and one behind it of so many bytes; when the first is where it should be, the sender gives up, and
// its caller overwrites the memory.
void abort_and_overwrite(Connection& connection, std::size_t bytes_behind, bool closes,
                         const std::function<void(std::size_t bytes)>& wait_until_there) {
  std::vector<std::uint8_t>& message = connection.buffers.keep(make_message(0, kReferred));
  MemoryRegistration* registration = nullptr;
  CHECK_OK(connection.sender->register_memory(message.data(), message.size(), &registration));
  connection.send(message.data(), message.size(), registration);
  if (bytes_behind > 0) connection.send(connection.buffers.room(bytes_behind).data(), bytes_behind);
  wait_until_there(kFrameHeaderBytes + message.size());
  CHECK_OK(connection.sender->deregister_memory(registration));
  if (closes) connection.sender.reset();
  std::fill(message.begin(), message.end(), std::uint8_t{0x5a});
}

void receive_nothing_forged(Connection& connection) {
  std::vector<std::uint8_t>& room = connection.buffers.room(kReferred);
  Request* receive = connection.receive(room.data(), room.size());
  if (test_until_done(receive).is_ok()) CHECK(room == make_message(0, kReferred));
}

}  // namespace

TEST_CASE(closing_a_sender_does_not_wait_for_acknowledgements) {
  Connection connection(one_worker_stream());
  std::vector<std::uint8_t>& message = connection.buffers.keep(make_message(0, kReferred));
  connection.send(message.data(), message.size());
  connection.written.wait_for(kFrameHeaderBytes + message.size());
  const std::int64_t begin_ms = monotonic_ms();
  connection.sender.reset();
  CHECK(monotonic_ms() - begin_ms < kDeadlineMs);
}

TEST_CASE(deregistered_memory_may_go_at_once) {
  for (const std::size_t bytes : {kReferred, 64 * kReferred}) {
    Connection connection;
    void* const data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(data != MAP_FAILED);
    MemoryRegistration* registration = nullptr;
    CHECK_OK(connection.sender->register_memory(data, bytes, &registration));
    Request* send = connection.send(data, bytes, registration);
    connection.written.wait_for(kReferred);
    CHECK_OK(connection.sender->deregister_memory(registration));
    CHECK_EQ(::munmap(data, bytes), 0);
    const Status status = test_until_done(send);
    check_names(status, "aborted");
    // Nothing is left that could touch it: this would find the memory gone.
    std::vector<std::uint8_t>& room = connection.buffers.room(bytes);
    Request* receive = connection.receive(room.data(), room.size());
    [[maybe_unused]] const Status ignored = test_until_done(receive);
  }
}

// The caller may overwrite what it deregistered. Whatever the receiver reports as received must not be that, wherever
// the bytes are when the sender gives up: in its own socket,
TEST_CASE(an_aborted_sender_does_not_forge_messages) {
  for (const bool closes : {false, true}) {
    Connection connection(one_worker_stream());
    abort_and_overwrite(connection, 0, closes, [&](std::size_t bytes) { connection.written.wait_for(bytes); });
    receive_nothing_forged(connection);
  }
}

// in the receiver's,
TEST_CASE(an_aborted_sender_does_not_forge_messages_that_have_arrived) {
  Connection::Settings settings = one_worker_stream();
  settings.receive_buffer_bytes = 4 * kReferred;
  for (const bool closes : {false, true}) {
    Connection connection(settings);
    if (!connection.has_large_receive_buffers) {
      std::printf("        net.core.rmem_max is too small for a message\n");
      return;
    }
    abort_and_overwrite(connection, 0, closes, [&](std::size_t bytes) {
      wait_until([&] { return bytes_received(connection.fars[1].get()) >= bytes; }, "bytes at the receiver");
    });
    receive_nothing_forged(connection);
  }
}

// or in front of others that the receiver has no room for, and that an end of the stream would wait behind.
TEST_CASE(an_aborted_sender_does_not_forge_messages_with_others_behind_them) {
  for (const bool closes : {false, true}) {
    Connection connection(one_worker_stream());
    abort_and_overwrite(connection, 64 * kReferred, closes,
                        [&](std::size_t bytes) { connection.written.wait_for(bytes + kReferred / 2); });
    receive_nothing_forged(connection);
  }
}

// A caller that was told of an error may think that its request is over, and use the memory before it closes the comm.
TEST_CASE(a_failed_sender_does_not_forge_messages) {
  for (const bool told_by_test : {false, true}) {
    Connection connection(one_worker_stream());
    std::vector<std::uint8_t>& message = connection.buffers.keep(make_message(0, kReferred));
    Request* send = connection.send(message.data(), message.size());
    connection.written.wait_for(kFrameHeaderBytes + message.size());
    connection.sender->fail(Status::remote_error("broken"));  // as another stream does
    if (told_by_test) {
      CHECK(!test_until_done(send).is_ok());
    } else {
      CHECK(!connection.sender->isend(message.data(), message.size(), nullptr, &send).is_ok());
    }
    std::fill(message.begin(), message.end(), std::uint8_t{0x5a});
    receive_nothing_forged(connection);
  }
}

// Streams are shut down while workers write: an error, and no signal that ends the process.
TEST_CASE(a_failure_in_mid_traffic_ends_both_comms) {
  for (int round = 0; round < 20; ++round) {
    Connection connection;
    std::vector<std::uint8_t>& message = connection.buffers.keep(make_message(0, 8 * kReferred));
    std::vector<std::uint8_t>& room = connection.buffers.room(message.size());
    Request* receive = connection.receive(room.data(), room.size());
    Request* send = connection.send(message.data(), message.size());
    connection.written.wait_for(static_cast<std::size_t>(round) * kMinChunk + 1);
    const Status broken = Status::remote_error("broken");
    if (round % 2 == 0) {
      connection.sender->fail(broken);
    } else {
      connection.receiver->fail(broken);
    }
    const Status sent = test_until_done(send);
    const Status received = test_until_done(receive);
    if (sent.is_ok()) CHECK(room == message);
    CHECK(!received.is_ok() || room == message);
  }
}

}  // namespace bagua_net

CHECK_MAIN

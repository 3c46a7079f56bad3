// Comms whose workers send by reference, over the kernel: a request is done when the peer has the bytes and not before,
// and the memory is the caller's from then on, also when the sender gives up. Everything else: replay_model_test.cc.
#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <random>
#include <utility>
#include <vector>

#include "support/comm_pair.h"
#include "support/raw_handshake.h"
#include "support/traffic.h"
#include "wire/frames.h"

namespace bagua_net {
namespace {

constexpr std::size_t kReferred = 1u << 20;  // large enough a message to go out by reference

// Bytes of the streams from the second on that are in the kernel, or were, as its sending ends see it. From then on
// the sockets are the comm's alone.
void wait_until_written(std::vector<OwnedFd>* senders, std::size_t bytes) {
  wait_until(
      [&] {
        std::size_t written = 0;
        for (std::size_t index = 1; index < senders->size(); ++index) {
          const std::uint64_t acknowledged = tcp_info_of((*senders)[index].get()).tcpi_bytes_acked;
          int queued = 0;
          CHECK_EQ(::ioctl((*senders)[index].get(), SIOCOUTQ, &queued), 0);
          // What was acknowledged in between is missed, and seen the next time. The first "byte" is the SYN.
          written += acknowledged - 1 + static_cast<std::size_t>(queued);
        }
        return written >= bytes;
      },
      "bytes of the sender");
  senders->clear();
}

CommPair::Settings referring_pair(std::size_t worker_streams, int receiving_workers, bool msg_zerocopy = false) {
  CommPair::Settings settings;
  settings.msg_zerocopy = msg_zerocopy;
  settings.streams = 1 + worker_streams;
  settings.sending_workers = 2;
  settings.receiving_workers = receiving_workers;
  settings.sending.inline_bytes = 0;
  settings.sending.max_chunk_bytes = 262144;
  settings.sending.zero_copy = true;
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
    CommPair::Settings settings = referring_pair(1 + seed % 3, seed % 2 == 0 ? 0 : 2, seed % 4 > 1);
    if (seed > 6) settings.buffer_bytes = 30000;
    CommPair pair(settings);
    Traffic traffic(*pair.sender, *pair.receiver, {seed % 3 == 0 ? 30 : random() % 4, 1, 1, seed});
    traffic.run(random_sizes(random, seed > 6 ? 20 : 30));
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

TEST_CASE(deregistered_memory_may_go_at_once) {
  for (const auto& [bytes, msg_zerocopy] :
       {std::pair{kReferred, false}, {64 * kReferred, false}, {64 * kReferred, true}}) {
    std::vector<std::uint8_t> room(bytes);
    CommPair pair(referring_pair(2, 2, msg_zerocopy));
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
    for (const auto& [closes, msg_zerocopy] : {std::pair{false, false}, {true, false}, {false, true}, {true, true}}) {
      Abandoned one;
      const std::vector<std::uint8_t> others(where == Where::kInFrontOfOthers ? 64 * kReferred : 0);
      CommPair::Settings settings = referring_pair(1, 2, msg_zerocopy);
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

}  // namespace bagua_net

// What a sender makes of acknowledgements, however they are cut: each chunk counts as moved exactly when it was
// acknowledged, and numbers that cannot be right complete nothing.
#include "transport/chunks/unacknowledged_chunks.h"

#include <sched.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "support/check.h"
#include "support/comm_parts.h"
#include "support/driven_streams.h"
#include "support/two_way_pipe.h"
#include "transport/comm/send_comm.h"

namespace bagua_net {
namespace {

constexpr std::size_t kMaxChunks = 64;

std::vector<std::uint8_t> acknowledgements(const std::vector<std::uint64_t>& chunks) {
  std::vector<std::uint8_t> bytes(chunks.size() * kAcknowledgementBytes);
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    encode_acknowledgement({chunks[i], false}, bytes.data() + i * kAcknowledgementBytes);
  }
  return bytes;
}

// Messages of which every byte is in unacknowledged chunks, as the sending stream of a comm has them.
class Messages {
 public:
  UnacknowledgedChunks unacknowledged;

  Messages() {
    std::vector<std::unique_ptr<ByteStream>> streams;
    streams.push_back(TwoWayEnd::make({}, {}, 1).first);
    CHECK_OK(SendComm::create(std::move(streams), "receiver", nullptr, {}, &no_workers_, &comm_));
  }

  void send(std::size_t bytes, std::size_t chunks = 1) {
    Request& request = requests_.emplace_back();
    request.start(comm_.get(), requests_.size() - 1, nullptr, bytes, nullptr);
    for (std::size_t i = 0; i < chunks; ++i) {
      const std::size_t begin = bytes / chunks * i;
      Chunk chunk;
      chunk.request = &request;
      chunk.bytes = (i + 1 == chunks ? bytes : begin + bytes / chunks) - begin;
      chunk.message_number = requests_.size() - 1;
      chunk.message_bytes = bytes;
      unacknowledged.add(std::move(chunk));
    }
  }

  Status take(const std::vector<std::uint8_t>& bytes) { return take(bytes.data(), bytes.size()); }
  Status take(const std::uint8_t* bytes, std::size_t count) { return unacknowledged.take(bytes, count, &blocks_); }
  Status acknowledge(std::uint64_t chunks) { return take(acknowledgements({chunks})); }

  std::size_t count() const { return requests_.size(); }
  bool is_done(std::size_t number) {
    // A request that was done is dead after test.
    if (number < done_.size() && done_[number]) return true;
    done_.resize(requests_.size());
    bool done = false;
    std::size_t bytes = 0;
    CHECK_OK(requests_[number].test(&done, &bytes));
    done_[number] = done;
    return done;
  }
  std::size_t done_count() {
    std::size_t done = 0;
    for (std::size_t number = 0; number < requests_.size(); ++number) done += is_done(number) ? 1 : 0;
    return done;
  }

 private:
  WorkerPool no_workers_{0, 0, any_cpu()};
  std::unique_ptr<SendComm> comm_;
  std::deque<Request> requests_;
  std::vector<bool> done_;
  BlockPool blocks_;
};

void check_refused(const Status& status, const std::string& number) {
  CHECK(status.code() == StatusCode::kRemoteError);
  CHECK(status.message().find(number) != std::string::npos);
}

}  // namespace

TEST_CASE(a_chunk_is_done_when_it_was_acknowledged) {
  Messages messages;
  CHECK(messages.unacknowledged.is_empty());
  messages.send(100);
  CHECK(!messages.unacknowledged.is_empty());
  CHECK_EQ(messages.done_count(), 0u);
  CHECK_OK(messages.acknowledge(1));
  CHECK_EQ(messages.done_count(), 1u);
  CHECK(messages.unacknowledged.is_empty());
}

TEST_CASE(a_message_is_done_with_its_last_chunk) {
  Messages messages;
  messages.send(100, 3);  // 33, 33, 34
  for (const std::uint64_t received : {1, 2}) {
    CHECK_OK(messages.acknowledge(received));
    CHECK(!messages.is_done(0));
  }
  CHECK_OK(messages.acknowledge(3));
  CHECK(messages.is_done(0));
}

TEST_CASE(an_acknowledgement_may_be_cut_anywhere) {
  for (std::size_t cut = 0; cut <= kAcknowledgementBytes; ++cut) {
    Messages messages;
    messages.send(70000);
    const std::vector<std::uint8_t> bytes = acknowledgements({1});
    CHECK_OK(messages.take(bytes.data(), cut));
    CHECK_EQ(messages.is_done(0), cut == kAcknowledgementBytes);
    CHECK_OK(messages.take(bytes.data() + cut, bytes.size() - cut));
    CHECK(messages.is_done(0));
  }
}

TEST_CASE(acknowledgements_come_byte_by_byte) {
  Messages messages;
  for (int i = 0; i < 3; ++i) messages.send(70000);
  const std::vector<std::uint8_t> bytes = acknowledgements({1, 2, 3});
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    CHECK_EQ(messages.done_count(), i / kAcknowledgementBytes);
    CHECK_OK(messages.take(&bytes[i], 1));
  }
  CHECK_EQ(messages.done_count(), 3u);
}

TEST_CASE(several_come_in_one_read_and_the_last_is_cut) {
  Messages messages;
  for (int i = 0; i < 5; ++i) messages.send(1000);
  std::vector<std::uint8_t> bytes = acknowledgements({1, 2, 4, 5});
  const std::vector<std::uint8_t> rest(bytes.end() - 9, bytes.end());
  bytes.resize(bytes.size() - rest.size());
  CHECK_OK(messages.take(bytes));
  CHECK_EQ(messages.done_count(), 4u);
  CHECK_OK(messages.take(rest));
  CHECK_EQ(messages.done_count(), 5u);
}

TEST_CASE(one_acknowledgement_covers_all_before_it) {
  Messages messages;
  for (int i = 0; i < 4; ++i) messages.send(1000);
  CHECK_OK(messages.acknowledge(3));
  CHECK_EQ(messages.done_count(), 3u);
  CHECK_EQ(messages.unacknowledged.first_message(), std::uint64_t{3});
  CHECK_OK(messages.acknowledge(4));
  CHECK_EQ(messages.done_count(), 4u);
}

TEST_CASE(the_same_acknowledgement_again_changes_nothing) {
  Messages messages;
  for (int i = 0; i < 2; ++i) messages.send(1000);
  for (int i = 0; i < 3; ++i) CHECK_OK(messages.acknowledge(1));
  CHECK_EQ(messages.done_count(), 1u);
}

// A sender that believed it would tell its caller that the memory is free while the peer is still reading it.
TEST_CASE(an_acknowledgement_of_more_than_was_sent_completes_nothing) {
  for (const std::uint64_t received : {std::uint64_t{3}, std::uint64_t{1} << 40, ~std::uint64_t{0}}) {
    Messages messages;
    for (int i = 0; i < 2; ++i) messages.send(1000);
    check_refused(messages.acknowledge(received), std::to_string(received));
    CHECK_EQ(messages.done_count(), 0u);
  }
}

TEST_CASE(an_acknowledgement_of_less_than_the_last_completes_nothing) {
  Messages messages;
  for (int i = 0; i < 3; ++i) messages.send(1000);
  CHECK_OK(messages.acknowledge(2));
  for (const std::uint64_t received : {0, 1}) {
    check_refused(messages.acknowledge(received), std::to_string(received));
    CHECK_EQ(messages.done_count(), 2u);
  }
}

TEST_CASE(an_acknowledgement_before_anything_was_sent_is_refused) {
  Messages messages;
  check_refused(messages.acknowledge(1), "1");
  CHECK(messages.unacknowledged.is_empty());
}

TEST_CASE(other_frames_are_refused) {
  for (std::size_t position = 0; position < 8; ++position) {
    Messages messages;
    messages.send(1000);
    std::vector<std::uint8_t> bytes = acknowledgements({1});
    bytes[position] ^= 2;
    CHECK(messages.take(bytes).code() == StatusCode::kRemoteError);
    CHECK(!messages.is_done(0));
  }
}

TEST_CASE(it_is_full_with_its_last_slot) {
  Messages messages;
  for (std::size_t i = 0; i < kMaxChunks; ++i) {
    CHECK(!messages.unacknowledged.is_full());
    messages.send(10);
  }
  CHECK(messages.unacknowledged.is_full());
  CHECK_EQ(messages.unacknowledged.first_message(), std::uint64_t{0});
  CHECK_OK(messages.acknowledge(1));
  CHECK(!messages.unacknowledged.is_full());
  CHECK_EQ(messages.unacknowledged.first_message(), std::uint64_t{1});
  messages.send(10);
  CHECK(messages.unacknowledged.is_full());
  CHECK_OK(messages.acknowledge(kMaxChunks + 1));
  CHECK(messages.unacknowledged.is_empty());
  CHECK_EQ(messages.done_count(), kMaxChunks + 1);
}

// Slots used again and again, and never one chunk more or less than was acknowledged.
TEST_CASE(slots_are_used_again) {
  for (unsigned seed = 1; seed <= 10; ++seed) {
    std::mt19937 random(seed);
    Messages messages;
    std::size_t acknowledged = 0;
    while (acknowledged < 1000) {
      const std::size_t in_flight = messages.count() - acknowledged;
      CHECK_EQ(messages.unacknowledged.is_full(), in_flight == kMaxChunks);
      CHECK_EQ(messages.unacknowledged.is_empty(), in_flight == 0);
      if (in_flight < kMaxChunks && random() % 100 < 55) {
        const std::size_t bytes = 1 + random() % 0xffffffffu;
        messages.send(bytes);
      } else if (in_flight > 0) {
        CHECK_EQ(messages.unacknowledged.first_message(), std::uint64_t{acknowledged});
        acknowledged += 1 + random() % std::min<std::size_t>(in_flight, 3);
        CHECK_OK(messages.acknowledge(acknowledged));
        CHECK(messages.is_done(acknowledged - 1));
        if (acknowledged < messages.count()) CHECK(!messages.is_done(acknowledged));
      }
    }
  }
}

// The recovery thread is told once that a peer has closed a connection. A replacement came only after a second where an
// acknowledgement stood before the end.
TEST_CASE(an_end_behind_an_acknowledgement_is_found) {
  for (const bool to_the_end : {true, false}) {
    auto [near, far] = TwoWayEnd::make({}, {}, 1);
    Failures failures;
    ChunkScheduler chunks({1, 65536, 524288});
    ReplayQueue replay;
    SendStream stream(std::move(near), &failures, 0, &chunks, false, nullptr, &replay);
    std::vector<std::uint8_t> said = acknowledgements({0});
    const iovec piece{said.data(), said.size()};
    CHECK_EQ(far->write(&piece, 1), static_cast<ssize_t>(said.size()));
    far->shutdown();
    stream.listen(to_the_end);
    CHECK(stream.state() == (to_the_end ? StreamState::kLost : StreamState::kLive));
    stream.listen();
    CHECK(stream.state() == StreamState::kLost);
    CHECK(failures.all.empty());
  }
}

}  // namespace bagua_net

CHECK_MAIN

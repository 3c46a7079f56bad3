// A stream that sends by reference, with the test as its peer: which chunks ask for an acknowledgement, and what
// becomes of their requests, whatever the peer acknowledges and however it or the sender ends.
#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "support/driven_streams.h"
#include "transport/chunks/chunk_scheduler.h"
#include "transport/chunks/receive_table.h"
#include "transport/stream/recv_stream.h"
#include "transport/stream/send_stream.h"

namespace bagua_net {
namespace {

// By reference go chunks from kMinChunk on of messages from kMinMessage on.
constexpr std::size_t kMinChunk = 65536;
constexpr std::size_t kMinMessage = 524289;
constexpr std::size_t kMaxUnacknowledged = 64;

// A sending stream of which the test is the peer.
class Sender {
 public:
  explicit Sender(TwoWayBehaviour behaviour = {}, std::size_t streams_of_policy = 1)
      : scheduler_(policy(streams_of_policy)) {
    auto [near, far] = TwoWayEnd::make(behaviour, {}, 1);
    driver_end_ = near.get();
    peer = std::move(far);
    stream_ = std::make_unique<SendStream>(std::move(near), &failures, 0, &scheduler_, true, nullptr);
    driver = std::make_unique<Driver>(stream_.get(), driver_end_);
  }

  Failures failures;
  std::unique_ptr<TwoWayEnd> peer;
  std::unique_ptr<Driver> driver;

  void send(std::size_t bytes) {
    Message& one = messages_.emplace_back();
    one.data = make_message(messages_.size() - 1, bytes);
    one.request.start(comms_.sender.get(), messages_.size() - 1, one.data.data(), bytes, nullptr);
    scheduler_.push(&one.request);
    if (!stream_->is_blocked()) driver->kick();
    driver->run();
  }
  void release_memory() { stream_->release_memory(); }
  bool is_sent(std::size_t number) {
    Message& one = messages_[number];
    one.done = one.done || is_done(&one.request);
    return one.done;
  }

  // The driver sees it only when it runs; the bytes come in pieces of at most so many.
  void acknowledge(std::uint64_t chunks, std::size_t piece = kAcknowledgementBytes) {
    std::vector<std::uint8_t> bytes(kAcknowledgementBytes);
    encode_acknowledgement({chunks, false}, bytes.data());
    for (std::size_t at = 0; at < bytes.size(); at += piece) {
      if (at > 0) driver->run();
      peer->write_all({bytes.begin() + static_cast<std::ptrdiff_t>(at),
                       bytes.begin() + static_cast<std::ptrdiff_t>(std::min(at + piece, bytes.size()))});
    }
  }
  void end(bool resets) const { resets ? peer->reset() : peer->shutdown(); }

 private:
  struct Message {
    std::vector<std::uint8_t> data;
    Request request;
    bool done = false;
  };

  static ChunkPolicy policy(std::size_t streams) {
    ChunkPolicy policy;
    policy.streams = streams;
    policy.min_bytes = policy.max_bytes = kMinChunk;
    return policy;
  }

  CommPair comms_{over_pipes(1)};
  ChunkScheduler scheduler_;
  std::deque<Message> messages_;
  TwoWayEnd* driver_end_ = nullptr;
  std::unique_ptr<SendStream> stream_;
};

FrameHeader header_at(const std::vector<std::uint8_t>& bytes, std::size_t position) {
  FrameHeader header;
  CHECK(bytes.size() >= position + kFrameHeaderBytes);
  CHECK_OK(decode_frame_header(bytes.data() + position, &header));
  return header;
}

void check_payload(const std::vector<std::uint8_t>& bytes, std::size_t position, std::size_t number, std::size_t size) {
  const std::vector<std::uint8_t> expected = make_message(number, size);
  CHECK(bytes.size() >= position + size);
  CHECK(std::equal(expected.begin(), expected.end(), bytes.begin() + static_cast<std::ptrdiff_t>(position)));
}

void check_failed_at_message(const Failures& failures, std::size_t number) {
  CHECK(!failures.all.empty());
  check_names(failures.all[0], "message " + std::to_string(number));
}

}  // namespace

// Whatever a peer acknowledges, in whatever pieces, and however it ends: a request is done when its chunk was
// acknowledged, the end names the first that was not, and is no failure if there is none.
TEST_CASE(a_request_is_done_when_the_peer_acknowledged_its_chunk) {
  enum class End { kNone, kClosed, kReset, kWrong, kGarbage };
  // A driver that has read a part of the acknowledgements when the end comes reads so many at a time.
  constexpr std::size_t kCounts[] = {1, 2, 3, 15, 16, 17, 31, 32, 33, 48, 63, 64};
  for (unsigned seed = 0; seed < 5 * std::size(kCounts) * 2; ++seed) {
    std::mt19937 random(seed);
    const auto end = static_cast<End>(seed % 5);
    const std::size_t count = kCounts[seed / 5 % std::size(kCounts)];
    // As often all of them.
    const bool is_broken = end == End::kWrong || end == End::kGarbage;
    const std::size_t acknowledged = !is_broken && seed >= 5 * std::size(kCounts) ? count : random() % count;
    const bool is_together = random() % 2 == 0;  // with the end
    Sender sender;
    for (std::size_t i = 0; i < count; ++i) sender.send(kMinMessage);
    CHECK_EQ(sender.peer->unread_bytes(), count * (kFrameHeaderBytes + kMinMessage));
    const std::vector<std::uint8_t> first = sender.peer->read_all(kFrameHeaderBytes + kMinMessage);
    CHECK(header_at(first, 0).acknowledge);
    check_payload(first, kFrameHeaderBytes, 0, kMinMessage);
    for (std::size_t said = 0; said < acknowledged;) {
      // One may speak for several.
      const std::size_t step = random() % 3 == 0 ? 3 : 1;
      said = std::min(acknowledged, said + step);
      sender.acknowledge(said, is_together ? kAcknowledgementBytes : 1 + random() % kAcknowledgementBytes);
      if (is_together) continue;
      sender.driver->run();
      for (std::size_t i = 0; i < count; ++i) CHECK_EQ(sender.is_sent(i), i < said);
    }
    const std::uint64_t wrong = random() % 2 == 0 ? count + 1 : ~std::uint64_t{0};
    if (end == End::kClosed || end == End::kReset) sender.end(end == End::kReset);
    if (end == End::kWrong) sender.acknowledge(wrong);
    if (end == End::kGarbage) sender.peer->write_all(std::vector<std::uint8_t>(kAcknowledgementBytes));
    sender.driver->run();
    if (end == End::kNone || (!is_broken && acknowledged == count)) {
      for (const Status& failure : sender.failures.all) CHECK_OK(failure);
    } else if (is_broken) {
      CHECK(!sender.failures.all.empty());
      if (end == End::kWrong) check_names(sender.failures.all[0], "acknowledged " + std::to_string(wrong) + " chunks");
      // The poller still tells of the end that the failure brings about: it completes nothing more.
      sender.acknowledge(count);
      sender.driver->kick();
      sender.driver->run();
    } else {
      check_failed_at_message(sender.failures, acknowledged);
    }
    for (std::size_t i = 0; i < count; ++i) CHECK_EQ(sender.is_sent(i), i < acknowledged);
  }
}

TEST_CASE(an_acknowledgement_that_nobody_asked_for_is_refused_with_the_first_that_counts) {
  Sender sender;
  sender.acknowledge(5);
  sender.send(kMinMessage);
  sender.acknowledge(1);
  sender.driver->run();
  CHECK(!sender.failures.all.empty());
  check_names(sender.failures.all[0], "acknowledged 5 chunks");
}

// Nothing is under way, or a part of the first chunk.
TEST_CASE(a_peer_that_ended_before_it_had_a_chunk_fails_the_message) {
  for (const bool resets : {false, true}) {
    for (const bool is_under_way : {false, true}) {
      TwoWayBehaviour behaviour;
      behaviour.capacity = 1000;
      Sender sender(behaviour);
      if (is_under_way) sender.send(kMinMessage);
      sender.end(resets);
      sender.driver->run();
      CHECK_EQ(sender.failures.all.empty(), !is_under_way);
      if (!is_under_way) sender.send(kMinMessage);
      CHECK(!sender.failures.all.empty());
      CHECK(!sender.is_sent(0));
    }
  }
}

// Of a message of many chunks, the last may be too small to be worth it; and so may a message that is all one chunk.
TEST_CASE(the_last_chunk_and_the_message_decide_what_is_worth_it) {
  Sender sender({}, 2);
  constexpr std::size_t kFrame = kFrameHeaderBytes + kMinChunk;
  sender.send(kMinMessage);
  const std::vector<std::uint8_t> frames = sender.peer->read_all();
  CHECK_EQ(kMinMessage % kMinChunk, 1u);
  for (std::size_t chunk = 0; chunk <= kMinMessage / kMinChunk; ++chunk) {
    CHECK_EQ(header_at(frames, chunk * kFrame).acknowledge, chunk < kMinMessage / kMinChunk);
  }
  CHECK(!sender.is_sent(0));
  sender.acknowledge(kMinMessage / kMinChunk);
  sender.driver->run();
  CHECK(sender.is_sent(0));
  std::size_t number = 1;
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, kMinChunk - 1, kMinMessage - 1}) {
    sender.send(bytes);
    CHECK(!header_at(sender.peer->read_all(), 0).acknowledge);
    CHECK(sender.is_sent(number++));
  }
}

// What the header asked for stays true, whether the payload went out by reference or not.
TEST_CASE(a_chunk_that_is_copied_after_all_waits_for_its_acknowledgement) {
  for (const std::size_t zero_copy :
       {std::size_t{0}, kFrameHeaderBytes / 2, kFrameHeaderBytes, kFrameHeaderBytes + 1000}) {
    TwoWayBehaviour behaviour;
    behaviour.zero_copy_bytes = zero_copy;
    Sender sender(behaviour);
    sender.send(kMinMessage);
    sender.send(kMinMessage);  // asks no more
    CHECK(!sender.is_sent(0));
    CHECK(sender.is_sent(1));
    const std::vector<std::uint8_t> frames = sender.peer->read_all();
    for (std::size_t number = 0; number < 2; ++number) {
      const std::size_t position = number * (kFrameHeaderBytes + kMinMessage);
      CHECK_EQ(header_at(frames, position).acknowledge, number == 0);
      check_payload(frames, position + kFrameHeaderBytes, number, kMinMessage);
    }
    sender.acknowledge(1);
    sender.driver->run();
    CHECK(sender.is_sent(0));
  }
}

TEST_CASE(what_finds_no_place_among_the_unacknowledged_is_copied) {
  Sender sender({}, 2);
  sender.send((kMaxUnacknowledged + 2) * kMinChunk);
  const std::vector<std::uint8_t> frames = sender.peer->read_all();
  for (std::size_t chunk = 0; chunk < kMaxUnacknowledged + 2; ++chunk) {
    CHECK_EQ(header_at(frames, chunk * (kFrameHeaderBytes + kMinChunk)).acknowledge, chunk < kMaxUnacknowledged);
  }
  for (const std::size_t said : {kMaxUnacknowledged - 1, kMaxUnacknowledged}) {
    CHECK(!sender.is_sent(0));
    sender.acknowledge(said);
    sender.driver->run();
  }
  CHECK(sender.is_sent(0));
  // There is room again.
  sender.send(kMinMessage);
  CHECK(header_at(sender.peer->read_all(), 0).acknowledge);
}

TEST_CASE(an_acknowledgement_is_read_while_the_next_chunk_finds_no_room) {
  TwoWayBehaviour behaviour;
  behaviour.capacity = kFrameHeaderBytes + kMinMessage + 100;
  Sender sender(behaviour);
  sender.send(kMinMessage);
  sender.send(kMinMessage);  // 100 bytes of it, and then there is no room
  CHECK_EQ(sender.peer->unread_bytes(), behaviour.capacity);
  sender.acknowledge(1);
  sender.driver->run();
  CHECK(sender.is_sent(0));
  sender.peer->read_all();
  sender.driver->run();
  CHECK(!sender.is_sent(1));
  sender.acknowledge(2);
  sender.driver->run();
  CHECK(sender.is_sent(1));
}

// A sender that gives up memory which the peer may still read says so first: what the peer has not received by then is
// no message, though every byte of it can be read.
TEST_CASE(what_a_sender_abandoned_is_not_received) {
  Sender sender;
  sender.send(kMinMessage);
  CHECK_EQ(sender.peer->unread_bytes(), kFrameHeaderBytes + kMinMessage);
  sender.release_memory();
  CommPair comms(over_pipes(1));
  ReceiveTable table;
  Failures failures;
  TwoWayEnd* const end = sender.peer.get();
  RecvStream stream(std::move(sender.peer), &failures, 0, &table);
  Driver driver(&stream, end);
  std::vector<std::uint8_t> room(kMinMessage);
  Request receive;
  table.post(&receive, comms.receiver.get(), 0, room.data(), room.size(), nullptr);
  driver.kick();
  driver.run();
  check_failed_at_message(failures, 0);
  CHECK(!is_done(&receive));
}

TEST_CASE(a_chunk_in_the_middle_is_abandoned_too) {
  TwoWayBehaviour behaviour;
  behaviour.capacity = kMinMessage;
  behaviour.zero_copy_bytes = kMinMessage / 2;  // and then copies
  Sender sender(behaviour);
  sender.send(kMinMessage);
  CHECK(!sender.peer->is_broken());
  sender.release_memory();
  CHECK(sender.peer->is_broken());
}

// A comm that is closed as usual: what was copied still arrives.
TEST_CASE(a_sender_with_nothing_to_abandon_resets_nothing) {
  Sender sender;
  sender.release_memory();
  CHECK(!sender.peer->is_broken());
  sender.send(kMinMessage);
  sender.peer->read_all();
  sender.acknowledge(1);
  sender.driver->run();
  CHECK(sender.is_sent(0));
  sender.send(100);
  sender.release_memory();
  CHECK(!sender.peer->is_broken());
  CHECK_EQ(sender.peer->unread_bytes(), kFrameHeaderBytes + 100);
}

}  // namespace bagua_net

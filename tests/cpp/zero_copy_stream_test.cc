// Sending and receiving streams over byte streams that keep references, deliver few bytes at a time, interrupt and
// refuse in both directions, and wake a stream only once for every change: the sender overwrites its memory the moment
// a request is done, and still every message arrives whole, and no stream is left asleep with work to do.
#include <sched.h>
#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "support/check.h"
#include "support/driven_streams.h"
#include "support/two_way_pipe.h"
#include "transport/chunks/chunk_scheduler.h"
#include "transport/chunks/receive_table.h"
#include "transport/comm/recv_comm.h"
#include "transport/comm/send_comm.h"
#include "transport/stream/recv_stream.h"
#include "transport/stream/send_stream.h"

namespace bagua_net {
namespace {

// By reference go chunks from kMinChunk on of messages from kMinMessage on.
constexpr std::size_t kMinChunk = 65536;
constexpr std::size_t kMinMessage = 524289;
constexpr std::size_t kMaxUnacknowledged = 64;

// Messages over streams that refer, both ends driven by the test.
class Link {
 public:
  struct Settings {
    std::size_t streams = 1;
    ChunkPolicy chunks;
    TwoWayBehaviour sender;
    TwoWayBehaviour receiver;
    std::size_t lag = 0;     // receives are posted so many messages later
    bool overwrites = true;  // the sender, the moment a request is done
    unsigned seed = 1;
  };

  explicit Link(Settings settings) : settings_(settings), random_(settings.seed), scheduler_(settings.chunks) {
    for (std::size_t i = 0; i < settings.streams; ++i) {
      const int index = static_cast<int>(i);
      auto [near, far] =
          TwoWayEnd::make(settings.sender, settings.receiver, settings.seed + static_cast<unsigned>(2 * i));
      TwoWayEnd* near_end = near.get();
      TwoWayEnd* far_end = far.get();
      senders_.push_back(std::make_unique<SendStream>(std::move(near), &failures_, index, &scheduler_, true, nullptr));
      receivers_.push_back(std::make_unique<RecvStream>(std::move(far), &failures_, index, &table_));
      send_drivers_.emplace_back(senders_.back().get(), near_end);
      receive_drivers_.emplace_back(receivers_.back().get(), far_end);
    }
    scheduler_.set_streams(0, static_cast<int>(settings.streams));
  }

  void exchange(const std::vector<std::size_t>& sizes) {
    std::size_t sends_done = 0;
    std::size_t receives_done = 0;
    while (sends_done < sizes.size() || receives_done < sizes.size()) {
      bool quiet = true;
      if (sends_.size() < sizes.size() && sends_.size() < sends_done + kMaxRequestsPerComm) {
        quiet = false;
        if (random_() % 8 == 0) send(sizes[sends_.size()]);
      }
      const bool is_due = receives_.size() + settings_.lag < sends_.size() || sends_.size() == sizes.size();
      if (receives_.size() < sizes.size() && is_due && receives_.size() < receives_done + kMaxRequestsPerComm) {
        quiet = false;
        if (random_() % 8 == 0) receive(sizes[receives_.size()]);
      }
      for (auto* drivers : {&send_drivers_, &receive_drivers_}) {
        for (Driver& driver : *drivers) {
          if (!driver.has_work()) continue;
          quiet = false;
          if (random_() % 2 == 0) driver.step(random_() % 4 == 0 ? 1 : random_() % kTurnBytes);
        }
      }
      for (const Status& failure : failures_.all) CHECK_OK(failure);
      // Not in order: a message of many chunks may be overtaken.
      for (std::size_t number = sends_done; number < sends_.size(); ++number) {
        Send& one = sends_[number];
        if (one.done || !is_done(one.request)) continue;
        one.done = true;
        quiet = false;
        if (settings_.overwrites) std::fill(one.data.begin(), one.data.end(), std::uint8_t{0x5a});
      }
      while (sends_done < sends_.size() && sends_[sends_done].done) ++sends_done;
      while (receives_done < receives_.size() && is_done(receives_[receives_done].request)) {
        CHECK(receives_[receives_done].data == make_message(receives_done, sizes[receives_done]));
        ++receives_done;
        quiet = false;
      }
      if (quiet) check::fail(__FILE__, __LINE__, "nobody has anything to do, and messages are under way");
    }
  }

  const Failures& failures() const { return failures_; }

 private:
  struct Send {
    std::vector<std::uint8_t> data;
    Request request;
    bool done = false;
  };
  struct Receive {
    std::vector<std::uint8_t> data;
    Request request;
  };

  void send(std::size_t bytes) {
    const std::size_t number = sends_.size();
    Send& one = sends_.emplace_back();
    one.data = make_message(number, bytes);
    one.request.start(comms_.sending.get(), number, one.data.data(), bytes, nullptr);
    scheduler_.push(&one.request);
    // As SendComm does.
    for (std::size_t i = 0; i < senders_.size(); ++i) {
      if (!senders_[i]->is_blocked()) send_drivers_[i].kick();
    }
  }
  void receive(std::size_t bytes) {
    const std::size_t number = receives_.size();
    Receive& one = receives_.emplace_back();
    one.data.resize(bytes, 0xee);
    const std::uint64_t parked =
        table_.post(&one.request, comms_.receiving.get(), number, one.data.data(), bytes, nullptr);
    for (std::size_t i = 0; i < receivers_.size(); ++i) {
      if ((parked >> i & 1) != 0) receive_drivers_[i].kick();
    }
  }

  const Settings settings_;
  std::mt19937 random_;
  IdleComms comms_;
  ChunkScheduler scheduler_;
  ReceiveTable table_;
  Failures failures_;
  std::deque<Send> sends_;
  std::deque<Receive> receives_;
  std::vector<std::unique_ptr<SendStream>> senders_;
  std::vector<std::unique_ptr<RecvStream>> receivers_;
  std::deque<Driver> send_drivers_;
  std::deque<Driver> receive_drivers_;
};

std::vector<std::size_t> random_sizes(std::mt19937& random, std::size_t count) {
  std::vector<std::size_t> sizes;
  for (std::size_t i = 0; i < count; ++i) {
    switch (random() % 4) {
      case 0: sizes.push_back(random() % 300); break;
      case 1: sizes.push_back(kMinMessage - 1 + random() % 3); break;
      default: sizes.push_back(random() % (2 * kMinMessage));
    }
  }
  return sizes;
}

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

  // The driver has not run yet.
  void post(std::size_t bytes) {
    Message& one = messages_.emplace_back();
    one.data = make_message(messages_.size() - 1, bytes);
    one.request.start(comms_.sending.get(), messages_.size() - 1, one.data.data(), bytes, nullptr);
    scheduler_.push(&one.request);
    if (!stream_->is_blocked()) driver->kick();
  }
  void send(std::size_t bytes) {
    post(bytes);
    driver->run();
  }
  void abandon() { stream_->abandon(); }
  bool is_sent(std::size_t number) {
    Message& one = messages_[number];
    one.done = one.done || is_done(one.request);
    return one.done;
  }

  std::vector<std::uint8_t> read(std::size_t most = kAllBytes) {
    std::vector<std::uint8_t> bytes(std::min(peer->unread_bytes(), most));
    const iovec piece{bytes.data(), bytes.size()};
    if (!bytes.empty()) CHECK_EQ(peer->read(&piece, 1), static_cast<ssize_t>(bytes.size()));
    return bytes;
  }
  void acknowledge(std::uint64_t chunks) {
    std::array<std::uint8_t, kAcknowledgementBytes> bytes;
    encode_acknowledgement({chunks, false}, bytes.data());
    write(bytes.data(), bytes.size());
  }
  void write(const std::uint8_t* bytes, std::size_t count) {
    const iovec piece{const_cast<std::uint8_t*>(bytes), count};
    CHECK_EQ(peer->write(&piece, 1), static_cast<ssize_t>(count));
  }

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

  IdleComms comms_;
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
  CHECK(failures.all[0].code() == StatusCode::kRemoteError);
  const std::string name = "message " + std::to_string(number);
  if (failures.all[0].message().find(name) == std::string::npos) {
    check::fail(__FILE__, __LINE__, "no \"" + name + "\" in: " + failures.all[0].message());
  }
}

}  // namespace

TEST_CASE(messages_survive_a_sender_that_overwrites_them) {
  for (unsigned seed = 1; seed <= static_cast<unsigned>(check::rounds(40)); ++seed) {
    std::mt19937 random(seed);
    Link::Settings settings;
    settings.seed = seed;
    settings.streams = 1 + seed % 3;
    settings.chunks.max_bytes = 2 * kMinChunk;
    settings.lag = random() % 8;
    settings.sender = {1 + random() % 40, 1 + random() % 60000, 10, 10, 1 + random() % 300000};
    if (seed % 4 == 0) settings.sender.zero_copy_bytes = random() % (8 * kMinMessage);
    settings.receiver = {1 + random() % 60000, 1 + random() % 40, 10, 10, 1 + random() % 40};
    Link(settings).exchange(random_sizes(random, 20));
  }
}

// Acknowledgements that find no room, or room for a part only, while everything else is smooth.
TEST_CASE(acknowledgements_are_cut_and_refused) {
  for (const std::size_t room : {1, 5, 15, 16, 17, 31}) {
    for (unsigned seed = 1; seed <= 5; ++seed) {
      std::mt19937 random(seed);
      Link::Settings settings;
      settings.seed = seed;
      settings.receiver = {100000, 3, 10, 40, room};
      Link(settings).exchange(std::vector<std::size_t>(10, kMinMessage));
    }
  }
}

// Refused in the middle of a header, right after it, and after so many bytes of the payload; in the first chunk and in
// a later one.
TEST_CASE(the_kernel_refuses_to_refer_from_any_byte_on) {
  constexpr std::size_t kFrame = kFrameHeaderBytes + kMinMessage;
  for (const std::size_t begin : {std::size_t{0}, 2 * kFrame}) {
    for (const std::size_t more : {std::size_t{0}, std::size_t{1}, kFrameHeaderBytes - 1, kFrameHeaderBytes,
                                   kFrameHeaderBytes + 1, kFrameHeaderBytes + 40000, kFrame - 1}) {
      for (unsigned seed = 1; seed <= 2; ++seed) {
        Link::Settings settings;
        settings.seed = seed;
        settings.sender = {3, 50000, 10, 10, 200000, begin + more};
        settings.receiver = {100000, 5, 10, 10, 20};
        Link(settings).exchange(std::vector<std::size_t>(5, kMinMessage));
      }
    }
  }
}

TEST_CASE(more_chunks_than_can_be_unacknowledged) {
  for (unsigned seed = 1; seed <= 3; ++seed) {
    Link::Settings settings;
    settings.seed = seed;
    settings.streams = 2;
    settings.chunks.max_bytes = kMinChunk;
    settings.lag = 3;
    settings.receiver = {100000, 5, 10, 10, 20};
    Link(settings).exchange(std::vector<std::size_t>(5, 3 * kMaxUnacknowledged * kMinChunk));
  }
}

TEST_CASE(a_chunk_is_acknowledged_before_its_request_is_done) {
  Sender sender;
  sender.send(kMinMessage);
  CHECK(!sender.is_sent(0));
  const std::vector<std::uint8_t> frame = sender.read();
  CHECK_EQ(frame.size(), kFrameHeaderBytes + kMinMessage);
  CHECK(header_at(frame, 0).acknowledge);
  check_payload(frame, kFrameHeaderBytes, 0, kMinMessage);
  sender.driver->run();
  CHECK(!sender.is_sent(0));
  sender.acknowledge(1);
  sender.driver->run();
  CHECK(sender.is_sent(0));
  CHECK(sender.failures.all.empty());
}

TEST_CASE(small_chunks_ask_for_nothing) {
  Sender sender;
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, kMinChunk - 1}) sender.send(bytes);
  const std::vector<std::uint8_t> frames = sender.read();
  std::size_t position = 0;
  for (std::size_t number = 0; number < 3; ++number) {
    const FrameHeader header = header_at(frames, position);
    CHECK(!header.acknowledge);
    CHECK(sender.is_sent(number));
    position += kFrameHeaderBytes + header.payload_bytes;
  }
}

// Of a message of many chunks, the last may be too small to be worth it; and so may a message that is all one chunk.
TEST_CASE(the_last_chunk_and_the_message_decide_what_is_worth_it) {
  Sender sender({}, 2);
  constexpr std::size_t kFrame = kFrameHeaderBytes + kMinChunk;
  sender.send(kMinMessage);
  std::vector<std::uint8_t> frames = sender.read();
  CHECK_EQ(kMinMessage % kMinChunk, 1u);
  for (std::size_t chunk = 0; chunk < kMinMessage / kMinChunk; ++chunk) {
    CHECK(header_at(frames, chunk * kFrame).acknowledge);
  }
  CHECK(!header_at(frames, kMinMessage / kMinChunk * kFrame).acknowledge);
  CHECK(!sender.is_sent(0));
  sender.acknowledge(kMinMessage / kMinChunk);
  sender.driver->run();
  CHECK(sender.is_sent(0));
  sender.send(kMinMessage - 1);
  CHECK(!header_at(sender.read(), 0).acknowledge);
  CHECK(sender.is_sent(1));
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
    const std::vector<std::uint8_t> frames = sender.read();
    CHECK(header_at(frames, 0).acknowledge);
    check_payload(frames, kFrameHeaderBytes, 0, kMinMessage);
    CHECK(!header_at(frames, kFrameHeaderBytes + kMinMessage).acknowledge);
    check_payload(frames, 2 * kFrameHeaderBytes + kMinMessage, 1, kMinMessage);
    sender.acknowledge(1);
    sender.driver->run();
    CHECK(sender.is_sent(0));
  }
}

TEST_CASE(what_finds_no_place_among_the_unacknowledged_is_copied) {
  Sender sender({}, 2);
  sender.send((kMaxUnacknowledged + 2) * kMinChunk);
  const std::vector<std::uint8_t> frames = sender.read();
  for (std::size_t chunk = 0; chunk < kMaxUnacknowledged + 2; ++chunk) {
    CHECK_EQ(header_at(frames, chunk * (kFrameHeaderBytes + kMinChunk)).acknowledge, chunk < kMaxUnacknowledged);
  }
  CHECK(!sender.is_sent(0));
  sender.acknowledge(kMaxUnacknowledged - 1);
  sender.driver->run();
  CHECK(!sender.is_sent(0));
  sender.acknowledge(kMaxUnacknowledged);
  sender.driver->run();
  CHECK(sender.is_sent(0));
  // There is room again.
  sender.send(kMinMessage);
  CHECK(header_at(sender.read(), 0).acknowledge);
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
  sender.read();
  sender.driver->run();
  CHECK(!sender.is_sent(1));
  sender.acknowledge(2);
  sender.driver->run();
  CHECK(sender.is_sent(1));
}

TEST_CASE(the_end_names_the_first_message_that_is_not_acknowledged) {
  for (const bool resets : {false, true}) {
    Sender sender;
    for (int i = 0; i < 3; ++i) sender.send(kMinMessage);
    sender.acknowledge(1);
    sender.driver->run();
    CHECK(sender.is_sent(0));
    resets ? sender.peer->reset() : sender.peer->shutdown();
    sender.driver->run();
    check_failed_at_message(sender.failures, 1);
    CHECK(!sender.is_sent(1));
  }
}

// The driver looks when both have come: there will not be another event.
TEST_CASE(the_end_right_behind_an_acknowledgement_is_noticed) {
  for (const bool resets : {false, true}) {
    for (const std::size_t acknowledged : {1, 2, 15, 16, 17}) {
      Sender sender;
      for (std::size_t i = 0; i <= acknowledged; ++i) sender.send(kMinMessage);
      for (std::size_t i = 1; i <= acknowledged; ++i) sender.acknowledge(i);
      resets ? sender.peer->reset() : sender.peer->shutdown();
      sender.driver->run();
      check_failed_at_message(sender.failures, acknowledged);
      for (std::size_t i = 0; i <= acknowledged; ++i) CHECK_EQ(sender.is_sent(i), i < acknowledged);
    }
  }
}

// A receiver that has everything closes: whatever the number of acknowledgements that come with the end.
TEST_CASE(the_end_behind_the_last_acknowledgement_is_no_failure) {
  for (const bool resets : {false, true}) {
    for (const std::size_t count : {1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64}) {
      Sender sender;
      for (std::size_t i = 0; i < count; ++i) sender.send(kMinMessage);
      for (std::size_t i = 1; i <= count; ++i) sender.acknowledge(i);
      resets ? sender.peer->reset() : sender.peer->shutdown();
      sender.driver->run();
      for (const Status& failure : sender.failures.all) CHECK_OK(failure);
      for (std::size_t i = 0; i < count; ++i) CHECK(sender.is_sent(i));
    }
  }
}

TEST_CASE(a_peer_that_ended_before_anything_was_sent_fails_the_message) {
  for (const bool resets : {false, true}) {
    Sender sender;
    resets ? sender.peer->reset() : sender.peer->shutdown();
    sender.driver->run();
    CHECK(sender.failures.all.empty());  // nothing is under way
    sender.send(kMinMessage);
    CHECK(!sender.failures.all.empty());
    CHECK(!sender.is_sent(0));
  }
}

TEST_CASE(the_end_in_the_middle_of_a_chunk_fails_the_message) {
  for (const bool resets : {false, true}) {
    TwoWayBehaviour behaviour;
    behaviour.capacity = 1000;
    Sender sender(behaviour);
    sender.send(kMinMessage);
    resets ? sender.peer->reset() : sender.peer->shutdown();
    sender.driver->run();
    CHECK(!sender.failures.all.empty());
    CHECK(!sender.is_sent(0));
  }
}

TEST_CASE(an_acknowledgement_that_cannot_be_right_fails_the_stream) {
  for (const std::uint64_t received : {std::uint64_t{2}, std::uint64_t{kMinMessage + 1}, std::uint64_t{1} << 63}) {
    Sender sender;
    sender.send(kMinMessage);
    sender.acknowledge(received);
    sender.driver->run();
    CHECK(!sender.failures.all.empty());
    CHECK(sender.failures.all[0].message().find(std::to_string(received)) != std::string::npos);
    CHECK(!sender.is_sent(0));
  }
}

TEST_CASE(an_acknowledgement_that_nobody_asked_for_is_refused_with_the_first_that_counts) {
  Sender sender;
  sender.acknowledge(5);
  sender.send(kMinMessage);
  sender.acknowledge(1);
  sender.driver->run();
  CHECK(!sender.failures.all.empty());
  CHECK(sender.failures.all[0].message().find("acknowledged 5 chunks") != std::string::npos);
}

// A sender that gives up memory which the peer may still read says so first: what the peer has not received by then is
// no message, though every byte of it can be read.
TEST_CASE(what_a_sender_abandoned_is_not_received) {
  Sender sender;
  sender.send(kMinMessage);
  CHECK_EQ(sender.peer->unread_bytes(), kFrameHeaderBytes + kMinMessage);
  sender.abandon();
  IdleComms comms;
  ReceiveTable table;
  Failures failures;
  TwoWayEnd* const end = sender.peer.get();
  RecvStream stream(std::move(sender.peer), &failures, 0, &table);
  Driver driver(&stream, end);
  std::vector<std::uint8_t> room(kMinMessage);
  Request receive;
  table.post(&receive, comms.receiving.get(), 0, room.data(), room.size(), nullptr);
  driver.kick();
  driver.run();
  check_failed_at_message(failures, 0);
  CHECK(!is_done(receive));
}

TEST_CASE(a_chunk_in_the_middle_is_abandoned_too) {
  TwoWayBehaviour behaviour;
  behaviour.capacity = kMinMessage;
  behaviour.zero_copy_bytes = kMinMessage / 2;  // and then copies
  Sender sender(behaviour);
  sender.send(kMinMessage);
  CHECK(!sender.peer->is_broken());
  sender.abandon();
  CHECK(sender.peer->is_broken());
}

// A comm that is closed as usual: what was copied still arrives.
TEST_CASE(a_sender_with_nothing_to_abandon_resets_nothing) {
  Sender sender;
  sender.abandon();
  CHECK(!sender.peer->is_broken());
  sender.send(kMinMessage);
  sender.read();
  sender.acknowledge(1);
  sender.driver->run();
  CHECK(sender.is_sent(0));
  sender.send(100);
  sender.abandon();
  CHECK(!sender.peer->is_broken());
  CHECK_EQ(sender.peer->unread_bytes(), kFrameHeaderBytes + 100);
}

// After a failure the poller still tells of the end that the failure brings about.
TEST_CASE(a_stream_that_failed_completes_nothing_more) {
  Sender sender;
  for (int i = 0; i < 2; ++i) sender.send(kMinMessage);
  const std::array<std::uint8_t, 16 * kAcknowledgementBytes> garbage{};
  sender.write(garbage.data(), garbage.size());
  sender.acknowledge(2);
  sender.driver->run();
  CHECK(!sender.failures.all.empty());
  sender.driver->kick();
  sender.driver->run();
  CHECK(!sender.is_sent(0));
  CHECK(!sender.is_sent(1));
}

}  // namespace bagua_net

CHECK_MAIN

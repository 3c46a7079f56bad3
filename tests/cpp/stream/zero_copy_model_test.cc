// Sending and receiving streams over byte streams that keep references, deliver few bytes at a time, interrupt and
// refuse in both directions, and wake a stream only once for every change: the sender overwrites its memory the moment
// a request is done, and still every message arrives whole, and no stream is left asleep with work to do.
#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <random>
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

// Messages over streams that refer, both ends driven by the test.
class Link {
 public:
  struct Settings {
    std::size_t streams = 1;
    ChunkPolicy chunks;
    TwoWayBehaviour sender;
    TwoWayBehaviour receiver;
    std::size_t lag = 0;  // receives are posted so many messages later
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
        if (one.done || !is_done(&one.request)) continue;
        one.done = true;
        quiet = false;
        std::fill(one.data.begin(), one.data.end(), std::uint8_t{0x5a});
      }
      while (sends_done < sends_.size() && sends_[sends_done].done) ++sends_done;
      while (receives_done < receives_.size() && is_done(&receives_[receives_done].request)) {
        CHECK(receives_[receives_done].data == make_message(receives_done, sizes[receives_done]));
        ++receives_done;
        quiet = false;
      }
      if (quiet) check::fail(__FILE__, __LINE__, "nobody has anything to do, and messages are under way");
    }
  }

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
    one.request.start(comms_.sender.get(), number, one.data.data(), bytes, nullptr);
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
        table_.post(&one.request, comms_.receiver.get(), number, one.data.data(), bytes, nullptr);
    for (std::size_t i = 0; i < receivers_.size(); ++i) {
      if ((parked >> i & 1) != 0) receive_drivers_[i].kick();
    }
  }

  const Settings settings_;
  std::mt19937 random_;
  CommPair comms_{over_pipes(1)};
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

}  // namespace

TEST_CASE(messages_survive_a_sender_that_overwrites_them) {
  for (unsigned seed = 1; seed <= static_cast<unsigned>(check::rounds(60)); ++seed) {
    std::mt19937 random(seed);
    Link::Settings settings;
    settings.seed = seed;
    settings.streams = 1 + seed % 3;
    settings.chunks.max_bytes = 2 * kMinChunk;
    settings.lag = random() % 8;
    settings.sender = {1 + random() % 40, 1 + random() % 60000, 10, 10, 1 + random() % 300000};
    if (seed % 4 == 0) settings.sender.zero_copy_bytes = random() % (8 * kMinMessage);
    settings.receiver = {1 + random() % 60000, 1 + random() % 40, 10, 10, 1 + random() % 40};
    std::vector<std::size_t> sizes = random_sizes(random, 20);
    if (seed % 3 == 0) {
      // Acknowledgements that find no room, or room for a part only, while everything else is smooth.
      settings.sender = {};
      settings.receiver = {100000, 3, 10, 40, 1 + random() % 32};
    }
    if (seed % 20 == 0) {
      // More chunks than can be unacknowledged.
      settings.chunks.max_bytes = kMinChunk;
      sizes.assign(5, 3 * kMaxUnacknowledged * kMinChunk);
    }
    Link(settings).exchange(sizes);
  }
}

// Refused in the middle of a header, right after it, and after so many bytes of the payload; in the first chunk and in
// a later one.
TEST_CASE(the_kernel_refuses_to_refer_from_any_byte_on) {
  constexpr std::size_t kFrame = kFrameHeaderBytes + kMinMessage;
  for (const std::size_t begin : {std::size_t{0}, 2 * kFrame}) {
    for (const std::size_t more : {std::size_t{0}, std::size_t{1}, kFrameHeaderBytes - 1, kFrameHeaderBytes,
                                   kFrameHeaderBytes + 1, kFrameHeaderBytes + 40000, kFrame - 1}) {
      Link::Settings settings;
      settings.seed = static_cast<unsigned>(begin + more);
      settings.sender = {3, 50000, 10, 10, 200000, begin + more};
      settings.receiver = {100000, 5, 10, 10, 20};
      Link(settings).exchange(std::vector<std::size_t>(5, kMinMessage));
    }
  }
}

}  // namespace bagua_net

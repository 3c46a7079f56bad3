// A model of a comm, driven by a seed and without threads or sockets. Its byte streams deliver few bytes at a time,
// interrupt and refuse in both directions, and wake a stream only once for every change. With recovery, connections
// break at any byte, the ends learn of it at different times, replacements come late and out of order, and break again;
// or a sender ends one in order. Without, chunks go by reference. What arrives is compared with what was sent, byte by
// byte, nothing is written to memory that its owner has back, and no stream is left asleep with work to do. Whole
// comms: nic_model_test.cc. Long run: BAGUA_TEST_SEEDS=<number>.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "support/driven_streams.h"
#include "transport/chunks/chunk_scheduler.h"
#include "transport/chunks/receive_table.h"
#include "transport/chunks/replay_queue.h"
#include "transport/stream/recv_stream.h"
#include "transport/stream/send_stream.h"

namespace bagua_net {
namespace {

struct Counts {
  int breaks = 0;
  int moves = 0;  // that did not break meanwhile
  int replayed = 0;
  std::size_t messages = 0;
};

struct Settings {
  unsigned seed = 1;
  std::size_t streams = 1;
  ChunkPolicy chunks;
  TwoWayBehaviour sender;
  TwoWayBehaviour receiver;
  unsigned breaks_one_in = 0;  // steps; 0: without recovery, and by reference
  std::size_t lag = 0;         // receives are posted so many messages later
};

class Model {
 public:
  explicit Model(const Settings& settings)
      : settings_(settings), random_(settings.seed), chunks_(settings.chunks), table_(recovers()) {
    chunks_.set_streams(0, static_cast<int>(settings.streams));
    for (std::size_t i = 0; i < settings.streams; ++i) open(static_cast<int>(i), false);
  }

  void run(const std::vector<std::size_t>& sizes) {
    std::size_t steps = 0;
    while (sends_done_ < sizes.size() || receives_done_ < sizes.size()) {
      // Bounded: with so few bytes a step and so many breaks, this is plenty.
      if (++steps > 3'000'000) check::fail(__FILE__, __LINE__, "no progress");
      const bool calm = !recovers() || steps > 200'000;
      if (!calm && chance(settings_.breaks_one_in)) break_one();
      if (!calm && chance(400)) move_one();
      tell_some(calm);
      post(sizes);
      drive();
      for (const Status& failure : failures_.all) CHECK_OK(failure);
      recover();
      finish_requests();
    }
    for (const Receive& receive : receives_) {
      CHECK(std::all_of(receive.data.begin(), receive.data.end(), [](std::uint8_t byte) { return byte == 0xa5; }));
    }
    counts_.messages = sizes.size();
  }
  const Counts& counts() const { return counts_; }

 private:
  struct Link {
    std::unique_ptr<SendStream> sender;  // nullptr: lost
    std::unique_ptr<RecvStream> receiver;
    std::unique_ptr<TwoWayEnd> far;  // until the receiver has taken it in
    TwoWayEnd* near_end = nullptr;
    TwoWayEnd* far_end = nullptr;
    std::unique_ptr<Driver> send_driver;
    std::unique_ptr<Driver> receive_driver;
    int sender_index = 0;
    bool is_broken = false;
    bool near_told = false;
    bool far_told = false;
  };
  struct Send {
    std::vector<std::uint8_t> data;
    Request request;
    bool done = false;
  };
  struct Receive {
    std::vector<std::uint8_t> data;
    Request request;
  };

  bool recovers() const { return settings_.breaks_one_in > 0; }
  bool chance(unsigned one_in) { return random_() % one_in == 0; }

  void open(int index, bool replaces) {
    auto [near, far] = TwoWayEnd::make(settings_.sender, settings_.receiver, static_cast<unsigned>(random_()));
    Link& link = links_.emplace_back();
    link.near_end = near.get();
    link.far_end = far.get();
    link.far = std::move(far);
    link.sender_index = index;
    link.sender = std::make_unique<SendStream>(std::move(near), &failures_, index, &chunks_, !recovers(), nullptr,
                                               recovers() ? &replay_ : nullptr);
    if (replaces) link.sender->begin_with_replay();
    link.send_driver = std::make_unique<Driver>(link.sender.get(), link.near_end);
    link.send_driver->kick();
    if (!replaces) take_in(link);
  }
  void take_in(Link& link) {
    int index = 0;
    while ((receiver_indices_ >> index & 1) != 0) ++index;
    receiver_indices_ |= std::uint64_t{1} << index;
    link.receiver =
        std::make_unique<RecvStream>(std::move(link.far), &failures_, index, &table_, recovers(), recovers());
    link.receive_driver = std::make_unique<Driver>(link.receiver.get(), link.far_end);
    link.receive_driver->kick();
  }

  void break_one() {
    if (links_.empty()) return;
    Link& link = links_[random_() % links_.size()];
    // A receiver has places for so many.
    if (link.is_broken || link.sender == nullptr || links_.size() > 50) return;
    link.is_broken = true;
    const auto part = [&](std::size_t bytes) { return chance(3) ? bytes : random_() % (bytes + 1); };
    link.near_end->sever(part(link.near_end->unread_bytes()), part(link.near_end->unwritten_bytes()));
    ++counts_.breaks;
  }
  void move_one() {
    if (links_.empty() || links_.size() > 50) return;
    Link& link = links_[random_() % links_.size()];
    if (link.sender == nullptr) return;
    link.sender->begin_leaving();
    link.send_driver->kick();
  }
  void tell_some(bool all) {
    for (Link& link : links_) {
      if (!link.is_broken) continue;
      if (!link.near_told && (all || chance(40))) {
        link.near_told = true;
        if (link.sender != nullptr) link.near_end->tell();
      }
      if (!link.far_told && link.receiver != nullptr && (all || chance(200))) {
        link.far_told = true;
        link.far_end->tell();
      }
    }
  }

  void post(const std::vector<std::size_t>& sizes) {
    if (sends_.size() < sizes.size() && sends_.size() < sends_done_ + kMaxRequestsPerComm && chance(8)) {
      Send& one = sends_.emplace_back();
      const std::size_t number = sends_.size() - 1;
      one.data = make_message(number, sizes[number]);
      one.request.start(comms_.sender.get(), number, one.data.data(), sizes[number], nullptr);
      chunks_.push(&one.request);
      for (Link& link : links_) {
        if (link.sender != nullptr && !link.sender->is_blocked()) link.send_driver->kick();
      }
    }
    const bool is_due = (receives_.size() + settings_.lag < sends_.size() || sends_.size() == sizes.size()) &&
                        receives_.size() < std::min(sends_.size(), receives_done_ + kMaxRequestsPerComm);
    if (is_due && chance(12)) {
      Receive& one = receives_.emplace_back();
      const std::size_t number = receives_.size() - 1;
      one.data.resize(sends_[number].data.size(), 0xee);
      std::uint64_t parked =
          table_.post(&one.request, comms_.receiver.get(), number, one.data.data(), one.data.size(), nullptr);
      for (Link& link : links_) {
        if (link.receiver != nullptr && (parked >> link.receiver->index() & 1) != 0) link.receive_driver->kick();
      }
    }
  }

  void drive() {
    for (Link& link : links_) {
      const auto budget = [this] { return chance(4) ? 1 : random_() % (recovers() ? 5000 : kTurnBytes); };
      if (link.sender != nullptr && chance(2)) link.send_driver->step(budget());
      if (link.receiver != nullptr && chance(2)) link.receive_driver->step(budget());
    }
  }

  // What the comms do.
  void recover() {
    for (Link& link : links_) {
      if (link.sender == nullptr || !link.sender->is_over()) continue;
      std::vector<Chunk> chunks = link.sender->take_unfinished();
      CHECK(link.sender->state() == StreamState::kLost || (link.sender->is_given_back() && chunks.empty()));
      counts_.moves += link.sender->is_given_back() ? 1 : 0;
      counts_.replayed += static_cast<int>(chunks.size());
      replay_.put(std::move(chunks));
      missing_.push_back(link.sender_index);
      // The worker's driver is gone, and the poller with it.
      link.send_driver.reset();
      link.sender.reset();
      for (Link& other : links_) {
        if (other.sender != nullptr && other.sender->replays()) other.send_driver->kick();
      }
    }
    for (Link& link : links_) {
      if (link.receiver == nullptr || !link.receiver->is_over()) continue;
      CHECK(link.receiver->state() == StreamState::kLost || link.receiver->is_given_back());
      receiver_indices_ &= ~(std::uint64_t{1} << link.receiver->index());
      link.receive_driver.reset();
      link.receiver.reset();
      link.far_told = true;
    }
    if (!missing_.empty() && chance(30)) {
      const int index = missing_.front();
      missing_.pop_front();
      open(index, true);
    }
    for (Link& link : links_) {
      if (link.far != nullptr && chance(30)) take_in(link);
    }
    const auto gone = [](const Link& link) {
      return link.sender == nullptr && link.receiver == nullptr && link.far == nullptr;
    };
    links_.erase(std::remove_if(links_.begin(), links_.end(), gone), links_.end());
  }

  void finish_requests() {
    for (std::size_t number = sends_done_; number < sends_.size(); ++number) {
      Send& one = sends_[number];
      if (one.done || !is_done(&one.request)) continue;
      one.done = true;
      std::fill(one.data.begin(), one.data.end(), std::uint8_t{0x5a});
    }
    while (sends_done_ < sends_.size() && sends_[sends_done_].done) ++sends_done_;
    while (receives_done_ < receives_.size() && is_done(&receives_[receives_done_].request)) {
      Receive& one = receives_[receives_done_];
      CHECK(one.data == make_message(receives_done_, one.data.size()));
      std::fill(one.data.begin(), one.data.end(), std::uint8_t{0xa5});
      ++receives_done_;
    }
  }

  const Settings settings_;
  std::mt19937 random_;
  CommPair comms_{over_pipes(1)};
  ChunkScheduler chunks_;
  ReplayQueue replay_;
  ReceiveTable table_;
  Failures failures_;
  std::deque<Send> sends_;
  std::deque<Receive> receives_;
  std::size_t sends_done_ = 0;
  std::size_t receives_done_ = 0;
  std::deque<Link> links_;
  std::deque<int> missing_;
  std::uint64_t receiver_indices_ = 0;
  Counts counts_;
};

std::vector<std::size_t> draw_sizes(std::size_t count, const std::function<std::size_t()>& draw) {
  std::vector<std::size_t> sizes(count);
  std::generate(sizes.begin(), sizes.end(), draw);
  return sizes;
}

// By reference go chunks from kMinChunk on of messages from kMinMessage on.
constexpr std::size_t kMinChunk = 65536;
constexpr std::size_t kMinMessage = 524289;

}  // namespace

TEST_CASE(every_message_arrives_once_whatever_breaks) {
  const char* const asked = std::getenv("BAGUA_TEST_SEEDS");
  const int seeds = asked != nullptr ? static_cast<int>(std::strtol(asked, nullptr, 10)) : check::rounds(200);
  Counts all;
  for (int seed = 1; seed <= seeds; ++seed) {
    try {
      std::mt19937 random(static_cast<unsigned>(seed));
      Settings settings;
      settings.seed = static_cast<unsigned>(seed);
      settings.streams = 1 + random() % 4;
      settings.breaks_one_in = static_cast<unsigned>(20 + random() % 300);
      settings.sender = {1 + random() % 3000, 1 + random() % 3000, static_cast<int>(random() % 10),
                         static_cast<int>(random() % 10), 1 + random() % 20000};
      settings.receiver = settings.sender;
      settings.chunks = {1, 700, 3000, 3000};
      Model model(settings);
      model.run(draw_sizes(40, [&] { return random() % (random() % 4 == 0 ? 8 : random() % 2 == 0 ? 1500 : 20000); }));
      all.breaks += model.counts().breaks;
      all.moves += model.counts().moves;
      all.replayed += model.counts().replayed;
      all.messages += model.counts().messages;
    } catch (const std::exception& error) {
      throw std::runtime_error("seed " + std::to_string(seed) + ": " + error.what());
    }
  }
  std::printf("        %d seeds, %zu messages, %d breaks, %d moves, %d chunks sent again\n", seeds, all.messages,
              all.breaks, all.moves, all.replayed);
  CHECK(all.replayed >= seeds && all.moves >= seeds);
}

// The sender overwrites its memory the moment that a request is done.
TEST_CASE(messages_by_reference_survive_a_sender_that_overwrites_them) {
  for (unsigned seed = 1; seed <= static_cast<unsigned>(check::rounds(60)); ++seed) {
    std::mt19937 random(seed);
    Settings settings;
    settings.seed = seed;
    settings.streams = 1 + seed % 3;
    settings.chunks.max_bytes = 2 * kMinChunk;
    settings.lag = random() % 8;
    settings.sender = {1 + random() % 40, 1 + random() % 60000, 10, 10, 1 + random() % 300000};
    if (seed % 4 == 0) settings.sender.zero_copy_bytes = random() % (8 * kMinMessage);
    settings.receiver = {1 + random() % 60000, 1 + random() % 40, 10, 10, 1 + random() % 40};
    std::vector<std::size_t> sizes = draw_sizes(20, [&] {
      const auto what = random() % 4;
      return what == 0 ? random() % 300 : what == 1 ? kMinMessage - 1 + random() % 3 : random() % (2 * kMinMessage);
    });
    if (seed % 3 == 0) {
      // Acknowledgements that find no room, or room for a part only, while everything else is smooth.
      settings.sender = {};
      settings.receiver = {100000, 3, 10, 40, 1 + random() % 32};
    }
    if (seed % 20 == 0) {
      // More chunks than the 64 that can be unacknowledged.
      settings.chunks.max_bytes = kMinChunk;
      sizes.assign(5, std::size_t{3} * 64 * kMinChunk);
    }
    Model(settings).run(sizes);
  }
}

// Refused in the middle of a header, right after it, and after so many bytes of the payload; in the first chunk and in
// a later one.
TEST_CASE(the_kernel_refuses_to_refer_from_any_byte_on) {
  constexpr std::size_t kFrame = kFrameHeaderBytes + kMinMessage;
  for (const std::size_t begin : {std::size_t{0}, 2 * kFrame}) {
    for (const std::size_t more : {std::size_t{0}, std::size_t{1}, kFrameHeaderBytes - 1, kFrameHeaderBytes,
                                   kFrameHeaderBytes + 1, kFrameHeaderBytes + 40000, kFrame - 1}) {
      Settings settings;
      settings.seed = static_cast<unsigned>(begin + more);
      settings.sender = {3, 50000, 10, 10, 200000, begin + more};
      settings.receiver = {100000, 5, 10, 10, 20};
      Model(settings).run(std::vector<std::size_t>(5, kMinMessage));
    }
  }
}

}  // namespace bagua_net

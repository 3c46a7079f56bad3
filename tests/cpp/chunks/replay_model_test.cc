// A model of a comm with recovery, driven by a seed and without threads or sockets: connections break at any byte, the
// ends learn of it at different times, replacements come late and out of order, and break again; or a sender ends one
// in order. What arrives is compared with what was sent, byte by byte, and nothing is written to memory that its owner
// has back. The second model is two whole comms, whose replacements are also refused, or never answered: every message
// arrives, or its sender has an error; nothing hangs. Long run: BAGUA_TEST_SEEDS=<number>.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "support/cut_connections.h"
#include "support/driven_streams.h"
#include "support/loopback.h"
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

class Model {
 public:
  explicit Model(unsigned seed)
      : random_(seed),
        chunks_(policy()),
        table_(true),
        count_(1 + random_() % 4),
        breaks_one_in_(static_cast<unsigned>(20 + random_() % 300)) {
    behaviour_.most_read = 1 + random_() % 3000;
    behaviour_.most_written = 1 + random_() % 3000;
    behaviour_.eintr_percent = static_cast<int>(random_() % 10);
    behaviour_.eagain_percent = static_cast<int>(random_() % 10);
    behaviour_.capacity = 1 + random_() % 20000;
    chunks_.set_streams(0, static_cast<int>(count_));
    for (std::size_t i = 0; i < count_; ++i) open(static_cast<int>(i), false);
  }

  void run(std::size_t messages) {
    std::size_t steps = 0;
    while (sends_done_ < messages || receives_done_ < messages) {
      // Bounded: with so few bytes a step and so many breaks, this is plenty.
      if (++steps > 3'000'000) check::fail(__FILE__, __LINE__, "no progress");
      const bool calm = steps > 200'000;
      if (!calm && random_() % breaks_one_in_ == 0) break_one();
      if (!calm && chance(400)) move_one();
      tell_some(calm);
      post(messages);
      drive();
      for (const Status& failure : failures_.all) CHECK_OK(failure);
      recover();
      finish_requests();
    }
    for (const Receive& receive : receives_) {
      CHECK(std::all_of(receive.data.begin(), receive.data.end(), [](std::uint8_t byte) { return byte == 0xa5; }));
    }
    counts_.messages = messages;
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

  static ChunkPolicy policy() {
    ChunkPolicy policy;
    policy.min_bytes = 700;
    policy.max_bytes = 3000;
    policy.max_alone_bytes = 3000;
    return policy;
  }
  bool chance(unsigned one_in) { return random_() % one_in == 0; }

  void open(int index, bool replaces) {
    auto [near, far] = TwoWayEnd::make(behaviour_, behaviour_, static_cast<unsigned>(random_()));
    Link& link = links_.emplace_back();
    link.near_end = near.get();
    link.far_end = far.get();
    link.far = std::move(far);
    link.sender_index = index;
    link.sender = std::make_unique<SendStream>(std::move(near), &failures_, index, &chunks_, false, nullptr, &replay_);
    if (replaces) link.sender->begin_with_replay();
    link.send_driver = std::make_unique<Driver>(link.sender.get(), link.near_end);
    link.send_driver->kick();
    if (!replaces) take_in(link);
  }
  void take_in(Link& link) {
    int index = 0;
    while ((receiver_indices_ >> index & 1) != 0) ++index;
    receiver_indices_ |= std::uint64_t{1} << index;
    link.receiver = std::make_unique<RecvStream>(std::move(link.far), &failures_, index, &table_, true, true);
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

  void post(std::size_t messages) {
    if (sends_.size() < messages && sends_.size() < sends_done_ + kMaxRequestsPerComm && chance(8)) {
      Send& one = sends_.emplace_back();
      const std::size_t number = sends_.size() - 1;
      const std::size_t bytes = chance(4) ? random_() % 8 : chance(2) ? random_() % 1500 : random_() % 20000;
      one.data = make_message(number, bytes);
      one.request.start(comms_.sender.get(), number, one.data.data(), bytes, nullptr);
      chunks_.push(&one.request);
      for (Link& link : links_) {
        if (link.sender != nullptr && !link.sender->is_blocked()) link.send_driver->kick();
      }
    }
    const bool is_due = receives_.size() < sends_.size() && receives_.size() < receives_done_ + kMaxRequestsPerComm;
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
      if (link.sender != nullptr && chance(2)) link.send_driver->step(chance(4) ? 1 : random_() % 5000);
      if (link.receiver != nullptr && chance(2)) link.receive_driver->step(chance(4) ? 1 : random_() % 5000);
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

  std::mt19937 random_;
  CommPair comms_{over_pipes(1)};
  ChunkScheduler chunks_;
  ReplayQueue replay_;
  ReceiveTable table_;
  Failures failures_;
  TwoWayBehaviour behaviour_;
  std::size_t count_ = 1;
  unsigned breaks_one_in_ = 100;
  std::deque<Send> sends_;
  std::deque<Receive> receives_;
  std::size_t sends_done_ = 0;
  std::size_t receives_done_ = 0;
  std::deque<Link> links_;
  std::deque<int> missing_;
  std::uint64_t receiver_indices_ = 0;
  Counts counts_;
};

// Two comms over TCP, in the place of whose connection services the test decides what becomes of a connection that is
// asked for.
class CommModel {
 public:
  CommModel(unsigned seed, std::size_t streams, bool refuses)
      : random_(seed), refuses_(refuses), pair_(settings(streams, static_cast<int>(random_() % 2) * 2)) {}

  // False: the sender has an error, after a connection was refused.
  bool run(std::size_t messages, std::size_t most_cut) {
    const Deadline deadline;
    for (std::size_t number = 0; number < messages; ++number) {
      // As often small, so that it needs stream 0.
      const std::size_t bytes = random_() % 2 == 0 ? random_() % 4000 : random_() % 400000;
      sent_ = make_message(number, bytes);
      received_.assign(bytes, 0);
      Request* send = nullptr;
      Request* receive = nullptr;
      if (random_() % 2 == 0) cut_some(random_, most_cut);
      if (!pair_.sender->isend(sent_.data(), bytes, nullptr, &send).is_ok()) return !check_refused();
      if (!pair_.receiver->irecv(received_.data(), bytes, nullptr, &receive).is_ok()) return !check_refused();
      while (send != nullptr || receive != nullptr) {
        deadline.check("a message, or an error");
        open_some();
        for (Request** request : {&send, &receive}) {
          bool done = false;
          std::size_t moved = 0;
          if (*request != nullptr && !(*request)->test(&done, &moved).is_ok()) return !check_refused();
          if (done) *request = nullptr;
        }
      }
      CHECK(received_ == sent_);
    }
    return true;
  }

 private:
  bool check_refused() {
    if (!was_refused_) check::fail(__FILE__, __LINE__, "a comm failed of which no connection was refused");
    return true;
  }
  void open_some() {
    std::vector<Joining> due;
    {
      const std::lock_guard<std::mutex> lock(asked_mutex_);
      if (asked_.empty() || random_() % 50 != 0) return;
      due.swap(asked_);
    }
    for (const Joining joining : due) {
      if (refuses_ && random_() % 3 == 0) {
        was_refused_ = true;
        pair_.sender_arrivals->report({joining, "refused by the test"});
      } else if (!pair_.receiver_arrivals->has_room(kMaxStreams)) {
        const std::lock_guard<std::mutex> lock(asked_mutex_);
        asked_.push_back(joining);  // the connector tries again
      } else {
        auto [near, far] = tcp_pair();
        pair_.receiver_arrivals->hand_in(std::move(far), joining);
        if (random_() % 8 == 0) cut(near.get(), Cut::kReset);
        pair_.sender_arrivals->hand_in(std::move(near), joining);
      }
    }
  }

  CommPair::Settings settings(std::size_t streams, int workers) {
    CommPair::Settings settings = over_tcp(streams, workers);
    settings.sending.replace_stream = [this](Joining joining, std::size_t /*first_path*/) {
      const std::lock_guard<std::mutex> lock(asked_mutex_);
      asked_.push_back(joining);
    };
    settings.receiving.recovers = true;
    return settings;
  }

  std::mt19937 random_;
  const bool refuses_;
  bool was_refused_ = false;
  std::mutex asked_mutex_;  // guards the next
  std::vector<Joining> asked_;
  // Of the message under way: threads may touch it until the comms are gone, also after an error.
  std::vector<std::uint8_t> sent_;
  std::vector<std::uint8_t> received_;
  CommPair pair_;
};

int seeds_or(int usual) {
  const char* const asked = std::getenv("BAGUA_TEST_SEEDS");
  return asked != nullptr ? static_cast<int>(std::strtol(asked, nullptr, 10)) : check::rounds(usual);
}

}  // namespace

TEST_CASE(every_message_arrives_once_whatever_breaks) {
  const int seeds = seeds_or(200);
  Counts all;
  for (int seed = 1; seed <= seeds; ++seed) {
    try {
      Model model(static_cast<unsigned>(seed));
      model.run(40);
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

TEST_CASE(a_comm_has_every_message_delivered_or_an_error) {
  const int seeds = seeds_or(60);
  int failed = 0;
  for (int seed = 1; seed <= seeds; ++seed) {
    const std::size_t streams[] = {1, 4, 16, kMaxStreams};
    const std::size_t count = streams[seed / 2 % 4];
    const bool refuses = seed % 2 == 0;
    try {
      CommModel model(static_cast<unsigned>(seed), count, refuses);
      // All at once, too. One after the other, where a loss is to meet a refusal and nothing else.
      if (!model.run(20, refuses || seed % 4 == 0 ? 1 : 4 * count)) ++failed;
    } catch (const std::exception& error) {
      throw std::runtime_error("seed " + std::to_string(seed) + ": " + error.what());
    }
  }
  std::printf("        %d seeds, %d comms failed for refused connections\n", seeds, failed);
  CHECK(failed > 0 && failed < seeds);
}

}  // namespace bagua_net

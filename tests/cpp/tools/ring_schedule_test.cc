// The load driver's ring: which messages it consists of, and that the schedule moves and sums them rightly over a
// transport without any buffering, which says "later" and completes at random times.
#include "bench/ring_schedule.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "bench/driver_protocol.h"
#include "support/check.h"

namespace {

using namespace bagua_net::bench;

std::vector<RingMessage> messages(const RingPlan& plan, int channel, RingDirection direction) {
  std::vector<RingMessage> all;
  for (RingCursor cursor(plan, channel, direction); !cursor.at_end(); cursor.advance()) all.push_back(cursor.message());
  return all;
}

RingGeometry geometry_of(int nranks, int channels, std::size_t slice_bytes, int depth, int rank = 0) {
  RingGeometry geometry;
  geometry.rank = rank;
  geometry.nranks = nranks;
  geometry.channels = channels;
  geometry.slice_bytes = slice_bytes;
  geometry.depth = depth;
  return geometry;
}

// What a message's bytes go through between two ranks: nothing is buffered, so a send completes only when the next rank
// has posted a receive for it. Each connection completes its oldest request first, like TCP.
class Link {
 public:
  struct Operation {
    std::uint8_t* data = nullptr;
    std::size_t bytes = 0;
    bool is_matched = false;
    bool is_send = false;
    Link* link = nullptr;
  };

  std::deque<std::unique_ptr<Operation>> sends;
  std::deque<std::unique_ptr<Operation>> receives;
  std::size_t most_sends = 0;
  std::size_t most_receives = 0;

  Operation* post(bool is_send, std::uint8_t* data, std::size_t bytes) {
    auto& queue = is_send ? sends : receives;
    queue.push_back(std::make_unique<Operation>(Operation{data, bytes, false, is_send, this}));
    std::size_t& most = is_send ? most_sends : most_receives;
    most = std::max(most, queue.size());
    return queue.back().get();
  }

  // Copies one message from the oldest unmatched send to the oldest unmatched receive.
  void match_one() {
    const auto is_open = [](const auto& operation) { return !operation->is_matched; };
    const auto send = std::find_if(sends.begin(), sends.end(), is_open);
    const auto receive = std::find_if(receives.begin(), receives.end(), is_open);
    if (send == sends.end() || receive == receives.end()) return;
    CHECK((*send)->bytes <= (*receive)->bytes);
    std::memcpy((*receive)->data, (*send)->data, (*send)->bytes);
    (*receive)->bytes = (*send)->bytes;
    (*send)->is_matched = (*receive)->is_matched = true;
  }
};

class FakeTransport final : public RingTransport {
 public:
  FakeTransport(std::vector<Link>* outgoing, std::vector<Link>* incoming, std::mt19937* random)
      : outgoing_(*outgoing), incoming_(*incoming), random_(*random) {}

  std::string net_name() const override { return "fake"; }
  std::vector<std::string> device_names() const override { return {}; }
  std::vector<Handle> listen() override { return {}; }
  bool connect(int, Handle*) override { return true; }
  bool accept(int) override { return true; }

  void* isend(int channel, const void* data, std::size_t bytes) override {
    if (chance(0.3)) return nullptr;
    return outgoing_[static_cast<std::size_t>(channel)].post(true, static_cast<std::uint8_t*>(const_cast<void*>(data)),
                                                             bytes);
  }
  void* irecv(int channel, void* data, std::size_t bytes) override {
    if (chance(0.3)) return nullptr;
    return incoming_[static_cast<std::size_t>(channel)].post(false, static_cast<std::uint8_t*>(data), bytes);
  }
  std::optional<std::size_t> test(void* request) override {
    auto* operation = static_cast<Link::Operation*>(request);
    if (chance(0.3)) operation->link->match_one();
    if (!operation->is_matched || chance(0.3)) return {};
    auto& queue = operation->is_send ? operation->link->sends : operation->link->receives;
    CHECK(queue.front().get() == operation);  // NCCL tests the oldest request only
    const std::size_t bytes = operation->bytes + extra_bytes;
    queue.pop_front();
    return bytes;
  }
  void close() override {}

  std::size_t extra_bytes = 0;  // makes test() report wrong sizes

 private:
  bool chance(double probability) { return std::bernoulli_distribution(probability)(random_); }

  std::vector<Link>& outgoing_;
  std::vector<Link>& incoming_;
  std::mt19937& random_;
};

// All ranks of a ring in one thread.
struct Ring {
  Ring(const RingGeometry& geometry, unsigned seed) : random(seed) {
    const auto nranks = static_cast<std::size_t>(geometry.nranks);
    for (std::size_t rank = 0; rank < nranks; ++rank) links.emplace_back(geometry.channels);
    for (std::size_t rank = 0; rank < nranks; ++rank) {
      geometries.push_back(geometry);
      geometries.back().rank = static_cast<int>(rank);
      transports.push_back(
          std::make_unique<FakeTransport>(&links[rank], &links[(rank + nranks - 1) % nranks], &random));
      schedules.push_back(std::make_unique<RingSchedule>(transports.back().get(), geometries.back()));
      schedules.back()->allocate_slots();
    }
  }

  // Every rank's result is checked; a ring in which nothing moves any more is a failure.
  void all_reduce(std::size_t bytes, std::uint64_t round) {
    std::vector<RingPlan> plans;
    std::vector<std::unique_ptr<AllReduceKernel>> kernels;
    for (std::size_t rank = 0; rank < schedules.size(); ++rank) plans.emplace_back(geometries[rank], bytes);
    for (std::size_t rank = 0; rank < schedules.size(); ++rank) {
      kernels.push_back(std::make_unique<AllReduceKernel>(plans[rank], round));
      CHECK(kernels.back()->check().wrong_elements == bytes / plans[rank].element_bytes());
      schedules[rank]->begin(plans[rank], kernels.back().get());
    }
    int idle_rounds = 0;
    for (std::size_t finished = 0; finished < schedules.size();) {
      bool any_progress = false;
      finished = 0;
      for (auto& schedule : schedules) {
        any_progress |= schedule->pass();
        finished += schedule->finished() ? 1 : 0;
      }
      idle_rounds = any_progress ? 0 : idle_rounds + 1;
      if (idle_rounds == 10000) throw std::runtime_error("the ring stands still: " + schedules[0]->describe());
    }
    for (auto& kernel : kernels) CHECK_EQ(kernel->check().wrong_elements, std::size_t{0});
  }

  std::mt19937 random;
  std::vector<RingGeometry> geometries;
  std::vector<std::vector<Link>> links;  // of rank r to rank r + 1, by channel
  std::vector<std::unique_ptr<FakeTransport>> transports;
  std::vector<std::unique_ptr<RingSchedule>> schedules;
};

}  // namespace

TEST_CASE(messages_have_nccls_shape) {
  // Two ranks, 16 MiB on each of two channels: chunks of two 1 MiB slices, so 4 loops of 2 steps.
  const RingPlan large(geometry_of(2, 2, 1 << 20, 4), 32u << 20);
  CHECK_EQ(large.active_channels(), 2);
  const auto sent = messages(large, 1, RingDirection::kSend);
  CHECK_EQ(sent.size(), std::size_t{4 * 2 * 2});
  for (std::size_t i = 0; i < sent.size(); ++i) {
    CHECK_EQ(sent[i].bytes, std::size_t{1} << 20);
    CHECK_EQ(sent[i].step, static_cast<int>(i / 2 % 2));
  }
  // Small buffers use one channel; 8 bytes are one float from each of two ranks.
  const RingPlan small(geometry_of(2, 8, 1 << 20, 4), 8);
  CHECK_EQ(small.active_channels(), 1);
  CHECK_EQ(messages(small, 0, RingDirection::kSend).size(), std::size_t{2});
  CHECK_EQ(messages(small, 0, RingDirection::kSend)[0].bytes, std::size_t{4});
  // Fewer elements than ranks: empty chunks are no messages. Rank 0 sends chunk 0 twice and chunk 1 once.
  const RingPlan sparse(geometry_of(4, 2, 1 << 20, 4), 8);
  CHECK_EQ(messages(sparse, 0, RingDirection::kSend).size(), std::size_t{3});
  CHECK_EQ(messages(sparse, 0, RingDirection::kReceive).size(), std::size_t{2});
}

TEST_CASE(all_reduce_is_right_over_a_transport_without_buffers) {
  unsigned seed = 1;
  for (const int nranks : {2, 3, 4, 7}) {
    for (const int depth : {1, 2, 3, 4, 32}) {
      for (const int channels : {1, 3}) {
        Ring ring(geometry_of(nranks, channels, 1024, depth), seed++);
        std::uint64_t round = 0;
        for (const std::size_t bytes : {1, 4, 13, 4096, 49152, 33001}) ring.all_reduce(bytes, round++);
        for (const auto& links : ring.links) {
          for (const Link& link : links) {
            CHECK(link.most_sends <= static_cast<std::size_t>(depth));
            CHECK(link.most_receives <= static_cast<std::size_t>(depth));
            CHECK(link.sends.empty() && link.receives.empty());
          }
        }
      }
    }
  }
}

TEST_CASE(the_window_is_filled) {
  Ring ring(geometry_of(2, 1, 2048, 4), 7);
  ring.all_reduce(1 << 20, 0);
  CHECK_EQ(ring.links[0][0].most_receives, std::size_t{4});
  CHECK_EQ(ring.links[0][0].most_sends, std::size_t{4});
}

TEST_CASE(a_message_of_the_wrong_size_is_an_error) {
  Ring ring(geometry_of(2, 1, 2048, 4), 3);
  ring.transports[1]->extra_bytes = 4;
  const RingPlan plan0(ring.geometries[0], 64);
  const RingPlan plan1(ring.geometries[1], 64);
  ring.schedules[0]->begin(plan0, nullptr);
  ring.schedules[1]->begin(plan1, nullptr);
  std::string message;
  for (int i = 0; i < 10000 && message.empty(); ++i) {
    ring.schedules[0]->pass();
    try {
      ring.schedules[1]->pass();
    } catch (const Failure& failure) {
      message = failure.what();
    }
  }
  CHECK(message.find("36 bytes") != std::string::npos);
}

TEST_CASE(the_pattern_notices_every_kind_of_damage) {
  for (const ElementType type : {ElementType::kFloat32, ElementType::kUint8}) {
    constexpr int kRanks = 3;
    constexpr std::size_t kBytes = 8192;
    const Pattern pattern(type, kRanks, 5);
    std::vector<std::uint8_t> sum(kBytes);
    pattern.write(0, 0, kBytes, sum.data());
    for (int rank = 1; rank < kRanks; ++rank) pattern.add(rank, 0, kBytes, sum.data());
    CHECK_EQ(pattern.check_sum(sum.data(), kBytes).wrong_elements, std::size_t{0});

    const auto count_wrong = [&](const std::vector<std::uint8_t>& data) {
      return pattern.check_sum(data.data(), kBytes).wrong_elements;
    };
    std::vector<std::uint8_t> flipped = sum;
    flipped[4000] ^= 1;
    CHECK_EQ(count_wrong(flipped), std::size_t{1});
    CHECK_EQ(*pattern.check_sum(flipped.data(), kBytes).first_wrong, 4000 / pattern.element_bytes());

    std::vector<std::uint8_t> swapped = sum;  // two pages exchanged
    std::swap_ranges(swapped.begin(), swapped.begin() + 4096, swapped.begin() + 4096);
    CHECK(count_wrong(swapped) > kBytes / pattern.element_bytes() * 9 / 10);

    std::vector<std::uint8_t> shifted = sum;
    std::rotate(shifted.begin(), shifted.begin() + 4, shifted.end());
    CHECK(count_wrong(shifted) > kBytes / pattern.element_bytes() * 9 / 10);

    std::vector<std::uint8_t> twice = sum;  // one rank's contribution added again
    pattern.add(1, 1024, 1024, twice.data() + 1024);
    CHECK(count_wrong(twice) > 1024 / pattern.element_bytes() * 9 / 10);

    const Pattern other_round(type, kRanks, 6);
    CHECK(other_round.check_sum(sum.data(), kBytes).wrong_elements > kBytes / pattern.element_bytes() * 9 / 10);
  }
}

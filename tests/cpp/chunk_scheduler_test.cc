// How large the pieces of a message are, and which stream gets them. That each byte goes out once and in order is
// comm_test.cc's business.
#include <cstddef>
#include <random>
#include <vector>

#include "base/monotonic_clock.h"
#include "support/check.h"
#include "transport/chunk_scheduler.h"

namespace bagua_net {
namespace {

constexpr double kMegabytesPerSecond = 1e-3;  // in bytes per ns

// A scheduler with one message for streams of known rates.
struct Sending {
  ChunkScheduler scheduler{{1, 65536, 524288}};
  Request message;
  Chunk chunk;
  int better = -1;

  Sending(std::size_t bytes, const std::vector<double>& rates, std::int64_t known_since_ns = monotonic_ns()) {
    scheduler.set_streams(0, static_cast<int>(rates.size()));
    for (std::size_t i = 0; i < rates.size(); ++i) {
      if (rates[i] > 0) scheduler.add_rate(static_cast<int>(i), rates[i] * kMegabytesPerSecond, false, known_since_ns);
    }
    post(bytes);
  }

  void post(std::size_t bytes) {
    message.start(nullptr, 0, nullptr, bytes, nullptr);
    scheduler.push(&message);
  }
  Pull pull(int stream, std::size_t under_way) { return scheduler.pull(stream, under_way, &chunk, &better); }
};

}  // namespace

TEST_CASE(one_stream_takes_all) {
  const ChunkPolicy policy{1, 65536, 524288};
  CHECK_EQ(policy.next_chunk_bytes(64u << 20), std::size_t{64u << 20});
}

TEST_CASE(chunks_shrink_towards_the_end) {
  const ChunkPolicy policy{4, 65536, 524288};
  std::size_t remaining = (4u << 20) + 1;
  std::size_t last = ~std::size_t{0};
  std::size_t total = 0;
  while (remaining > 0) {
    const std::size_t bytes = policy.next_chunk_bytes(remaining);
    CHECK(bytes > 0);
    CHECK(bytes <= policy.max_bytes);
    CHECK(bytes >= policy.min_bytes || bytes == remaining);
    CHECK(bytes <= last);
    last = bytes;
    remaining -= bytes;
    total += bytes;
  }
  CHECK_EQ(total, (std::size_t{4u << 20}) + 1);
}

TEST_CASE(small_messages_stay_whole) {
  const ChunkPolicy policy{4, 65536, 524288};
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{4096}, std::size_t{65536}}) {
    CHECK_EQ(policy.next_chunk_bytes(bytes), bytes);
  }
}

TEST_CASE(chunk_limits_below_a_page_hold) {
  const ChunkPolicy policy{4, 16, 64};
  CHECK_EQ(policy.next_chunk_bytes(1000), std::size_t{64});
  CHECK_EQ(policy.next_chunk_bytes(17), std::size_t{17});
}

TEST_CASE(equal_streams_take_equal_chunks) {
  Sending sending(1u << 20, {100, 80, 100, 120});
  CHECK(sending.pull(1, 0) == Pull::kChunk);
  CHECK_EQ(sending.chunk.bytes, std::size_t{262144});
}

TEST_CASE(nothing_waits) {
  ChunkScheduler scheduler({2, 65536, 524288});
  Chunk chunk;
  int better = -1;
  CHECK(scheduler.pull(0, 0, &chunk, &better) == Pull::kNothing);
}

TEST_CASE(a_slow_stream_takes_chunks_of_its_size) {
  Sending sending(64u << 20, {100, 10});
  CHECK(sending.pull(1, 0) == Pull::kChunk);
  CHECK(sending.chunk.bytes >= 524288 / 10);
  CHECK(sending.chunk.bytes < 524288 / 8);
}

TEST_CASE(a_slow_stream_is_passed_over_when_the_others_are_done_first) {
  // 1 MiB at 110 MB/s is a matter of 10 ms; another 256 KiB on the slow one of 26.
  Sending sending(1u << 20, {100, 10});
  CHECK(sending.pull(1, 262144) == Pull::kPassedOver);
  CHECK_EQ(sending.better, 0);
  CHECK(sending.pull(0, 0) == Pull::kChunk);
}

TEST_CASE(a_stream_with_more_under_way_leaves_the_chunk_to_one_with_less) {
  Sending sending(65536, {25, 25, 25});
  CHECK(sending.pull(2, 131072) == Pull::kPassedOver);
  CHECK(sending.better != 2);
  CHECK(sending.pull(sending.better, 0) == Pull::kChunk);
  CHECK_EQ(sending.chunk.bytes, std::size_t{65536});
}

TEST_CASE(what_is_delivered_at_once_is_never_late) {
  // 512 KiB under way at 10 GB/s: 50 us.
  Sending sending(65536, {10000, 10000});
  CHECK(sending.pull(0, 524288) == Pull::kChunk);
}

TEST_CASE(an_old_rate_does_not_keep_a_stream_idle) {
  Sending sending(1u << 20, {100, 10}, monotonic_ns() - 2'000'000'000);
  CHECK(sending.pull(1, 262144) == Pull::kChunk);
}

TEST_CASE(a_stream_of_unknown_rate_gets_its_chance) {
  Sending sending(65536, {100, 0});
  CHECK(sending.pull(1, 10u << 20) == Pull::kChunk);
}

TEST_CASE(a_rate_that_is_a_lower_bound_only_raises) {
  Sending sending(64u << 20, {100, 100});
  sending.scheduler.add_rate(1, 1 * kMegabytesPerSecond, true, monotonic_ns());
  CHECK(sending.pull(1, 0) == Pull::kChunk);
  CHECK_EQ(sending.chunk.bytes, std::size_t{524288});
  for (int i = 0; i < 8; ++i) sending.scheduler.add_rate(0, 1000 * kMegabytesPerSecond, true, monotonic_ns());
  CHECK(sending.pull(1, 0) == Pull::kChunk);
  CHECK(sending.chunk.bytes < 131072);
}

// Whatever the rates and the bytes under way: following `better` leads to a stream that takes the chunk. Otherwise a
// message could wait for ever for streams that all sleep.
TEST_CASE(some_stream_always_takes_the_chunk) {
  std::mt19937 random(7);  // NOLINT(bugprone-random-generator-seed): the same cases in every run
  for (int round = 0; round < 20000; ++round) {
    const std::size_t streams = 2 + random() % 15;
    std::vector<double> rates(streams);
    for (double& rate : rates) rate = random() % 4 == 0 ? 0 : 1 + static_cast<double>(random() % 1000);
    Sending sending(1 + random() % (4u << 20), rates);
    std::vector<std::size_t> under_way(streams);
    for (std::size_t& bytes : under_way) bytes = random() % 2 == 0 ? 0 : random() % (1u << 20);
    // Everybody has asked once, so the scheduler knows what is under way; all but one may have been refused.
    for (std::size_t stream = 0; stream < streams; ++stream) {
      if (sending.pull(static_cast<int>(stream), under_way[stream]) != Pull::kPassedOver) {
        under_way[stream] += sending.chunk.bytes;
      }
    }
    int stream = static_cast<int>(random() % streams);
    Pull pulled = Pull::kPassedOver;
    for (std::size_t hop = 0; hop <= streams && pulled == Pull::kPassedOver; ++hop) {
      pulled = sending.pull(stream, under_way[static_cast<std::size_t>(stream)]);
      if (pulled == Pull::kPassedOver) stream = sending.better;
    }
    CHECK(pulled != Pull::kPassedOver);
  }
}

}  // namespace bagua_net

CHECK_MAIN

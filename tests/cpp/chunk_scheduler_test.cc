// How large the pieces of a message are. That each byte goes out once and in order is comm_test.cc's business.
#include <cstddef>

#include "support/check.h"
#include "transport/chunk_scheduler.h"

namespace bagua_net {

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

}  // namespace bagua_net

CHECK_MAIN

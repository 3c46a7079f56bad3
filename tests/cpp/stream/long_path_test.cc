// A sender with recovery on a path whose round trip takes long: its messages are done before the peer answers.
#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "support/driven_streams.h"
#include "transport/chunks/chunk_scheduler.h"
#include "transport/chunks/replay_queue.h"
#include "transport/stream/send_stream.h"

namespace bagua_net {
namespace {

// Takes some bytes a call, and the peer never answers.
class FarEnd final : public ByteStream {
 public:
  FarEnd(std::int64_t round_trip_us, std::size_t most, std::vector<std::uint8_t>* written)
      : round_trip_us_(round_trip_us), most_(most), written_(written) {}

  ssize_t read(const iovec*, std::size_t) override {
    errno = EAGAIN;
    return -1;
  }
  ssize_t write(const iovec* pieces, std::size_t count) override {
    std::size_t moved = 0;
    for (std::size_t i = 0; i < count && moved < most_; ++i) {
      const auto* bytes = static_cast<const std::uint8_t*>(pieces[i].iov_base);
      const std::size_t taken = std::min(pieces[i].iov_len, most_ - moved);
      written_->insert(written_->end(), bytes, bytes + taken);
      moved += taken;
    }
    return static_cast<ssize_t>(moved);
  }
  bool delivery(Delivery* delivery) const override {
    delivery->round_trip_us = delivery->least_round_trip_us = round_trip_us_;
    delivery->permitted_bytes_per_ns = 1;
    return true;
  }
  int fd() const override { return -1; }
  void shutdown() override {}

 private:
  const std::int64_t round_trip_us_;
  const std::size_t most_;
  std::vector<std::uint8_t>* const written_;
};

}  // namespace

TEST_CASE(a_large_message_is_done_once_it_is_written_and_can_be_sent_again) {
  constexpr std::size_t kBytes = 300000;
  constexpr std::size_t kMost = 70000;
  for (const std::int64_t round_trip_us : {100, 5000}) {
    const bool is_long = round_trip_us == 5000;
    ChunkPolicy policy;
    policy.max_alone_bytes = kBytes;
    ChunkScheduler chunks(policy);
    ReplayQueue replay;
    const CommPair owner{over_pipes(1)};  // a request asks its comm
    Failures failures;
    std::vector<std::uint8_t> written;
    SendStream stream(
        std::make_unique<FarEnd>(round_trip_us, kMost, &written), &failures, 0, &chunks, false, [](int) {}, &replay);
    std::vector<std::uint8_t> message = make_message(0, kBytes);
    Request request;
    request.start(owner.sender.get(), 0, message.data(), kBytes, nullptr);
    chunks.push(&request);
    // A short write blocks the stream, and its memory is the message's until the last one.
    while (written.size() < kFrameHeaderBytes + kBytes) {
      CHECK(!is_done(&request));
      stream.progress(kTurnBytes);
    }
    CHECK(std::equal(message.begin(), message.end(), written.begin() + kFrameHeaderBytes));
    CHECK_EQ(is_done(&request), is_long);
    if (is_long) std::fill(message.begin(), message.end(), std::uint8_t{0x5a});
    const std::vector<Chunk> unfinished = stream.take_unfinished();
    CHECK_EQ(unfinished.size(), 1u);
    CHECK_EQ(unfinished[0].bytes, kBytes);
    const std::vector<std::uint8_t> sent = make_message(0, kBytes);
    CHECK(std::equal(sent.begin(), sent.end(), unfinished[0].data));
  }
}

}  // namespace bagua_net

// A sender with recovery whose messages are copied, small ones at once and large ones on a path whose round trip takes
// long: they are done before the peer answers, and the memory of copies is used again once it has.
#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "support/driven_streams.h"
#include "transport/chunks/chunk_scheduler.h"
#include "transport/chunks/replay_queue.h"
#include "transport/stream/send_stream.h"
#include "wire/frames.h"

namespace bagua_net {
namespace {

// Takes whole chunks, and has answered each that asks when it is read next.
class AnsweringEnd final : public ByteStream {
 public:
  AnsweringEnd(std::set<const void*>* copies, int* reads) : copies_(copies), reads_(reads) {}

  ssize_t read(const iovec* pieces, std::size_t) override {
    ++*reads_;
    if (!std::exchange(is_asked_, false)) {
      errno = EAGAIN;
      return -1;
    }
    encode_acknowledgement({chunks_, false, 0}, static_cast<std::uint8_t*>(pieces[0].iov_base));
    return kAcknowledgementBytes;
  }
  ssize_t write(const iovec* pieces, std::size_t count) override {
    CHECK_EQ(count, std::size_t{1});  // a copy, behind its header
    FrameHeader header;
    CHECK_OK(decode_frame_header(static_cast<const std::uint8_t*>(pieces[0].iov_base), &header));
    copies_->insert(pieces[0].iov_base);
    ++chunks_;
    is_asked_ |= header.acknowledge;
    return static_cast<ssize_t>(pieces[0].iov_len);
  }
  bool delivery(Delivery*) const override { return false; }
  int fd() const override { return -1; }
  void shutdown() override {}

 private:
  std::set<const void*>* const copies_;
  int* const reads_;
  std::uint64_t chunks_ = 0;
  bool is_asked_ = false;
};

}  // namespace

// Memory that was never used takes longer to write than a message takes to arrive.
TEST_CASE(a_mebibyte_of_copies_is_enough_where_the_peer_answers) {
  constexpr std::size_t kBytes = 65536;
  constexpr std::uint64_t kMessages = 200;
  for (const bool is_polled : {false, true}) {
    ChunkScheduler chunks(ChunkPolicy{});
    ReplayQueue replay;
    const CommPair owner{over_pipes(1)};  // a request asks its comm
    Failures failures;
    std::set<const void*> copies;
    int reads = 0;
    SendStream stream(std::make_unique<AnsweringEnd>(&copies, &reads), &failures, 0, &chunks, false, nullptr, &replay);
    if (is_polled) stream.set_polled();
    const std::vector<std::uint8_t> message(kBytes);
    for (std::uint64_t number = 0; number < kMessages; ++number) {
      Request request;
      request.start(owner.sender.get(), number, const_cast<std::uint8_t*>(message.data()), kBytes, nullptr);
      chunks.push(&request);
      stream.progress(kTurnBytes);
      CHECK(is_done(&request));
    }
    CHECK(failures.all.empty());
    CHECK(copies.size() <= (1u << 20) / kBytes + 1);
    CHECK(reads <= 4 * static_cast<int>(kMessages * kBytes / 524288));  // nor does it ask the kernel each time
    static_cast<void>(stream.take_unfinished());
  }
}

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

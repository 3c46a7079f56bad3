// A sender with recovery whose messages are copied: the memory of copies is used again once the peer has answered.
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
#include "wire/acknowledgement.h"
#include "wire/frame_header.h"

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

}  // namespace bagua_net

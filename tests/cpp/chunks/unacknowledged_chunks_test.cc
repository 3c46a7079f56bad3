// What a sender makes of acknowledgements, however they are cut: each chunk counts as moved exactly when it was
// acknowledged, and numbers that cannot be right complete nothing.
#include "transport/chunks/unacknowledged_chunks.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "support/driven_streams.h"

namespace bagua_net {
namespace {

constexpr std::size_t kMaxChunks = 64;

std::vector<std::uint8_t> acknowledgements(const std::vector<std::uint64_t>& chunks) {
  std::vector<std::uint8_t> bytes(chunks.size() * kAcknowledgementBytes);
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    encode_acknowledgement({chunks[i], false}, bytes.data() + i * kAcknowledgementBytes);
  }
  return bytes;
}

// Messages of which every byte is in unacknowledged chunks, as the sending stream of a comm has them.
class Messages {
 public:
  UnacknowledgedChunks unacknowledged;

  explicit Messages(std::size_t most_chunks = kMaxChunks) : unacknowledged(most_chunks) {}

  void send(std::size_t bytes, std::size_t chunks = 1) {
    Request& request = requests_.emplace_back();
    request.start(comms_.sender.get(), requests_.size() - 1, nullptr, bytes, nullptr);
    for (std::size_t i = 0; i < chunks; ++i) {
      const std::size_t begin = bytes / chunks * i;
      Chunk chunk;
      chunk.request = &request;
      chunk.bytes = (i + 1 == chunks ? bytes : begin + bytes / chunks) - begin;
      chunk.message_number = requests_.size() - 1;
      chunk.message_bytes = bytes;
      unacknowledged.add(std::move(chunk));
    }
  }

  Status take(const std::vector<std::uint8_t>& bytes) { return take(bytes.data(), bytes.size()); }
  Status take(const std::uint8_t* bytes, std::size_t count) { return unacknowledged.take(bytes, count, &blocks_); }
  Status acknowledge(std::uint64_t chunks) { return take(acknowledgements({chunks})); }

  bool is_done(std::size_t number) {
    // A request that was done is dead after test.
    done_.resize(requests_.size());
    done_[number] = done_[number] || bagua_net::is_done(&requests_[number]);
    return done_[number];
  }
  std::size_t done_count() {
    while (first_undone_ < requests_.size() && is_done(first_undone_)) ++first_undone_;
    std::size_t done = first_undone_;
    for (std::size_t number = first_undone_; number < requests_.size(); ++number) done += is_done(number) ? 1 : 0;
    return done;
  }

 private:
  CommPair comms_{over_pipes(1)};
  std::deque<Request> requests_;
  std::vector<bool> done_;
  std::size_t first_undone_ = 0;
  BlockPool blocks_;
};

}  // namespace

// Against a model: messages of some chunks, acknowledgements that speak for one chunk, for several or say the same
// again, and reads that are cut anywhere. The places for chunks are used again and again.
TEST_CASE(a_lost_address_is_reported_once_however_the_acknowledgement_is_cut) {
  Messages messages;
  messages.send(1);
  std::array<std::uint8_t, kAcknowledgementBytes> bytes{};
  encode_acknowledgement({0, false, 4711}, bytes.data());  // nobody asked for it
  for (const std::uint8_t& byte : bytes) {
    CHECK_EQ(messages.unacknowledged.take_lost_port(), 0);
    CHECK_OK(messages.take(&byte, 1));
  }
  CHECK_OK(messages.acknowledge(0));
  CHECK_EQ(messages.unacknowledged.take_lost_port(), 4711);
  CHECK_EQ(messages.unacknowledged.take_lost_port(), 0);
  CHECK_EQ(messages.done_count(), std::size_t{0});
  CHECK_OK(messages.acknowledge(1));
}

TEST_CASE(addresses_that_are_lost_together_are_all_reported) {
  Messages messages;
  std::vector<std::uint8_t> bytes(3 * kAcknowledgementBytes);
  const std::array<std::uint16_t, 3> ports = {4711, 4712, 4711};
  for (std::size_t i = 0; i < ports.size(); ++i) {
    encode_acknowledgement({0, false, ports[i]}, bytes.data() + i * kAcknowledgementBytes);
  }
  CHECK_OK(messages.take(bytes.data(), bytes.size()));
  std::set<std::uint16_t> told;
  for (int i = 0; i < 2; ++i) told.insert(messages.unacknowledged.take_lost_port());
  CHECK((told == std::set<std::uint16_t>{4711, 4712}));
  CHECK_EQ(messages.unacknowledged.take_lost_port(), 0);
}

TEST_CASE(chunks_stay_known_while_places_for_more_are_made) {
  Messages messages(256);
  for (int message = 0; message < 40; ++message) messages.send(1);
  CHECK_OK(messages.acknowledge(30));
  for (int message = 40; message < 286; ++message) messages.send(1);
  CHECK(messages.unacknowledged.is_full());
  for (std::uint64_t known = 31; known <= 286; ++known) {
    CHECK_EQ(messages.unacknowledged.first_message(), known - 1);
    CHECK_OK(messages.acknowledge(known));
    CHECK_EQ(messages.done_count(), std::size_t{known});
  }
  CHECK(messages.unacknowledged.is_empty());
}

TEST_CASE(a_message_is_done_when_its_last_chunk_was_acknowledged) {
  for (unsigned seed = 1; seed <= static_cast<unsigned>(check::rounds(30)); ++seed) {
    std::mt19937 random(seed);
    const std::size_t most_read = 1 + random() % (3 * kAcknowledgementBytes);
    Messages messages;
    std::vector<std::uint64_t> last_chunks;      // of each message
    std::vector<std::uint64_t> acknowledged{0};  // after each acknowledgement
    std::vector<std::uint8_t> unread;
    std::size_t bytes_read = 0;
    std::uint64_t sent = 0;
    std::size_t done = 0;
    while (acknowledged.size() < 400) {
      const std::uint64_t known = acknowledged[bytes_read / kAcknowledgementBytes];
      while (done < last_chunks.size() && last_chunks[done] <= known) ++done;
      CHECK_EQ(messages.done_count(), done);
      CHECK_EQ(messages.unacknowledged.is_empty(), known == sent);
      CHECK_EQ(messages.unacknowledged.is_full(), sent - known >= kMaxChunks);
      if (known < sent) CHECK_EQ(messages.unacknowledged.first_message(), std::uint64_t{done});
      const std::size_t chunks = 1 + random() % 3;
      if (random() % 2 == 0 && sent - known + chunks <= kMaxChunks) {
        messages.send(chunks * (1 + random() % 0xffffffffu), chunks);
        last_chunks.push_back(sent += chunks);
      } else if (random() % 3 == 0) {
        acknowledged.push_back(acknowledged.back() +
                               random() % (std::min<std::uint64_t>(sent - acknowledged.back(), 3) + 1));
        const std::vector<std::uint8_t> bytes = acknowledgements({acknowledged.back()});
        unread.insert(unread.end(), bytes.begin(), bytes.end());
      } else {
        const std::size_t count = std::min(unread.size(), 1 + random() % most_read);
        CHECK_OK(messages.take(unread.data(), count));
        unread.erase(unread.begin(), unread.begin() + static_cast<std::ptrdiff_t>(count));
        bytes_read += count;
      }
    }
  }
}

// A sender that believed it would tell its caller that the memory is free while the peer is still reading it.
TEST_CASE(an_acknowledgement_that_cannot_be_right_completes_nothing) {
  for (const std::uint64_t sent : {0, 3}) {
    for (const std::uint64_t wrong :
         {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{4}, std::uint64_t{1} << 40, ~std::uint64_t{0}}) {
      Messages messages;
      const std::uint64_t right = sent == 0 ? 0 : 2;
      if (wrong == right) continue;
      for (std::uint64_t i = 0; i < sent; ++i) messages.send(1000);
      if (sent > 0) CHECK_OK(messages.acknowledge(right));
      check_names(messages.acknowledge(wrong), std::to_string(wrong));
      CHECK_EQ(messages.done_count(), right);
      CHECK_EQ(messages.unacknowledged.is_empty(), sent == 0);
    }
  }
}

TEST_CASE(other_frames_are_refused) {
  for (const std::size_t position : {0, 1, 4, 5, 6, 7}) {  // not the port of an address that is lost
    Messages messages;
    messages.send(1000);
    std::vector<std::uint8_t> bytes = acknowledgements({1});
    bytes[position] ^= 2;
    CHECK(messages.take(bytes).code() == StatusCode::kRemoteError);
    CHECK(!messages.is_done(0));
  }
}

// The recovery thread is told once that a peer has closed a connection. A replacement came only after a second where an
// acknowledgement stood before the end.
TEST_CASE(an_end_behind_an_acknowledgement_is_found) {
  for (const bool to_the_end : {true, false}) {
    auto [near, far] = TwoWayEnd::make({}, {}, 1);
    Failures failures;
    ChunkScheduler chunks({1, 65536, 524288});
    ReplayQueue replay;
    SendStream stream(std::move(near), &failures, 0, &chunks, false, nullptr, &replay);
    std::vector<std::uint8_t> said = acknowledgements({0});
    const iovec piece{said.data(), said.size()};
    CHECK_EQ(far->write(&piece, 1), static_cast<ssize_t>(said.size()));
    far->shutdown();
    stream.listen(to_the_end);
    CHECK(stream.state() == (to_the_end ? StreamState::kLost : StreamState::kLive));
    stream.listen();
    CHECK(stream.state() == StreamState::kLost);
    CHECK(failures.all.empty());
  }
}

}  // namespace bagua_net

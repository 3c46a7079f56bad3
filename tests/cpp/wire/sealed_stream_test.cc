// The records of an encrypted stream: bytes come as they were written, however they are split; a recorded exchange of
// which any byte is flipped, cut, repeated, reordered or replayed into another connection gives no wrong byte; the key
// changes in time.
#include "transport/stream/sealed_byte_stream.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <random>
#include <set>
#include <vector>

#include "support/check.h"
#include "support/comm_parts.h"
#include "support/sealed_tape.h"
#include "support/two_way_pipe.h"

namespace bagua_net {
namespace {

using Bytes = std::vector<std::uint8_t>;

std::vector<Cipher> ciphers() {
  if (cpu_has_aes()) return {Cipher::kChaCha20Poly1305, Cipher::kAes256Gcm};
  return {Cipher::kChaCha20Poly1305};
}

struct Recording {
  Bytes plain;
  Bytes wire;
  std::vector<std::size_t> ends;  // of records, on the wire
};

// Writes of these sizes, each one record.
Recording record(Cipher cipher, std::uint8_t key, const std::vector<std::size_t>& sizes) {
  Recording recording;
  auto tape = std::make_unique<Tape>();
  Tape& kept = *tape;
  const auto stream = make_sealed_byte_stream(std::move(tape), keys_of(cipher, key, 99));
  for (const std::size_t size : sizes) {
    const Bytes message = make_message(recording.ends.size() + key, size);
    const iovec piece{const_cast<std::uint8_t*>(message.data()), size};
    CHECK_EQ(stream->write(&piece, 1), static_cast<ssize_t>(size));
    recording.plain.insert(recording.plain.end(), message.begin(), message.end());
    recording.ends.push_back(kept.written.size());
  }
  recording.wire = kept.written;
  return recording;
}

struct Heard {
  Bytes plain;
  int error_number = 0;  // 0: the end of input
};

Heard hear(Cipher cipher, std::uint8_t key, const Bytes& wire, std::size_t most = kAllBytes, bool is_ended = true) {
  auto tape = std::make_unique<Tape>();
  tape->given = wire;
  tape->most = most;
  tape->is_ended = is_ended;
  const auto stream = make_sealed_byte_stream(std::move(tape), keys_of(cipher, 99, key));
  Heard heard;
  for (;;) {
    Bytes room(48);
    const iovec pieces[2] = {{room.data(), 5}, {room.data() + 5, room.size() - 5}};
    const ssize_t got = stream->read(pieces, 2);
    if (got <= 0) {
      heard.error_number = got == 0 ? 0 : errno;
      return heard;
    }
    heard.plain.insert(heard.plain.end(), room.begin(), room.begin() + got);
  }
}

void check_prefix(const Heard& heard, const Recording& recording) {
  CHECK(heard.plain.size() <= recording.plain.size());
  CHECK(std::equal(heard.plain.begin(), heard.plain.end(), recording.plain.begin()));
}

const std::vector<std::size_t> kSizes = {32, 1, 16, 100, 48};

}  // namespace

// libsodium's code takes what has additional data, also none of it.
TEST_CASE(wide_aes_and_libsodium_make_the_same) {
  if (!cpu_has_wide_aes()) {
    std::printf("left out: this CPU has no VAES\n");
    return;
  }
  constexpr std::size_t kMost = 2100;  // beyond the longest loop, at each of its ends
  const Bytes key(kKeyBytes, 7);
  const std::uint8_t none = 0;
  CipherState wide;
  CipherState libsodium;
  CipherState opening;
  for (CipherState* const state : {&wide, &libsodium, &opening}) state->set_key(Cipher::kAes256Gcm, key.data());
  Bytes message(kMost);
  for (std::size_t i = 0; i < kMost; ++i) message[i] = static_cast<std::uint8_t>(i * i + i / 3);
  for (std::size_t bytes = 0; bytes <= kMost; ++bytes) {
    Bytes expected(bytes + kTagBytes);
    CHECK(libsodium.seal(expected.data(), message.data(), bytes, &none, 0));
    Bytes sealed(message.begin(), message.begin() + static_cast<std::ptrdiff_t>(bytes));
    sealed.resize(bytes + kTagBytes);
    CHECK(wide.seal(sealed.data(), sealed.data(), bytes));
    CHECK(sealed == expected);
    sealed[7 * bytes % sealed.size()] ^= 1;
    Bytes opened(bytes);
    CHECK(!opening.open(opened.data(), sealed.data(), bytes));
    CHECK(opening.open(expected.data(), expected.data(), bytes));
    CHECK(std::equal(message.begin(), message.begin() + static_cast<std::ptrdiff_t>(bytes), expected.begin()));
    if (bytes % 1000 != 0) continue;
    for (CipherState* const state : {&wide, &libsodium, &opening}) state->rekey();
  }
}

TEST_CASE(bytes_come_as_they_were_written) {
  for (const Cipher cipher : ciphers()) {
    const Recording recording = record(cipher, 1, kSizes);
    CHECK_EQ(recording.wire.size(), recording.plain.size() + kSizes.size() * kRecordOverhead);
    for (const std::size_t most : {std::size_t{1}, std::size_t{7}, kAllBytes}) {
      const Heard heard = hear(cipher, 1, recording.wire, most);
      CHECK(heard.plain == recording.plain);
      CHECK_EQ(heard.error_number, 0);
    }
    CHECK(std::search(recording.wire.begin(), recording.wire.end(), recording.plain.begin(),
                      recording.plain.begin() + 8) == recording.wire.end());
  }
}

TEST_CASE(every_flipped_bit_is_noticed) {
  for (const Cipher cipher : ciphers()) {
    const Recording recording = record(cipher, 1, kSizes);
    for (std::size_t bit = 0; bit < 8 * recording.wire.size(); ++bit) {
      Bytes wire = recording.wire;
      wire[bit / 8] ^= static_cast<std::uint8_t>(1 << bit % 8);
      // Also if nothing follows: a changed length does not wait for bytes that never come.
      const Heard heard = hear(cipher, 1, wire, kAllBytes, bit % 2 == 0);
      check_prefix(heard, recording);
      CHECK_EQ(heard.error_number, EBADMSG);
    }
  }
}

TEST_CASE(every_cut_is_noticed_in_a_record) {
  for (const Cipher cipher : ciphers()) {
    const Recording recording = record(cipher, 1, kSizes);
    for (std::size_t bytes = 0; bytes < recording.wire.size(); ++bytes) {
      const Heard heard = hear(cipher, 1, Bytes(recording.wire.begin(), recording.wire.begin() + bytes));
      check_prefix(heard, recording);
      const bool is_between =
          bytes == 0 || std::count(recording.ends.begin(), recording.ends.end(), bytes) > 0;  // the frames tell then
      CHECK_EQ(heard.error_number, is_between ? 0 : ECONNRESET);
    }
  }
}

TEST_CASE(bytes_left_out_repeated_or_in_another_order_are_noticed) {
  for (const Cipher cipher : ciphers()) {
    const Recording recording = record(cipher, 1, kSizes);
    const Bytes& wire = recording.wire;
    for (std::size_t at = 0; at < wire.size(); ++at) {
      Bytes without = wire;
      without.erase(without.begin() + static_cast<std::ptrdiff_t>(at));
      Bytes twice = wire;
      twice.insert(twice.begin() + static_cast<std::ptrdiff_t>(at), wire[at]);
      for (const Bytes& changed : {without, twice}) {
        const Heard heard = hear(cipher, 1, changed);
        check_prefix(heard, recording);
        CHECK(heard.error_number == EBADMSG || heard.error_number == ECONNRESET);
      }
    }
    // Whole records.
    const auto part = [&](std::size_t i) {
      const std::size_t begin = i == 0 ? 0 : recording.ends[i - 1];
      return Bytes(wire.begin() + static_cast<std::ptrdiff_t>(begin),
                   wire.begin() + static_cast<std::ptrdiff_t>(recording.ends[i]));
    };
    std::vector<std::vector<std::size_t>> orders = {{0, 0}, {1}, {0, 2}, {1, 0}, {0, 1, 1}, {0, 2, 1}, {4, 3, 2, 1, 0}};
    for (const std::vector<std::size_t>& order : orders) {
      Bytes changed;
      for (const std::size_t i : order) {
        const Bytes one = part(i);
        changed.insert(changed.end(), one.begin(), one.end());
      }
      const Heard heard = hear(cipher, 1, changed);
      check_prefix(heard, recording);
      CHECK_EQ(heard.error_number, EBADMSG);
    }
  }
}

TEST_CASE(a_record_of_another_connection_or_direction_is_refused) {
  for (const Cipher cipher : ciphers()) {
    const Recording first = record(cipher, 1, kSizes);
    const Recording other = record(cipher, 2, kSizes);
    CHECK_EQ(hear(cipher, 1, other.wire).error_number, EBADMSG);
    for (std::size_t i = 0; i + 1 < kSizes.size(); ++i) {
      Bytes spliced(first.wire.begin(), first.wire.begin() + static_cast<std::ptrdiff_t>(first.ends[i]));
      spliced.insert(spliced.end(), other.wire.begin() + static_cast<std::ptrdiff_t>(other.ends[i]), other.wire.end());
      const Heard heard = hear(cipher, 1, spliced);
      check_prefix(heard, first);
      CHECK_EQ(heard.error_number, EBADMSG);
    }
  }
}

// Both ends badly behaved, with keys that change after every third record.
TEST_CASE(any_writes_and_reads_carry_the_same_bytes) {
  for (unsigned seed = 1; seed <= static_cast<unsigned>(check::rounds(40)); ++seed) {
    std::mt19937 random(seed);
    TwoWayBehaviour behaviour;
    behaviour.eintr_percent = 5;
    behaviour.eagain_percent = 20;
    behaviour.most_read = 1 + random() % 100000;
    behaviour.most_written = 1 + random() % 100000;
    behaviour.capacity = 1 + random() % 200000;
    auto ends = TwoWayEnd::make(behaviour, behaviour, seed);
    const Cipher cipher = ciphers()[seed % ciphers().size()];
    const auto writer = make_sealed_byte_stream(std::move(ends.first), keys_of(cipher, 1, 2), 3);
    const auto reader = make_sealed_byte_stream(std::move(ends.second), keys_of(cipher, 2, 1), 3);
    const Bytes message = make_message(seed, 400000);
    Bytes room(message.size());
    std::size_t written = 0;
    std::size_t received = 0;
    const Deadline deadline;
    std::size_t write_until = 0;
    while (received < message.size()) {
      deadline.check("the message");
      // As callers do: what was not taken is written again.
      if (written == write_until) write_until = std::min(message.size(), written + 1 + random() % 90000);
      if (written < write_until) {
        const std::size_t header = std::min<std::size_t>(32, write_until - written);
        auto* const data = const_cast<std::uint8_t*>(message.data()) + written;
        const iovec pieces[2] = {{data, header}, {data + header, write_until - written - header}};
        const ssize_t moved = writer->write(pieces, 2);
        if (moved > 0) written += static_cast<std::size_t>(moved);
        CHECK(moved > 0 || errno == EAGAIN || errno == EINTR);
      }
      const std::size_t asked = std::min<std::size_t>(1 + random() % 70000, message.size() - received);
      const iovec piece{room.data() + received, asked};
      const ssize_t moved = reader->read(&piece, 1);
      if (moved > 0) received += static_cast<std::size_t>(moved);
      CHECK(moved > 0 || errno == EAGAIN || errno == EINTR);
    }
    CHECK(room == message);
  }
}

// Otherwise two processes would use the same nonces.
TEST_CASE(a_forked_child_cannot_seal) {
  for (const Cipher cipher : ciphers()) {
    auto tape = std::make_unique<Tape>();
    const Tape& kept = *tape;
    const auto stream = make_sealed_byte_stream(std::move(tape), keys_of(cipher, 1, 2));
    std::uint8_t byte = 7;
    const iovec piece{&byte, 1};
    CHECK_EQ(stream->write(&piece, 1), 1);
    const std::size_t written = kept.written.size();
    const pid_t child = ::fork();
    CHECK(child >= 0);
    if (child == 0) ::_exit(stream->write(&piece, 1) == -1 && kept.written.size() == written ? 0 : 1);
    int status = -1;
    CHECK_EQ(::waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    CHECK_EQ(stream->write(&piece, 1), 1);
  }
}

TEST_CASE(what_went_out_beyond_the_callers_bytes_is_known) {
  auto tape = std::make_unique<Tape>();
  const auto stream = make_sealed_byte_stream(std::move(tape), keys_of(Cipher::kChaCha20Poly1305, 1, 2));
  const Bytes message(kMaxRecordBytes + 1);
  const iovec piece{const_cast<std::uint8_t*>(message.data()), message.size()};
  CHECK_EQ(stream->write(&piece, 1), static_cast<ssize_t>(message.size()));
  CHECK_EQ(stream->overhead_bytes(), std::uint64_t{2 * kRecordOverhead});
}

}  // namespace bagua_net

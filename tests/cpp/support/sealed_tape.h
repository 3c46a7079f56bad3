// A byte stream that keeps what is written and gives what it is told to, and keys for an encrypted stream on top of it.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <vector>

#include "support/two_way_pipe.h"
#include "transport/stream/sealed_byte_stream.h"

namespace bagua_net {

inline Protected<ConnectionKeys> keys_of(Cipher cipher, std::uint8_t out, std::uint8_t in) {
  Protected<ConnectionKeys> keys = make_protected<ConnectionKeys>();
  keys->out.set_key(cipher, std::vector<std::uint8_t>(kKeyBytes, out).data());
  keys->in.set_key(cipher, std::vector<std::uint8_t>(kKeyBytes, in).data());
  return keys;
}

class Tape final : public ByteStream {
 public:
  ssize_t read(const iovec* pieces, std::size_t count) override {
    std::size_t done = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t bytes = std::min({pieces[i].iov_len, given.size() - position, most});
      std::copy_n(given.begin() + static_cast<std::ptrdiff_t>(position), bytes,
                  static_cast<std::uint8_t*>(pieces[i].iov_base));
      position += bytes;
      done += bytes;
    }
    if (done > 0 || is_ended) return static_cast<ssize_t>(done);
    errno = EAGAIN;
    return -1;
  }
  ssize_t write(const iovec* pieces, std::size_t count) override {
    std::size_t done = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const auto* const bytes = static_cast<const std::uint8_t*>(pieces[i].iov_base);
      written.insert(written.end(), bytes, bytes + pieces[i].iov_len);
      done += pieces[i].iov_len;
    }
    return static_cast<ssize_t>(done);
  }
  int fd() const override { return -1; }
  void shutdown() override {}

  std::vector<std::uint8_t> given;
  std::vector<std::uint8_t> written;
  std::size_t position = 0;
  std::size_t most = kAllBytes;
  bool is_ended = true;
};

}  // namespace bagua_net

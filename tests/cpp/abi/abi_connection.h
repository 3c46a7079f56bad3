// Connections over a network table, and messages on them whose every byte is verified.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "abi_process.h"
#include "abi_tables.h"
#include "support/byte_patterns.h"

namespace abi_test {

#define CHECK_SUCCESS(call)                                                             \
  do {                                                                                  \
    const auto check_result_ = (call);                                                  \
    if (check_result_ != bagua_net::nccl::Result::kSuccess)                             \
      check::fail(__FILE__, __LINE__,                                                   \
                  #call ": result " + std::to_string(static_cast<int>(check_result_)) + \
                      "; logged: " + abi_test::CapturedLog::get().all());               \
  } while (false)
#define CHECK_RESULT(call, expected) CHECK_EQ(static_cast<int>(call), static_cast<int>(expected))

// The byte at `position` of message `seed`: depends on both, so that a chunk in the wrong place or of another message
// shows. In blocks, for the large ones.
UNINSTRUMENTED inline std::uint64_t pattern_word(std::uint64_t seed, std::uint64_t word) {
  std::uint64_t x = seed * 0x9E3779B97F4A7C15u + word * 0xD1B54A32D192ED03u;
  x ^= x >> 29;
  x *= 0xBF58476D1CE4E5B9u;
  return x ^ (x >> 32);
}
constexpr std::size_t kKiB = 1024;
constexpr std::size_t kMiB = 1024 * kKiB;
constexpr std::size_t kPatternBlockBytes = 8192;
UNINSTRUMENTED inline void make_pattern(std::uint64_t* words, std::size_t bytes, std::uint64_t seed,
                                        std::uint64_t first_word) {
  for (std::size_t index = 0; 8 * index < bytes; ++index) words[index] = pattern_word(seed, first_word + index);
}
inline void fill_pattern(std::uint8_t* data, std::size_t bytes, std::uint64_t seed) {
  std::uint64_t block[kPatternBlockBytes / 8];
  for (std::size_t at = 0; at < bytes; at += kPatternBlockBytes) {
    const std::size_t here = std::min(kPatternBlockBytes, bytes - at);
    make_pattern(block, here, seed, at / 8);
    std::memcpy(data + at, block, here);
  }
}
inline void check_pattern(const std::uint8_t* data, std::size_t bytes, std::uint64_t seed) {
  std::uint64_t block[kPatternBlockBytes / 8];
  for (std::size_t at = 0; at < bytes; at += kPatternBlockBytes) {
    const std::size_t here = std::min(kPatternBlockBytes, bytes - at);
    make_pattern(block, here, seed, at / 8);
    if (std::memcmp(data + at, block, here) == 0) continue;
    throw std::runtime_error("message " + std::to_string(seed) + " of " + std::to_string(bytes) +
                             " bytes is wrong in the block at byte " + std::to_string(at));
  }
}

// Memory of which a part, at an odd place, is a message; the rest is guarded against being written.
class Buffer {
 public:
  explicit Buffer(std::size_t bytes, std::size_t offset = 0)
      : bytes_(bytes), offset_(offset), memory_(new std::uint8_t[kGuard + offset + bytes + kGuard]) {
    std::memset(memory_.get(), kGuardByte, kGuard + offset + bytes + kGuard);
  }
  std::uint8_t* data() { return memory_.get() + kGuard + offset_; }
  std::size_t bytes() const { return bytes_; }
  void fill(std::uint64_t seed) { fill_pattern(data(), bytes_, seed); }
  // `bytes` of message `seed`, and nothing written before or behind them.
  void check(std::size_t bytes, std::uint64_t seed) {
    check_pattern(data(), bytes, seed);
    CHECK(byte_patterns::all_bytes_are(memory_.get(), kGuard + offset_, kGuardByte));
    CHECK(byte_patterns::all_bytes_are(data() + bytes, bytes_ - bytes + kGuard, kGuardByte));
  }

 private:
  static constexpr std::size_t kGuard = 64;
  static constexpr std::uint8_t kGuardByte = 0xEE;
  const std::size_t bytes_;
  const std::size_t offset_;
  std::unique_ptr<std::uint8_t[]> memory_;
};

// What may be in NCCL's request slots before a call: nothing, the "completion is optional" hint, a stale pointer.
inline void* slot_content(unsigned call) {
  static int stale = 0;
  void* const contents[] = {nullptr, reinterpret_cast<void*>(0x1), &stale};
  return contents[call % 3];
}

// A comm with a slot for the next request. Posting answers nullptr on "later".
class Poster {
 public:
  Poster(const Net& net, void* comm) : net_(&net), comm_(comm) {}

  void* try_isend(void* data, std::size_t bytes, void* mhandle, int tag = 7) {
    return post([&](void** request) {
      return net_->isend(comm_, data, static_cast<std::int64_t>(bytes), tag, mhandle, request);
    });
  }
  void* try_irecv(void* data, std::size_t bytes, void* mhandle, int tag = 7) {
    return post([&](void** request) {
      return net_->irecv(comm_, 1, &data, static_cast<std::int64_t>(bytes), tag, &mhandle, request);
    });
  }

 private:
  template <typename Call>
  void* post(Call call) {
    void* request = slot_content(++calls_);
    CHECK_SUCCESS(call(&request));
    CHECK(request != slot_content(1) && request != slot_content(2));
    return request;
  }

  const Net* net_;
  void* comm_;
  unsigned calls_ = 0;
};

// Both ends of one connection, in this process.
struct Connection {
  void* listen = nullptr;
  void* send = nullptr;
  void* recv = nullptr;
};

inline void poll_connection(const Net& net, void* ctx, int dev, Handle* handle, Connection* connection) {
  wait_until("connecting", [&] {
    if (connection->send == nullptr) {
      connection->send = slot_content(2);
      CHECK_SUCCESS(net.connect(ctx, dev, handle->data(), &connection->send));
      CHECK(connection->send != slot_content(2));
    }
    if (connection->recv == nullptr) {
      connection->recv = slot_content(2);
      CHECK_SUCCESS(net.accept(connection->listen, &connection->recv));
      CHECK(connection->recv != slot_content(2));
    }
    return connection->send != nullptr && connection->recv != nullptr;
  });
}
inline Connection connect_both_ends(const Net& net, void* ctx, int dev = 0) {
  Connection connection;
  Handle handle{};
  CHECK_SUCCESS(net.listen(ctx, dev, handle.data(), &connection.listen));
  CHECK(connection.listen != nullptr);
  poll_connection(net, ctx, dev, &handle, &connection);
  // As NCCL does: a listen comm is for one connection.
  CHECK_SUCCESS(net.close_listen(connection.listen));
  connection.listen = nullptr;
  return connection;
}
inline void close_both_ends(const Net& net, Connection* connection) {
  CHECK_SUCCESS(net.close_send(connection->send));
  CHECK_SUCCESS(net.close_recv(connection->recv));
  *connection = {};
}

inline void* register_buffer(const Net& net, void* comm, Buffer* buffer) {
  void* mhandle = nullptr;
  CHECK_SUCCESS(net.reg_mr(comm, buffer->data(), static_cast<std::int64_t>(buffer->bytes()),
                           bagua_net::nccl::kPointerHost, &mhandle));
  CHECK(mhandle != nullptr);
  return mhandle;
}

// True once the request is done; *bytes is then what test reported.
inline bool is_done(const Net& net, void* request, int* bytes) {
  int done = -1;
  CHECK_SUCCESS(net.test(request, &done, bytes));
  CHECK(done == 0 || done == 1);
  return done == 1;
}

// One message through one connection, both ends driven by this thread, in place and in time.
inline void exchange(const Net& net, const Connection& connection, std::size_t bytes, std::size_t receive_bytes,
                     std::size_t send_offset, std::size_t recv_offset, std::uint64_t seed, int tag = 0) {
  Buffer from(bytes, send_offset);
  Buffer to(receive_bytes, recv_offset);
  from.fill(seed);
  void* const from_handle = register_buffer(net, connection.send, &from);
  void* const to_handle = register_buffer(net, connection.recv, &to);
  Poster sender(net, connection.send);
  Poster receiver(net, connection.recv);
  void* sending = nullptr;
  void* receiving = nullptr;
  bool sent = false;
  bool received = false;
  int received_bytes = -1;
  wait_until("a message", [&] {
    if (receiving == nullptr) receiving = receiver.try_irecv(to.data(), receive_bytes, to_handle, tag);
    if (sending == nullptr) sending = sender.try_isend(from.data(), bytes, from_handle, tag);
    if (sending != nullptr && !sent) sent = is_done(net, sending, nullptr);
    if (receiving != nullptr && !received) received = is_done(net, receiving, &received_bytes);
    return sent && received;
  });
  CHECK_EQ(received_bytes, static_cast<int>(bytes));
  to.check(bytes, seed);
  CHECK_SUCCESS(net.dereg_mr(connection.send, from_handle));
  CHECK_SUCCESS(net.dereg_mr(connection.recv, to_handle));
}

// The plugin, opened and initialised, for the length of a case.
class Session {
 public:
  explicit Session(int version) : net_(library_, version, &CapturedLog::log) {
    CHECK_SUCCESS(net_.init(&ctx_));
    CHECK(!net_.has_finalize() || ctx_ != nullptr);
  }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  ~Session() { net_.finalize(ctx_); }
  const Net& net() const { return net_; }
  void* ctx() const { return ctx_; }

 private:
  PluginLibrary library_;
  Net net_;
  void* ctx_ = nullptr;
};

inline void transfer_once(const Net& net, void* ctx, std::uint64_t seed) {
  Connection connection = connect_both_ends(net, ctx);
  exchange(net, connection, 300000, 300000, 1, 2, seed);
  close_both_ends(net, &connection);
}

inline void register_process_case(const std::string& name, const char* workers, std::function<void()> body,
                                  const char* file = __builtin_FILE()) {
  register_case(
      name + "_workers" + workers,
      [=] { in_own_process({{"BAGUA_NET_NWORKERS", workers}, {"BAGUA_NET_NSTREAMS", "4"}}, body); }, file);
}

}  // namespace abi_test

// BareTransport: the backend that stands for NCCL's own Socket transport as it runs by default outside the big
// clouds: no helper threads, one non-blocking TCP socket per channel and direction with TCP_NODELAY, and all I/O inside
// test() of the one thread that drives the ring. A message is a 4-byte size in host order and the payload; up to 128
// bytes of payload travel in the same write as the size. There is nothing else on the wire. 32 requests per connection.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/owned_fd.h"
#include "bench/ring_transport.h"
#include "os/socket_address.h"

namespace bagua_net::bench {

class BareTransport final : public RingTransport {
 public:
  // Listens on `address`; with a port, channel c listens on port + c.
  BareTransport(const SocketAddress& address, int channels);

  std::string net_name() const override { return "bare"; }
  std::string table_name() const override { return ""; }
  std::vector<std::string> device_names() const override { return {address_.host()}; }

  Status listen(std::vector<Handle>* handles) override;
  Status connect(int channel, Handle* next_rank, bool* connected) override;
  Status accept(int channel, bool* accepted) override;
  Status register_buffer(int, void*, std::size_t) override { return Status::ok(); }

  Status isend(int channel, const void* data, std::size_t bytes, void** request) override;
  Status irecv(int channel, void* data, std::size_t bytes, void** request) override;
  Status test(void* request, bool* done, std::size_t* bytes) override;

  Status deregister_buffers() override { return Status::ok(); }
  Status close() override;

 private:
  static constexpr int kRequestsPerConnection = 32;  // NCCL_NET_MAX_REQUESTS
  static constexpr std::size_t kInlineBytes = 128;   // NCCL_SOCKET_INLINE
  static constexpr std::size_t kSizeBytes = 4;
  static constexpr std::size_t kTokenBytes = 16;

  struct Connection;
  struct Request {
    enum class State { kFree, kSize, kPayload };
    State state = State::kFree;
    Connection* connection = nullptr;
    std::uint8_t* data = nullptr;
    std::size_t bytes = 0;   // payload; of a receive: room, then what the peer announced
    std::size_t offset = 0;  // within this state's bytes
    std::size_t first_bytes = 0;
    std::array<std::uint8_t, kSizeBytes + kInlineBytes> first{};  // the size, and an inline payload
  };
  struct Connection {
    OwnedFd socket;
    std::string peer;
    bool is_send = false;
    std::array<Request, kRequestsPerConnection> requests;
  };
  struct Channel {
    OwnedFd listener;
    std::array<std::uint8_t, kTokenBytes> token{};  // what a connecting rank must know
    OwnedFd connecting;
    OwnedFd accepted;              // its token has not arrived yet
    std::int64_t accepted_at = 0;  // milliseconds
    std::string accepted_peer;
    Connection send;
    Connection receive;
  };

  Channel& channel_at(int channel) { return channels_[static_cast<std::size_t>(channel)]; }
  static Request* free_request(Connection* connection);
  static Status test_send(Request* request, bool* done);
  static Status test_receive(Request* request, bool* done);

  SocketAddress address_;
  std::vector<Channel> channels_;
};

}  // namespace bagua_net::bench

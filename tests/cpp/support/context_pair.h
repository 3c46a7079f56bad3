// A sending and a receiving process in one: two transport contexts over the loopback interface, and a connection of
// theirs.
#pragma once

#include <netinet/in.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "support/check.h"
#include "support/comm_parts.h"
#include "transport/transport_context.h"

namespace bagua_net {

inline Device loopback_device() {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  Device device;
  device.name = device.interface.name = "lo";
  device.interface.address = SocketAddress(reinterpret_cast<const sockaddr*>(&address), sizeof address);
  return device;
}

struct ContextPair {
  std::unique_ptr<TransportContext> sending;
  std::unique_ptr<TransportContext> receiving;
  ListenComm* listener = nullptr;
  SendComm* sender = nullptr;
  RecvComm* receiver = nullptr;

  ContextPair(const PluginConfig& sending_config, const PluginConfig& receiving_config) {
    CHECK_OK(TransportContext::create(sending_config, {loopback_device()}, &sending));
    CHECK_OK(TransportContext::create(receiving_config, {loopback_device()}, &receiving));
    std::array<std::uint8_t, kHandleBytes> handle{};
    CHECK_OK(receiving->listen(0, handle.data(), &listener));
    wait_until(
        [&] {
          if (sender == nullptr) CHECK_OK(sending->connect(0, handle.data(), &sender));
          if (receiver == nullptr) CHECK_OK(receiving->accept(listener, &receiver));
          return sender != nullptr && receiver != nullptr;
        },
        "the connection");
  }

  Request* send(const std::vector<std::uint8_t>& message) {
    Request* request = nullptr;
    CHECK_OK(TransportContext::isend(sender, message.data(), message.size(), nullptr, &request));
    return request;
  }
  Request* receive(std::vector<std::uint8_t>& room) {
    Request* request = nullptr;
    CHECK_OK(TransportContext::irecv(receiver, room.data(), room.size(), nullptr, &request));
    return request;
  }
  void close_sender() { sending->close(std::exchange(sender, nullptr)); }
  void close_receiver() { receiving->close(std::exchange(receiver, nullptr)); }
};

inline bool is_request_done(Request* request) {
  bool done = false;
  std::size_t bytes = 0;
  CHECK_OK(request->test(&done, &bytes));
  return done;
}

}  // namespace bagua_net

// A sending and a receiving process in one: two transport contexts over the loopback interface, and a connection of
// theirs.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "support/check.h"
#include "support/comm_parts.h"
#include "support/loopback.h"
#include "transport/transport_context.h"

namespace bagua_net {

using Handle = std::array<std::uint8_t, kHandleBytes>;

inline std::unique_ptr<TransportContext> make_context(const PluginConfig& config) {
  std::unique_ptr<TransportContext> context;
  CHECK_OK(TransportContext::create(config, {loopback_device()}, &context));
  return context;
}

inline PluginConfig recovering(int workers, std::optional<int> streams = 4) {
  PluginConfig config;
  config.workers = workers;
  config.streams = streams;
  config.keepalive_s = 10;
  config.recovery = Recovery::kOn;
  return config;
}

inline ListenComm* listen_on(TransportContext& context, Handle* handle) {
  ListenComm* listener = nullptr;
  CHECK_OK(context.listen(0, handle->data(), &listener));
  return listener;
}
inline SendComm* connect_to(TransportContext& context, Handle* handle) {
  SendComm* comm = nullptr;
  wait_until(
      [&] {
        CHECK_OK(context.connect(0, handle->data(), &comm));
        return comm != nullptr;
      },
      "the connection");
  return comm;
}
inline RecvComm* accept_from(TransportContext& context, ListenComm* listener) {
  RecvComm* comm = nullptr;
  wait_until(
      [&] {
        CHECK_OK(context.accept(listener, &comm));
        return comm != nullptr;
      },
      "the connection");
  return comm;
}

inline Request* send(SendComm* comm, const std::vector<std::uint8_t>& message) {
  Request* request = nullptr;
  CHECK_OK(comm->isend(message.data(), message.size(), nullptr, &request));
  return request;
}
inline Request* receive(RecvComm* comm, std::vector<std::uint8_t>& room) {
  Request* request = nullptr;
  CHECK_OK(comm->irecv(room.data(), room.size(), nullptr, &request));
  return request;
}

struct ContextPair {
  std::unique_ptr<TransportContext> sending;
  std::unique_ptr<TransportContext> receiving;
  ListenComm* listener = nullptr;
  SendComm* sender = nullptr;
  RecvComm* receiver = nullptr;

  ContextPair(const PluginConfig& sending_config, const PluginConfig& receiving_config)
      : sending(make_context(sending_config)), receiving(make_context(receiving_config)) {
    Handle handle{};
    listener = listen_on(*receiving, &handle);
    wait_until(
        [&] {
          if (sender == nullptr) CHECK_OK(sending->connect(0, handle.data(), &sender));
          if (receiver == nullptr) CHECK_OK(receiving->accept(listener, &receiver));
          return sender != nullptr && receiver != nullptr;
        },
        "the connection");
  }

  Request* send(const std::vector<std::uint8_t>& message) const { return bagua_net::send(sender, message); }
  Request* receive(std::vector<std::uint8_t>& room) const { return bagua_net::receive(receiver, room); }
  void close_sender() { sending->close(std::exchange(sender, nullptr)); }
  void close_receiver() { receiving->close(std::exchange(receiver, nullptr)); }

  // One message; the first error of either request. Then both ends are closed, before the memory goes.
  Status transfer(const std::vector<std::uint8_t>& message, bool* is_right) {
    std::vector<std::uint8_t> room(message.size());
    Request* const receiving_it = receive(room);
    const Status status = outcome({send(message), receiving_it});
    *is_right = room == message;
    if (!status.is_ok()) {
      close_sender();
      close_receiver();
    }
    return status;
  }
  // Messages of many sizes, until `enough`; every byte is verified.
  template <typename Enough>
  void transfer_until(Enough enough) {
    static constexpr std::size_t kSizes[] = {100, 300000, 0, 2u << 20, 5000, 70000};
    for (std::size_t number = 0; number < 6 || !enough(); ++number) {
      bool is_right = false;
      CHECK_OK(transfer(make_message(number, kSizes[number % 6]), &is_right));
      CHECK(is_right);
    }
  }
};

}  // namespace bagua_net

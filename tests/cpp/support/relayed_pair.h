// RelayedPair: two processes' worth of transport with encryption, and an attacker between them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "support/context_pair.h"
#include "support/temporary_tree.h"
#include "support/wire_relay.h"

namespace bagua_net {

struct Secret {
  TemporaryTree tree;
  std::string path = tree.root() + "/secret";
  explicit Secret(char letter = 's') { tree.write("secret", std::string(64, letter)); }
};

inline PluginConfig encrypted(const Secret& secret, Encryption encryption = Encryption::kOn, int workers = 0) {
  PluginConfig config = recovering(workers, workers == 0 ? 1 : 3);
  config.secret_file = secret.path;
  config.encryption = encryption;
  return config;
}

// A connection through a relay.
struct RelayedPair {
  std::unique_ptr<TransportContext> sending;
  std::unique_ptr<TransportContext> receiving;
  Handle handle{};    // to the relay
  Handle original{};  // to the listener
  ListenComm* listener = nullptr;
  SendComm* sender = nullptr;
  RecvComm* receiver = nullptr;
  std::unique_ptr<WireRelay> relay;

  explicit RelayedPair(const PluginConfig& config, WireRelay::Decide decide = {})
      : sending(make_context(config)), receiving(make_context(config)) {
    listener = listen_on(*receiving, &handle);
    original = handle;
    relay = std::make_unique<WireRelay>(handle.data(), std::move(decide));
  }
  ~RelayedPair() {
    close();
    sending.reset();
    receiving.reset();
  }
  // The first error of either end.
  Status try_to_connect() {
    Status status;
    wait_until(
        [&] {
          if (sender == nullptr) status = sending->connect(0, handle.data(), &sender);
          if (status.is_ok() && receiver == nullptr) status = receiving->accept(listener, &receiver);
          return !status.is_ok() || (sender != nullptr && receiver != nullptr);
        },
        "the connection");
    return status;
  }
  void connect() { CHECK_OK(try_to_connect()); }
  void close() {
    if (sender != nullptr) sending->close(std::exchange(sender, nullptr));
    if (receiver != nullptr) receiving->close(std::exchange(receiver, nullptr));
  }
  void transfer(const std::vector<std::uint8_t>& message) {
    std::vector<std::uint8_t> room(message.size());
    Request* const receiving_it = receive(receiver, room);
    CHECK_OK(outcome({send(sender, message), receiving_it}));
    CHECK(room == message);
  }
};

}  // namespace bagua_net

// Who sends by reference: the handshake's feature bit, the knob and the peer's address decide, whatever the other
// settings of the two ends; every combination moves messages whole.
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "support/check.h"
#include "support/comm_parts.h"
#include "support/raw_handshake.h"
#include "support/tcp_pair.h"
#include "transport/transport_context.h"
#include "wire/acknowledgement.h"
#include "wire/connect_handle.h"
#include "wire/frame_header.h"
#include "wire/handshake_message.h"

namespace bagua_net {
namespace {

constexpr std::size_t kMessageBytes = 4u << 20;
constexpr Token kToken{7, 7, 7};

bool is_done(Request* request) {
  bool done = false;
  std::size_t bytes = 0;
  CHECK_OK(request->test(&done, &bytes));
  return done;
}

PluginConfig config_with(int workers, bool zero_copy) {
  PluginConfig config;
  config.workers = workers;
  config.streams = 2;
  config.zero_copy = zero_copy;
  return config;
}

std::unique_ptr<TransportContext> make_context(const PluginConfig& config) {
  Device device;
  device.name = device.interface.name = "lo";
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  device.interface.address = SocketAddress(reinterpret_cast<const sockaddr*>(&address), sizeof address);
  std::unique_ptr<TransportContext> context;
  CHECK_OK(TransportContext::create(config, {device}, &context));
  return context;
}

std::vector<std::uint8_t> read_exactly(const OwnedFd& socket, std::size_t count) {
  std::vector<std::uint8_t> bytes(count);
  CHECK_EQ(::recv(socket.get(), bytes.data(), count, MSG_WAITALL), static_cast<ssize_t>(count));
  return bytes;
}

// A listener that answers as it is told, and reads with blocking calls.
class Listener {
 public:
  explicit Listener(in_addr_t host) : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(host);
    socklen_t length = sizeof address;
    make_blocking(socket_);
    CHECK_EQ(::bind(socket_.get(), reinterpret_cast<sockaddr*>(&address), length), 0);
    CHECK_EQ(::listen(socket_.get(), 8), 0);
    CHECK_EQ(::getsockname(socket_.get(), reinterpret_cast<sockaddr*>(&address), &length), 0);
    ConnectHandle encoded;
    encoded.max_streams = 2;
    encoded.token = kToken;
    encoded.port = ntohs(address.sin_port);
    std::memcpy(encoded.address.data(), &address.sin_addr, sizeof address.sin_addr);
    encode_connect_handle(encoded, handle.data());
  }

  std::array<std::uint8_t, kHandleBytes> handle{};

  // The next connection that comes; *hello is what it said.
  OwnedFd accept(std::uint32_t features, Hello* hello) {
    OwnedFd accepted(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    CHECK(accepted.is_open());
    make_blocking(accepted);
    // What is asked for is known before the reply that grants it.
    Said said = read_hello(accepted, hello);
    challenge(accepted, &said);
    read_proof(accepted, kToken, said);
    Reply reply;
    reply.streams = 2;
    reply.max_chunk_bytes = hello->max_chunk_bytes;
    reply.features = features;
    send_reply(accepted, kToken, said, reply);
    return accepted;
  }

 private:
  const OwnedFd socket_;
};

// Sends one message to a listener with these features; true: it asked for acknowledgements.
bool asks_for_acknowledgement(const PluginConfig& config, std::uint32_t features, in_addr_t host = INADDR_LOOPBACK) {
  const std::vector<std::uint8_t> message = make_message(0, kMessageBytes);
  Listener listener(host);
  const std::unique_ptr<TransportContext> context = make_context(config);
  SendComm* comm = nullptr;
  CHECK_OK(context->connect(0, listener.handle.data(), &comm));
  Hello hello;
  const OwnedFd first = listener.accept(features, &hello);
  CHECK((hello.features & kFeatureAcknowledgements) != 0);
  // Only the first reply settles anything.
  CHECK_OK(context->connect(0, listener.handle.data(), &comm));
  const OwnedFd second = listener.accept(~features, &hello);
  CHECK_EQ(hello.stream_index, 1u);
  CHECK((hello.features & kFeatureAcknowledgements) != 0);
  wait_until(
      [&] {
        CHECK_OK(context->connect(0, listener.handle.data(), &comm));
        return comm != nullptr;
      },
      "the connection");

  Request* send = nullptr;
  CHECK_OK(TransportContext::isend(comm, message.data(), message.size(), nullptr, &send));
  CHECK(send != nullptr);
  FrameHeader header;
  CHECK_OK(decode_frame_header(read_exactly(second, kFrameHeaderBytes).data(), &header));
  CHECK_EQ(std::size_t{header.payload_bytes}, message.size());
  CHECK(read_exactly(second, message.size()) == message);
  if (header.acknowledge) {
    for (int i = 0; i < 1000; ++i) CHECK(!is_done(send));
    std::array<std::uint8_t, kAcknowledgementBytes> bytes;
    encode_acknowledgement({1, false}, bytes.data());
    CHECK_EQ(::send(second.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  }
  wait_until([&] { return is_done(send); }, "the request");
  context->close(comm);
  return header.acknowledge;
}

// What a listening context replies to a hello with these features.
std::uint32_t features_granted(const PluginConfig& config, std::uint32_t features) {
  const std::unique_ptr<TransportContext> context = make_context(config);
  std::array<std::uint8_t, kHandleBytes> bytes{};
  ListenComm* listen = nullptr;
  CHECK_OK(context->listen(0, bytes.data(), &listen));
  ConnectHandle handle;
  CHECK_OK(decode_connect_handle(bytes.data(), &handle));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(handle.port);
  std::memcpy(&address.sin_addr, handle.address.data(), sizeof address.sin_addr);
  const OwnedFd socket = connect_to({reinterpret_cast<const sockaddr*>(&address), sizeof address});
  Hello hello;
  hello.listen_id = handle.listen_id;
  hello.max_chunk_bytes = 100000;
  hello.features = features;
  const Reply reply = shake_hands(socket, handle.token, hello);
  CHECK(reply.verdict == HandshakeVerdict::kAccepted);
  return reply.features;
}

}  // namespace

TEST_CASE(chunks_ask_for_acknowledgement_where_the_listener_gives_it) {
  CHECK(asks_for_acknowledgement(config_with(1, true), kFeatureAcknowledgements));
  CHECK(asks_for_acknowledgement(config_with(1, true), ~(kFeatureRecovery | kFeatureChecksums)));
}

TEST_CASE(a_listener_of_before_gets_copies) {
  CHECK(!asks_for_acknowledgement(config_with(1, true), 0));
  CHECK(!asks_for_acknowledgement(config_with(1, true),
                                  ~(kFeatureAcknowledgements | kFeatureRecovery | kFeatureChecksums)));
}

TEST_CASE(the_knob_turns_it_off) { CHECK(!asks_for_acknowledgement(config_with(1, false), kFeatureAcknowledgements)); }

// All of 127.0.0.0/8 leads here, but the ends see different addresses, as across a network.
TEST_CASE(a_peer_at_another_address_gets_copies) {
  CHECK(!asks_for_acknowledgement(config_with(1, true), kFeatureAcknowledgements, INADDR_LOOPBACK + 1));
}

TEST_CASE(a_listener_grants_what_was_asked_for_and_known) {
  for (const bool zero_copy : {false, true}) {
    for (const int workers : {0, 1}) {
      const PluginConfig config = config_with(workers, zero_copy);
      CHECK_EQ(features_granted(config, 0), 0u);
      CHECK_EQ(features_granted(config, kFeatureAcknowledgements), kFeatureAcknowledgements);
      CHECK_EQ(features_granted(config, ~std::uint32_t{0}),
               kFeatureAcknowledgements | kFeatureRecovery | kFeatureChecksums);
      CHECK_EQ(features_granted(config, ~kFeatureAcknowledgements), kFeatureRecovery | kFeatureChecksums);
    }
  }
}

TEST_CASE(ends_with_different_settings_understand_each_other) {
  for (const int sending_workers : {0, 1}) {
    for (const int receiving_workers : {0, 1}) {
      for (const bool sender_zero_copy : {false, true}) {
        for (const bool receiver_zero_copy : {false, true}) {
          std::vector<std::vector<std::uint8_t>> sent;
          std::vector<std::vector<std::uint8_t>> rooms(4, std::vector<std::uint8_t>(kMessageBytes));
          for (std::size_t number = 0; number < rooms.size(); ++number) {
            sent.push_back(make_message(number, kMessageBytes));
          }
          const auto sending = make_context(config_with(sending_workers, sender_zero_copy));
          const auto receiving = make_context(config_with(receiving_workers, receiver_zero_copy));
          std::array<std::uint8_t, kHandleBytes> handle{};
          ListenComm* listen = nullptr;
          CHECK_OK(receiving->listen(0, handle.data(), &listen));
          SendComm* sender = nullptr;
          RecvComm* receiver = nullptr;
          wait_until(
              [&] {
                if (sender == nullptr) CHECK_OK(sending->connect(0, handle.data(), &sender));
                if (receiver == nullptr) CHECK_OK(receiving->accept(listen, &receiver));
                return sender != nullptr && receiver != nullptr;
              },
              "the connection");
          std::vector<Request*> sends(rooms.size());
          std::vector<Request*> receives(rooms.size());
          for (std::size_t number = 0; number < rooms.size(); ++number) {
            CHECK_OK(TransportContext::isend(sender, sent[number].data(), kMessageBytes, nullptr, &sends[number]));
            CHECK_OK(
                TransportContext::irecv(receiver, rooms[number].data(), kMessageBytes, nullptr, &receives[number]));
          }
          for (std::size_t number = 0; number < rooms.size(); ++number) {
            bool is_sent = false;
            bool is_received = false;
            wait_until(
                [&] {
                  if (!is_sent && is_done(sends[number])) {
                    is_sent = true;
                    sent[number].assign(kMessageBytes, 0x5a);
                  }
                  is_received = is_received || is_done(receives[number]);
                  return is_sent && is_received;
                },
                "a message");
            CHECK(rooms[number] == make_message(number, kMessageBytes));
          }
          sending->close(sender);
          receiving->close(receiver);
          receiving->close(listen);
        }
      }
    }
  }
}

}  // namespace bagua_net

CHECK_MAIN

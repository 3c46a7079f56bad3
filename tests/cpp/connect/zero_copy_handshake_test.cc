// Who sends by reference: the handshake's feature bit, the knob and the peer's address decide.
#include <cstdint>
#include <memory>
#include <vector>

#include "support/context_pair.h"
#include "support/raw_handshake.h"
#include "wire/frames.h"

namespace bagua_net {
namespace {

constexpr std::size_t kMessageBytes = 4u << 20;

PluginConfig config_with(int workers, bool zero_copy) {
  PluginConfig config;
  config.workers = workers;
  config.streams = 2;
  config.zero_copy = zero_copy;
  return config;
}

// Sends one message to a listener with these features; true: it asked for acknowledgements.
bool asks_for_acknowledgement(const PluginConfig& config, std::uint32_t features, in_addr_t host = INADDR_LOOPBACK) {
  const std::vector<std::uint8_t> message = make_message(0, kMessageBytes);
  RawListener listener(host);
  const std::unique_ptr<TransportContext> context = make_context(config);
  SendComm* comm = nullptr;
  CHECK_OK(context->connect(0, listener.handle.data(), &comm));
  Reply reply = acceptance(2, features);
  Hello hello;
  // What is asked for is known before the reply that grants it, and only the first reply settles anything.
  const OwnedFd first = listener.answer_next(reply, &hello);
  CHECK((hello.features & kFeatureAcknowledgements) != 0);
  reply.features = ~features;
  CHECK_OK(context->connect(0, listener.handle.data(), &comm));
  const OwnedFd second = listener.answer_next(reply, &hello);
  CHECK_EQ(hello.stream_index, 1u);
  CHECK((hello.features & kFeatureAcknowledgements) != 0);
  comm = connect_to(*context, &listener.handle);

  Request* const request = send(comm, message);
  std::vector<std::uint8_t> bytes(kFrameHeaderBytes);
  read_bytes(second, bytes.data(), bytes.size());
  FrameHeader header;
  CHECK_OK(decode_frame_header(bytes.data(), &header));
  CHECK_EQ(std::size_t{header.payload_bytes}, message.size());
  bytes.resize(message.size());
  read_bytes(second, bytes.data(), bytes.size());
  CHECK(bytes == message);
  if (header.acknowledge) {
    for (int i = 0; i < 1000; ++i) CHECK(!is_done(request));
    encode_acknowledgement({1, false}, bytes.data());
    send_bytes(second, bytes.data(), kAcknowledgementBytes);
  }
  CHECK_OK(outcome(request));
  context->close(comm);
  return header.acknowledge;
}

// What a listening context replies to a hello with these features.
std::uint32_t features_granted(const PluginConfig& config, std::uint32_t features) {
  const std::unique_ptr<TransportContext> context = make_context(config);
  Handle bytes{};
  listen_on(*context, &bytes);
  ConnectHandle handle;
  CHECK_OK(decode_connect_handle(bytes.data(), &handle));
  SocketAddress address = loopback().address;
  address.set_port(handle.port);
  Hello hello = hello_to(handle.listen_id);
  hello.features = features;
  const Reply reply = shake_hands(connect_to(address), *handshake_key(handle.token), hello);
  CHECK(reply.verdict == HandshakeVerdict::kAccepted);
  return reply.features;
}

}  // namespace

TEST_CASE(chunks_ask_for_acknowledgement_where_the_listener_gives_it) {
  constexpr std::uint32_t kOthers = kFeatureRecovery | kFeatureChecksums;
  CHECK(asks_for_acknowledgement(config_with(1, true), kFeatureAcknowledgements));
  CHECK(asks_for_acknowledgement(config_with(1, true), ~kOthers));
  // A listener of before gets copies.
  CHECK(!asks_for_acknowledgement(config_with(1, true), 0));
  CHECK(!asks_for_acknowledgement(config_with(1, true), ~(kFeatureAcknowledgements | kOthers)));
  // The knob turns it off.
  CHECK(!asks_for_acknowledgement(config_with(1, false), kFeatureAcknowledgements));
  // All of 127.0.0.0/8 leads here, but the ends see different addresses, as across a network.
  CHECK(!asks_for_acknowledgement(config_with(1, true), kFeatureAcknowledgements, INADDR_LOOPBACK + 1));
  // There it is another knob's.
  PluginConfig between_hosts = config_with(1, false);
  between_hosts.msg_zerocopy = true;
  CHECK(asks_for_acknowledgement(between_hosts, kFeatureAcknowledgements, INADDR_LOOPBACK + 1));
  CHECK(!asks_for_acknowledgement(between_hosts, 0, INADDR_LOOPBACK + 1));
  CHECK(!asks_for_acknowledgement(between_hosts, kFeatureAcknowledgements));
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

}  // namespace bagua_net

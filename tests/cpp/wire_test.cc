// The bytes of handle, hello, reply, frame header and acknowledgement: fixed for a protocol version, and hostile bytes
// are errors.
#include <cstring>
#include <string>
#include <vector>

#include "support/check.h"
#include "wire/acknowledgement.h"
#include "wire/connect_handle.h"
#include "wire/frame_header.h"
#include "wire/handshake_message.h"

namespace bagua_net {

TEST_CASE(frame_header_bytes) {
  std::uint8_t bytes[kFrameHeaderBytes];
  encode_frame_header({0x01020304, 0x05, 0x06, 0x01020400}, bytes);
  const std::uint8_t expected[kFrameHeaderBytes] = {1, 0, 0, 0, 4, 3, 2, 1, 5, 0, 0, 0, 0, 0, 0, 0,
                                                    6, 0, 0, 0, 0, 0, 0, 0, 0, 4, 2, 1, 0, 0, 0, 0};
  CHECK(std::memcmp(bytes, expected, sizeof bytes) == 0);
  FrameHeader header;
  CHECK_OK(decode_frame_header(bytes, &header));
  CHECK_EQ(header.payload_bytes, 0x01020304u);
  CHECK_EQ(header.message_number, std::uint64_t{5});
  CHECK_EQ(header.offset, std::uint64_t{6});
  CHECK_EQ(header.message_bytes, std::uint64_t{0x01020400});
}

TEST_CASE(a_frame_header_asks_for_acknowledgement_with_one_bit) {
  FrameHeader header{0x01020304, 0x05, 0x06, 0x01020400, true};
  std::uint8_t bytes[kFrameHeaderBytes];
  encode_frame_header(header, bytes);
  const std::uint8_t expected[kFrameHeaderBytes] = {1, 1, 0, 0, 4, 3, 2, 1, 5, 0, 0, 0, 0, 0, 0, 0,
                                                    6, 0, 0, 0, 0, 0, 0, 0, 0, 4, 2, 1, 0, 0, 0, 0};
  CHECK(std::memcmp(bytes, expected, sizeof bytes) == 0);
  FrameHeader decoded;
  CHECK_OK(decode_frame_header(bytes, &decoded));
  CHECK(decoded.acknowledge);
  // The same variable takes one header after the other.
  bytes[1] = 0;
  CHECK_OK(decode_frame_header(bytes, &decoded));
  CHECK(!decoded.acknowledge);
  for (int flags = 4; flags <= 0xff; ++flags) {
    bytes[1] = static_cast<std::uint8_t>(flags);
    CHECK(decode_frame_header(bytes, &decoded).code() == StatusCode::kRemoteError);
  }
}

TEST_CASE(acknowledgement_bytes) {
  std::uint8_t bytes[kAcknowledgementBytes];
  std::memset(bytes, 0xee, sizeof bytes);
  encode_acknowledgement({0x0102030405060708, true}, bytes);
  const std::uint8_t expected[kAcknowledgementBytes] = {2, 1, 0, 0, 0, 0, 0, 0, 8, 7, 6, 5, 4, 3, 2, 1};
  CHECK(std::memcmp(bytes, expected, sizeof bytes) == 0);
  for (const std::uint64_t chunks : {std::uint64_t{0}, std::uint64_t{65536}, ~std::uint64_t{0}}) {
    for (const bool is_last : {false, true}) {
      encode_acknowledgement({chunks, is_last}, bytes);
      Acknowledgement decoded{1, !is_last};
      CHECK_OK(decode_acknowledgement(bytes, &decoded));
      CHECK_EQ(decoded.chunks, chunks);
      CHECK_EQ(decoded.is_last, is_last);
    }
  }
}

TEST_CASE(what_is_no_acknowledgement_is_refused) {
  std::uint8_t bytes[kAcknowledgementBytes];
  encode_acknowledgement({77, false}, bytes);
  for (std::size_t position = 0; position < 8; ++position) {
    for (int bit = 0; bit < 8; ++bit) {
      if (position == 1 && bit == 0) continue;  // the last one
      std::uint8_t changed[kAcknowledgementBytes];
      std::memcpy(changed, bytes, sizeof changed);
      changed[position] ^= static_cast<std::uint8_t>(1 << bit);
      Acknowledgement received{5, false};
      const Status status = decode_acknowledgement(changed, &received);
      CHECK(status.code() == StatusCode::kRemoteError);
      CHECK(status.message().find("type " + std::to_string(changed[0]) + " ") != std::string::npos);
      CHECK_EQ(received.chunks, std::uint64_t{5});
    }
  }
  // A chunk is none either: what is sent in the wrong direction is noticed.
  std::uint8_t header[kFrameHeaderBytes];
  encode_frame_header({1, 0, 0, 1, true}, header);
  Acknowledgement received;
  CHECK(decode_acknowledgement(header, &received).code() == StatusCode::kRemoteError);
}

TEST_CASE(frame_of_another_type_is_refused) {
  std::uint8_t bytes[kFrameHeaderBytes];
  encode_frame_header({1, 0, 0, 1}, bytes);
  FrameHeader header;
  for (const int position : {0, 1}) {
    std::uint8_t changed[kFrameHeaderBytes];
    std::memcpy(changed, bytes, sizeof changed);
    changed[position] ^= 0x40;
    CHECK(decode_frame_header(changed, &header).code() == StatusCode::kRemoteError);
  }
}

TEST_CASE(handle_round_trip) {
  ConnectHandle handle;
  handle.address_family = 6;
  handle.port = 54321;
  handle.max_streams = 64;
  handle.scope_id = 3;
  for (std::size_t i = 0; i < 16; ++i) {
    handle.address[i] = static_cast<std::uint8_t>(i + 1);
    handle.token[i] = static_cast<std::uint8_t>(200 + i);
    handle.listen_id[i] = static_cast<std::uint8_t>(100 + i);
  }
  std::uint8_t bytes[kConnectHandleBytes];
  encode_connect_handle(handle, bytes);
  CHECK_EQ(load_connect_state(bytes), std::uint64_t{0});
  store_connect_state(bytes, 77);
  ConnectHandle decoded;
  CHECK_OK(decode_connect_handle(bytes, &decoded));
  CHECK_EQ(load_connect_state(bytes), std::uint64_t{77});
  CHECK_EQ(decoded.port, handle.port);
  CHECK_EQ(decoded.scope_id, handle.scope_id);
  CHECK_EQ(decoded.max_streams, handle.max_streams);
  CHECK(decoded.address == handle.address);
  CHECK(decoded.token == handle.token);
  CHECK(decoded.listen_id == handle.listen_id);
}

TEST_CASE(handle_of_another_network_names_the_remedy) {
  std::vector<std::uint8_t> bytes(kConnectHandleBytes, 2);
  ConnectHandle handle;
  const Status status = decode_connect_handle(bytes.data(), &handle);
  CHECK(status.code() == StatusCode::kRemoteError);
  CHECK(status.message().find("ENABLE_BAGUA_NET=1") != std::string::npos);
}

TEST_CASE(handle_of_another_version_names_both) {
  ConnectHandle handle;
  handle.protocol_version = 9;
  std::uint8_t bytes[kConnectHandleBytes];
  encode_connect_handle(handle, bytes);
  const Status status = decode_connect_handle(bytes, &handle);
  CHECK(status.code() == StatusCode::kRemoteError);
  CHECK(status.message().find("version 9") != std::string::npos);
  CHECK(status.message().find("version " + std::to_string(kProtocolVersion)) != std::string::npos);
}

TEST_CASE(hello_bytes) {
  Hello hello;
  hello.stream_index = 0x0102;
  hello.streams_wanted = 0x0304;
  for (std::size_t i = 0; i < 16; ++i) {
    hello.listen_id[i] = static_cast<std::uint8_t>(0x10 + i);
    hello.comm_id[i] = static_cast<std::uint8_t>(0x20 + i);
  }
  hello.process_id = 0x3132333435363738;
  hello.max_chunk_bytes = 0x41424344;
  hello.features = 0x51525354;
  hello.host_name = "node";
  std::vector<std::uint8_t> expected = {
      'B',  'N',  'H',  'E',  'L',  'L',  'O',  '1',  2,    0,    2,    1,    4,    3,    0,    0,     // to the sizes
      0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18, 0x19, 0x1a, 0x1b, 0x1c, 0x1d, 0x1e, 0x1f,  // listen id
      0x20, 0x21, 0x22, 0x23, 0x24, 0x25, 0x26, 0x27, 0x28, 0x29, 0x2a, 0x2b, 0x2c, 0x2d, 0x2e, 0x2f,  // comm id
      0x38, 0x37, 0x36, 0x35, 0x34, 0x33, 0x32, 0x31, 0x44, 0x43, 0x42, 0x41, 0x54, 0x53, 0x52, 0x51,  // to features
      'n',  'o',  'd',  'e'};
  expected.resize(112);
  for (std::uint8_t i = 0; i < 16; ++i) {
    hello.nonce[i] = static_cast<std::uint8_t>(0x60 + i);
    expected.push_back(hello.nonce[i]);
  }
  std::vector<std::uint8_t> bytes(kHelloBytes, 0xee);
  encode_hello(hello, bytes.data());
  CHECK(bytes == expected);
  Hello decoded;
  decode_hello(bytes.data(), &decoded);
  CHECK_EQ(decoded.features, hello.features);
  CHECK(decoded.nonce == hello.nonce);
  CHECK_EQ(hello_version(bytes.data()), kProtocolVersion);
  // Whoever names none has none.
  encode_hello({}, bytes.data());
  decode_hello(bytes.data(), &decoded);
  CHECK_EQ(decoded.features, 0u);
}

TEST_CASE(reply_bytes) {
  Reply reply;
  reply.verdict = HandshakeVerdict::kUnknownStream;
  reply.streams = 0x0102;
  reply.process_id = 0x3132333435363738;
  reply.max_chunk_bytes = 0x41424344;
  reply.features = 0x51525354;
  const std::vector<std::uint8_t> expected = {'B',  'N',  'R',  'E',  'P',  'L',  'Y',  '1',  2,    0,    3,
                                              0,    2,    1,    0,    0,    0x38, 0x37, 0x36, 0x35, 0x34, 0x33,
                                              0x32, 0x31, 0x44, 0x43, 0x42, 0x41, 0x54, 0x53, 0x52, 0x51};
  std::vector<std::uint8_t> bytes(kReplyBytes, 0xee);
  encode_reply(reply, bytes.data());
  CHECK(bytes == expected);
  Reply decoded;
  CHECK_OK(decode_reply(bytes.data(), &decoded));
  CHECK_EQ(decoded.features, reply.features);
  encode_reply({}, bytes.data());
  CHECK_OK(decode_reply(bytes.data(), &decoded));
  CHECK_EQ(decoded.features, 0u);
}

TEST_CASE(challenge_bytes) {
  Challenge challenge;
  std::vector<std::uint8_t> expected = {'B', 'N', 'C', 'H', 'A', 'L', 'L', '1', 0, 0, 0, 0, 0, 0, 0, 0};
  for (std::uint8_t i = 0; i < 16; ++i) {
    challenge.nonce[i] = static_cast<std::uint8_t>(0x60 + i);
    expected.push_back(challenge.nonce[i]);
  }
  std::vector<std::uint8_t> bytes(kChallengeBytes, 0xee);
  encode_challenge(challenge, bytes.data());
  CHECK(bytes == expected);
  Challenge decoded;
  CHECK(decode_challenge(bytes.data(), &decoded));
  CHECK(decoded.nonce == challenge.nonce);
  bytes[7] ^= 1;
  CHECK(!decode_challenge(bytes.data(), &decoded));
}

TEST_CASE(the_feature_of_acknowledgements_is_the_first_bit) { CHECK_EQ(kFeatureAcknowledgements, 1u); }

TEST_CASE(hello_round_trip_and_prefix) {
  Hello hello;
  hello.stream_index = 3;
  hello.streams_wanted = 5;
  hello.process_id = 4242;
  hello.max_chunk_bytes = 123456;
  hello.host_name = std::string(100, 'n');
  hello.listen_id[15] = 9;
  hello.comm_id[0] = 8;
  std::uint8_t bytes[kHelloBytes];
  encode_hello(hello, bytes);
  for (std::size_t count = 0; count <= kHelloBytes; ++count) CHECK(is_hello_prefix(bytes, count));
  Hello decoded;
  decode_hello(bytes, &decoded);
  CHECK_EQ(decoded.stream_index, hello.stream_index);
  CHECK_EQ(decoded.streams_wanted, hello.streams_wanted);
  CHECK_EQ(decoded.process_id, hello.process_id);
  CHECK_EQ(decoded.max_chunk_bytes, hello.max_chunk_bytes);
  CHECK_EQ(decoded.host_name, std::string(47, 'n'));
  CHECK(decoded.listen_id == hello.listen_id);
  CHECK(decoded.comm_id == hello.comm_id);
  for (const std::size_t position : {std::size_t{0}, std::size_t{7}}) {
    bytes[position] ^= 1;
    CHECK(!is_hello_prefix(bytes, position + 1));
    bytes[position] ^= 1;
  }
}

TEST_CASE(host_name_of_an_unauthenticated_peer_cannot_forge_log_lines) {
  Hello hello;
  hello.host_name = "a\nWARN\x1b[2J";
  std::uint8_t bytes[kHelloBytes];
  encode_hello(hello, bytes);
  Hello decoded;
  decode_hello(bytes, &decoded);
  CHECK_EQ(decoded.host_name, std::string("a?WARN?[2J"));
}

TEST_CASE(reply_round_trip_and_magic) {
  Reply reply;
  reply.verdict = HandshakeVerdict::kUnknownListen;
  reply.streams = 4;
  reply.process_id = 99;
  reply.max_chunk_bytes = 65536;
  std::uint8_t bytes[kReplyBytes];
  encode_reply(reply, bytes);
  Reply decoded;
  CHECK_OK(decode_reply(bytes, &decoded));
  CHECK(decoded.verdict == reply.verdict);
  CHECK_EQ(decoded.streams, reply.streams);
  CHECK_EQ(decoded.process_id, reply.process_id);
  CHECK_EQ(decoded.max_chunk_bytes, reply.max_chunk_bytes);
  bytes[0] = 'H';
  CHECK(decode_reply(bytes, &decoded).code() == StatusCode::kRemoteError);
}

}  // namespace bagua_net

CHECK_MAIN

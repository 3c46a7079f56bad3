// The bytes of handle, hello, reply, frame header and acknowledgement: fixed for a protocol version, and hostile bytes
// are errors. Proofs: the algorithm against published vectors; a proof fits its own connection, role and words, and
// nothing else.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "support/check.h"
#include "wire/connect_handle.h"
#include "wire/frames.h"
#include "wire/handshake_message.h"

namespace bagua_net {
namespace {

class Random {
 public:
  template <typename Number>
  void draw(Number* number) {
    *number = static_cast<Number>(random_() >> random_() % 64);
  }
  template <std::size_t kBytes>
  void draw(std::array<std::uint8_t, kBytes>* bytes) {
    for (std::uint8_t& byte : *bytes) byte = static_cast<std::uint8_t>(random_());
  }

 private:
  std::mt19937_64 random_{1};
};

}  // namespace

// The same variable takes one after the other.
TEST_CASE(what_was_encoded_is_decoded) {
  Random random;
  FrameHeader frame;
  ConnectHandle handle;
  Hello hello;
  Reply reply;
  std::array<std::uint8_t, kMaxReplyBytes> bytes;
  for (int round = 0; round < 1000; ++round) {
    FrameHeader sent;
    random.draw(&sent.payload_bytes);
    random.draw(&sent.message_number);
    random.draw(&sent.offset);
    sent.offset >>= 2;
    sent.message_bytes = sent.offset + sent.payload_bytes + static_cast<std::uint64_t>(round % 3);
    if (sent.payload_bytes == 0) sent.message_bytes = sent.offset = 0;
    random.draw(&sent.attempt);
    sent.acknowledge = round % 2 == 0;
    sent.by_reference = round % 5 == 0;
    sent.end = sent.message_bytes == 0;
    encode_frame_header(sent, bytes.data());
    CHECK_OK(decode_frame_header(bytes.data(), &frame));
    CHECK(frame.payload_bytes == sent.payload_bytes && frame.message_number == sent.message_number);
    CHECK(frame.offset == sent.offset && frame.message_bytes == sent.message_bytes && frame.attempt == sent.attempt);
    CHECK(frame.acknowledge == sent.acknowledge && frame.by_reference == sent.by_reference && frame.end == sent.end);

    ConnectHandle given;
    given.address_family = round % 2 == 0 ? 4 : 6;
    random.draw(&given.port);
    random.draw(&given.max_streams);
    random.draw(&given.scope_id);
    random.draw(&given.address);
    random.draw(&given.token);
    random.draw(&given.listen_id);
    random.draw(&given.protection.key_id);
    given.protection.encrypts = round % 3 == 0;
    given.has_aes = round % 5 == 0;
    given.further.resize(static_cast<std::size_t>(round) % max_handle_addresses(given.address_family));
    if (given.further.size() + 1 == max_handle_addresses(given.address_family)) given.unnamed = std::size_t(round) % 9;
    for (HandleAddress& address : given.further) {
      random.draw(&address.bytes);
      if (given.address_family == 4) std::fill(address.bytes.begin() + 4, address.bytes.end(), std::uint8_t{0});
      random.draw(&address.port);
    }
    encode_connect_handle(given, bytes.data());
    CHECK_EQ(load_connect_state(bytes.data()), std::uint64_t{0});
    store_connect_state(bytes.data(), 77);
    CHECK_OK(decode_connect_handle(bytes.data(), &handle));
    CHECK_EQ(load_connect_state(bytes.data()), std::uint64_t{77});
    CHECK(handle.port == given.port && handle.scope_id == given.scope_id && handle.max_streams == given.max_streams);
    CHECK(handle.address_family == given.address_family && handle.address == given.address);
    CHECK(handle.token == given.token && handle.listen_id == given.listen_id);
    CHECK(handle.protection.key_id == given.protection.key_id && handle.has_aes == given.has_aes);
    CHECK_EQ(handle.protection.encrypts, given.protection.encrypts);
    CHECK_EQ(handle.further.size(), given.further.size());
    CHECK_EQ(handle.unnamed, given.unnamed);
    for (std::size_t i = 0; i < given.further.size(); ++i) {
      CHECK(handle.further[i].bytes == given.further[i].bytes && handle.further[i].port == given.further[i].port);
    }

    Hello said;
    random.draw(&said.stream_index);
    random.draw(&said.streams_wanted);
    random.draw(&said.process_id);
    random.draw(&said.max_chunk_bytes);
    random.draw(&said.features);
    random.draw(&said.port);
    random.draw(&said.listen_id);
    random.draw(&said.key_id);
    random.draw(&said.comm_id);
    random.draw(&said.nonce);
    said.host_name = std::string(static_cast<std::size_t>(round % 100), 'n');
    encode_hello(said, bytes.data());
    for (std::size_t count = 0; count <= kHelloBytes; ++count) CHECK(is_hello_prefix(bytes.data(), count));
    decode_hello(bytes.data(), &hello);
    CHECK(hello.stream_index == said.stream_index && hello.streams_wanted == said.streams_wanted);
    CHECK(hello.process_id == said.process_id && hello.max_chunk_bytes == said.max_chunk_bytes);
    CHECK(hello.features == said.features && hello.port == said.port && hello.nonce == said.nonce);
    CHECK(hello.listen_id == said.listen_id && hello.comm_id == said.comm_id && hello.key_id == said.key_id);
    CHECK_EQ(hello.host_name, said.host_name.substr(0, 47));

    Reply answered;
    answered.verdict = static_cast<HandshakeVerdict>(round % 4);
    random.draw(&answered.streams);
    random.draw(&answered.process_id);
    random.draw(&answered.max_chunk_bytes);
    random.draw(&answered.features);
    answered.addresses.resize(static_cast<std::size_t>(round) % kMaxAddresses);
    for (HandleAddress& address : answered.addresses) {
      random.draw(&address.bytes);
      random.draw(&address.port);
    }
    CHECK_EQ(encode_reply(answered, bytes.data()), kReplyBytes + answered.addresses.size() * kAddressBytes);
    CHECK_OK(decode_reply(bytes.data(), &reply));
    CHECK(reply.verdict == answered.verdict && reply.streams == answered.streams);
    CHECK(reply.process_id == answered.process_id && reply.max_chunk_bytes == answered.max_chunk_bytes);
    CHECK_EQ(reply.features, answered.features);
    const auto addresses = decode_addresses(bytes.data() + kReplyBytes, answered.addresses.size());
    for (std::size_t i = 0; i < addresses.size(); ++i) {
      CHECK(addresses[i].bytes == answered.addresses[i].bytes && addresses[i].port == answered.addresses[i].port);
    }
  }
}

TEST_CASE(further_addresses_of_a_handle) {
  ConnectHandle handle;
  handle.further = {{{10, 0, 1, 2}, 0x1234}, {{10, 0, 2, 2}, 0x5678}};
  std::array<std::uint8_t, kConnectHandleBytes> bytes;
  encode_connect_handle(handle, bytes.data());
  const std::uint8_t expected[] = {2, 0, 0, 0, 10, 0, 1, 2, 0x34, 0x12, 10, 0, 2, 2, 0x78, 0x56, 0, 0};
  CHECK(std::memcmp(bytes.data() + 88, expected, sizeof expected) == 0);
  // As earlier versions write it.
  std::fill(bytes.begin() + 88, bytes.end(), std::uint8_t{0});
  CHECK_OK(decode_connect_handle(bytes.data(), &handle));
  CHECK(handle.further.empty());
  // More than fit are not written, and more than there can be are not believed.
  for (const int family : {4, 6}) {
    handle.address_family = static_cast<std::uint8_t>(family);
    handle.further.assign(9, {});
    encode_connect_handle(handle, bytes.data());
    CHECK_OK(decode_connect_handle(bytes.data(), &handle));
    CHECK_EQ(handle.further.size(), std::size_t{family == 4 ? 6u : 2u});
    bytes[88] = 15;
    CHECK_OK(decode_connect_handle(bytes.data(), &handle));
    CHECK_EQ(handle.addresses(), kMaxAddresses);
    bytes[88] = 16;
    CHECK(decode_connect_handle(bytes.data(), &handle).code() == StatusCode::kRemoteError);
    bytes[88] = 255;
    CHECK(decode_connect_handle(bytes.data(), &handle).code() == StatusCode::kRemoteError);
  }
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
  for (int flags = 4; flags <= 0xff; ++flags) {
    bytes[1] = static_cast<std::uint8_t>(flags);
    CHECK(decode_frame_header(bytes, &decoded).code() == StatusCode::kRemoteError);
  }
}

TEST_CASE(acknowledgement_bytes) {
  std::uint8_t bytes[kAcknowledgementBytes];
  std::memset(bytes, 0xee, sizeof bytes);
  encode_acknowledgement({0x0102030405060708, true, 0x090a}, bytes);
  const std::uint8_t expected[kAcknowledgementBytes] = {2, 1, 10, 9, 0, 0, 0, 0, 8, 7, 6, 5, 4, 3, 2, 1};
  CHECK(std::memcmp(bytes, expected, sizeof bytes) == 0);
  for (const std::uint64_t chunks : {std::uint64_t{0}, std::uint64_t{65536}, ~std::uint64_t{0}}) {
    for (const bool is_last : {false, true}) {
      const auto port = static_cast<std::uint16_t>(chunks);
      encode_acknowledgement({chunks, is_last, port}, bytes);
      Acknowledgement decoded{1, !is_last, 77};
      CHECK_OK(decode_acknowledgement(bytes, &decoded));
      CHECK_EQ(decoded.lost_port, port);
      CHECK_EQ(decoded.chunks, chunks);
      CHECK_EQ(decoded.is_last, is_last);
    }
  }
}

TEST_CASE(what_is_no_acknowledgement_is_refused) {
  std::uint8_t bytes[kAcknowledgementBytes];
  encode_acknowledgement({77, false, 0}, bytes);
  for (const std::size_t position : {0, 1, 4, 5, 6, 7}) {  // not the port
    for (int bit = 0; bit < 8; ++bit) {
      if (position == 1 && bit == 0) continue;  // the last one
      std::uint8_t changed[kAcknowledgementBytes];
      std::memcpy(changed, bytes, sizeof changed);
      changed[position] ^= static_cast<std::uint8_t>(1 << bit);
      Acknowledgement received{5, false, 0};
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

TEST_CASE(handle_of_another_network_names_the_remedy) {
  std::vector<std::uint8_t> bytes(kConnectHandleBytes, 2);
  ConnectHandle handle;
  const Status status = decode_connect_handle(bytes.data(), &handle);
  CHECK(status.code() == StatusCode::kRemoteError);
  CHECK(status.message().find("ENABLE_BAGUA_NET=1") != std::string::npos);
}

TEST_CASE(handle_with_an_address_of_another_family_is_refused) {
  std::array<std::uint8_t, kConnectHandleBytes> bytes;
  for (const int family : {0, 5, 7}) {
    ConnectHandle handle;
    handle.address_family = static_cast<std::uint8_t>(family);
    encode_connect_handle(handle, bytes.data());
    CHECK(decode_connect_handle(bytes.data(), &handle).code() == StatusCode::kRemoteError);
  }
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
  hello.key_id = {0x71, 0x72, 0x73, 0x74, 0x75, 0x76, 0x77, 0x78};
  std::vector<std::uint8_t> expected = {
      'B',  'N',  'H',  'E',  'L',  'L',  'O',  '1',  4,    0,    0,    0,    0,    0,    0,    0,     // to the version
      0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18, 0x19, 0x1a, 0x1b, 0x1c, 0x1d, 0x1e, 0x1f,  // listen id
      0x71, 0x72, 0x73, 0x74, 0x75, 0x76, 0x77, 0x78,                                                  // key id
      2,    1,    4,    3,    0,    0,    0,    0,                                                     // to the port
      0x20, 0x21, 0x22, 0x23, 0x24, 0x25, 0x26, 0x27, 0x28, 0x29, 0x2a, 0x2b, 0x2c, 0x2d, 0x2e, 0x2f,  // comm id
      0x38, 0x37, 0x36, 0x35, 0x34, 0x33, 0x32, 0x31, 0x44, 0x43, 0x42, 0x41, 0x54, 0x53, 0x52, 0x51,  // to features
      'n',  'o',  'd',  'e'};
  expected.resize(128);
  for (std::uint8_t i = 0; i < 16; ++i) {
    hello.nonce[i] = static_cast<std::uint8_t>(0x60 + i);
    expected.push_back(hello.nonce[i]);
  }
  std::vector<std::uint8_t> bytes(kHelloBytes, 0xee);
  encode_hello(hello, bytes.data());
  CHECK(bytes == expected);
  CHECK_EQ(hello_version(bytes.data()), kProtocolVersion);
}

TEST_CASE(reply_bytes) {
  Reply reply;
  reply.verdict = HandshakeVerdict::kUnknownStream;
  reply.streams = 0x0102;
  reply.process_id = 0x3132333435363738;
  reply.max_chunk_bytes = 0x41424344;
  reply.features = 0x51525354;
  const std::vector<std::uint8_t> expected = {'B',  'N',  'R',  'E',  'P',  'L',  'Y',  '1',  4,    0,    3,
                                              0,    2,    1,    0,    0,    0x38, 0x37, 0x36, 0x35, 0x34, 0x33,
                                              0x32, 0x31, 0x44, 0x43, 0x42, 0x41, 0x54, 0x53, 0x52, 0x51};
  std::vector<std::uint8_t> bytes(kReplyBytes, 0xee);
  encode_reply(reply, bytes.data());
  CHECK(bytes == expected);
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

TEST_CASE(what_begins_otherwise_is_no_hello_and_no_reply) {
  std::array<std::uint8_t, kHelloBytes> bytes;
  encode_hello({}, bytes.data());
  for (const std::size_t position : {std::size_t{0}, std::size_t{7}}) {
    bytes[position] ^= 1;
    CHECK(!is_hello_prefix(bytes.data(), position + 1));
    bytes[position] ^= 1;
  }
  Reply reply;
  encode_reply({}, bytes.data());
  bytes[0] = 'H';
  CHECK(decode_reply(bytes.data(), &reply).code() == StatusCode::kRemoteError);
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

// --- proofs

namespace {

std::string hex(const HandshakeProof& proof) {
  static const char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::uint8_t byte : proof) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

std::string hmac(const std::vector<std::uint8_t>& key, const std::string& data) {
  return hex(HmacSha256(key.data(), key.size()).add(data.data(), data.size()).finish());
}

}  // namespace

// RFC 4231, test cases 1, 2, 3, 6 and 7: short and long keys and data.
TEST_CASE(the_algorithm_gives_the_published_results) {
  CHECK_EQ(hmac(std::vector<std::uint8_t>(20, 0x0b), "Hi There"),
           "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK_EQ(hmac({'J', 'e', 'f', 'e'}, "what do ya want for nothing?"),
           "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK_EQ(hmac(std::vector<std::uint8_t>(20, 0xaa), std::string(50, '\xdd')),
           "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  CHECK_EQ(hmac(std::vector<std::uint8_t>(131, 0xaa), "Test Using Larger Than Block-Size Key - Hash Key First"),
           "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  CHECK_EQ(hmac(std::vector<std::uint8_t>(131, 0xaa),
                "This is a test using a larger than block-size key and a larger than block-size data. The key needs to "
                "be hashed before being used by the HMAC algorithm."),
           "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST_CASE(a_proof_is_about_every_byte_that_was_said) {
  HandshakeKey key{1};
  std::array<std::uint8_t, kHelloBytes> hello{2};
  std::array<std::uint8_t, kChallengeBytes> challenge{3};
  std::array<std::uint8_t, kReplyBytes + 3 * kAddressBytes> reply{4};  // with addresses
  const HandshakeProof connectors = connector_proof(key, hello.data(), challenge.data());
  const HandshakeProof listeners = listener_proof(key, hello.data(), challenge.data(), reply.data(), reply.size());
  const auto check_changed = [&](std::uint8_t* byte, bool of_reply) {
    *byte ^= 0x80;
    CHECK(of_reply == (connector_proof(key, hello.data(), challenge.data()) == connectors));
    CHECK(listener_proof(key, hello.data(), challenge.data(), reply.data(), reply.size()) != listeners);
    *byte ^= 0x80;
  };
  for (std::uint8_t& byte : key) check_changed(&byte, false);
  for (std::uint8_t& byte : hello) check_changed(&byte, false);
  for (std::uint8_t& byte : challenge) check_changed(&byte, false);
  for (std::uint8_t& byte : reply) check_changed(&byte, true);
}

TEST_CASE(a_proof_differs_in_any_bit) {
  const std::uint8_t key = 1;
  const HandshakeProof proof = HmacSha256(&key, 1).add(&key, 1).finish();
  CHECK(is_same_mac(proof, proof.data()));
  for (std::size_t bit = 0; bit < 8 * kProofBytes; ++bit) {
    HandshakeProof changed = proof;
    changed[bit / 8] ^= static_cast<std::uint8_t>(1 << (bit % 8));
    CHECK(!is_same_mac(proof, changed.data()));
  }
}

}  // namespace bagua_net

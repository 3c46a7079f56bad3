// BAGUA_NET_CHECKSUM: data that is damaged on its way is noticed and sent again, whatever part of the stream it is; and
// where nothing else arrives, the comm fails and says so. Damage while connections are cut: abi_fault_test.cc.
#include <unistd.h>

#include <array>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "config/plugin_config.h"
#include "support/check.h"
#include "support/context_pair.h"
#include "support/kept_log.h"
#include "transport/faults/fault_injector.h"
#include "wire/frames.h"

namespace bagua_net {
namespace {

PluginConfig config_with(const std::string& plan, int workers, bool checksum) {
  PluginConfig config;
  if (!plan.empty()) CHECK_EQ(parse_fault_plan(plan, &config.faults), "");
  config.recovery = Recovery::kOn;
  config.workers = workers;
  config.streams = 3;
  config.checksum = checksum;
  return config;
}

std::uint64_t flips(const std::unique_ptr<TransportContext>& context) {
  return context->faults() == nullptr ? 0 : context->faults()->counts().flips.load();
}

}  // namespace

TEST_CASE(checksums_of_headers) {
  std::array<std::uint8_t, kFrameHeaderBytes + kFrameChecksumBytes> bytes{};
  FrameHeader header;
  header.payload_bytes = 9;
  header.message_bytes = 100;
  header.message_number = 7;
  encode_frame_header(header, bytes.data());
  append_frame_checksums(0xe3069283, bytes.data());
  std::uint32_t payload_checksum = 0;
  CHECK_OK(check_frame_checksums(bytes.data(), &payload_checksum));
  CHECK_EQ(payload_checksum, 0xe3069283);
  CHECK_EQ(int{bytes[32]}, 0x83);
  for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] ^= static_cast<std::uint8_t>(1u << bit % 8);
    CHECK(check_frame_checksums(bytes.data(), &payload_checksum).code() == StatusCode::kDamagedData);
    bytes[bit / 8] ^= static_cast<std::uint8_t>(1u << bit % 8);
  }
}

TEST_CASE(checksums_of_acknowledgements) {
  for (const bool is_last : {false, true}) {
    std::array<std::uint8_t, kAcknowledgementBytes> bytes{};
    encode_acknowledgement({300, is_last}, bytes.data(), true);
    Acknowledgement decoded;
    CHECK_OK(decode_acknowledgement(bytes.data(), &decoded, true));
    CHECK_EQ(decoded.chunks, std::uint64_t{300});
    CHECK_EQ(decoded.is_last, is_last);
    for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
      bytes[bit / 8] ^= static_cast<std::uint8_t>(1u << bit % 8);
      CHECK(decode_acknowledgement(bytes.data(), &decoded, true).code() == StatusCode::kDamagedData);
      bytes[bit / 8] ^= static_cast<std::uint8_t>(1u << bit % 8);
    }
  }
}

TEST_CASE(damage_reaches_the_application_without_checksums) {
  ContextPair pair(config_with("flip=1e-5", 0, false), config_with("", 0, false));
  bool is_right = true;
  CHECK_OK(pair.transfer(make_message(0, 1u << 20), &is_right));
  CHECK(!is_right);
}

// One end asks, the other follows.
TEST_CASE(damaged_data_is_sent_again) {
  for (const int workers : {0, 2}) {
    for (const bool sender_asks : {true, false}) {
      ContextPair pair(config_with("seed=1,flip=1e-6", workers, sender_asks),
                       config_with("seed=2,flip=1e-6", workers, !sender_asks));
      pair.transfer_until([&] { return flips(pair.sending) >= 10 && flips(pair.receiving) >= 10; });
    }
  }
}

// Headers and acknowledgements are a third of what is moved here.
TEST_CASE(damaged_headers_and_acknowledgements_are_sent_again) {
  for (const int workers : {0, 2}) {
    ContextPair pair(config_with("seed=3,flip=1e-4", workers, true), config_with("seed=4,flip=1e-4", workers, true));
    std::size_t number = 0;
    while (flips(pair.sending) < 10 || flips(pair.receiving) < 10) {
      bool is_right = false;
      CHECK_OK(pair.transfer(make_message(number++, 100), &is_right));
      CHECK(is_right);
    }
  }
}

// The send is done as soon as it is written.
TEST_CASE(damage_before_the_sender_closes_is_sent_again) {
  for (const int workers : {0, 2}) {
    std::uint64_t damaged = 0;
    for (std::uint64_t seed = 0; seed < fault_count(6); ++seed) {
      // Every second message of this size, on average.
      ContextPair pair(config_with("flip=5e-4,seed=" + std::to_string(seed), workers, true),
                       config_with("", workers, true));
      const std::vector<std::uint8_t> message = make_message(seed, 1300);
      std::vector<std::uint8_t> rooms[3] = {message, message, message};
      for (std::vector<std::uint8_t>& room : rooms) room.assign(room.size(), 0);
      Request* receives[3];
      for (int i = 0; i < 3; ++i) receives[i] = pair.receive(rooms[i]);
      for (int i = 0; i < 3; ++i) CHECK_OK(outcome(pair.send(message)));
      damaged += flips(pair.sending);
      std::thread closing([&] { pair.close_sender(); });
      Status status;
      for (Request* receive : receives) {
        if (status.is_ok()) status = outcome(receive);
      }
      closing.join();
      CHECK_OK(status);
      for (const std::vector<std::uint8_t>& room : rooms) CHECK(room == message);
      pair.close_receiver();
    }
    CHECK(damaged > fault_count(6));
  }
}

TEST_CASE(damage_is_reported) {
  const KeptLog log;
  {
    ContextPair pair(config_with("flip=1e-6", 0, true), config_with("", 0, true));
    pair.transfer_until([] { return KeptLog::has("arrived damaged"); });
  }
  for (const char* part :
       {"Bagua-Net: a connection from 127.0.0.1:", " was lost (data stream ", " of them for damaged data"})
    CHECK(KeptLog::has(part));
}

TEST_CASE(without_recovery_damage_is_an_error) {
  PluginConfig config = config_with("flip=1e-5", 0, true);
  config.recovery = Recovery::kOff;
  ContextPair pair(config, config_with("", 0, true));
  bool is_right = true;
  const Status status = pair.transfer(make_message(5, 1u << 20), &is_right);
  // Whichever end is asked first.
  CHECK(status.code() == StatusCode::kDamagedData || status.code() == StatusCode::kRemoteError);
  check_contains(status.message(), "connection to 127.0.0.1:");
}

TEST_CASE(where_nothing_arrives_intact_the_comm_fails) {
  for (const int workers : {0, 2}) {
    ContextPair pair(config_with("", workers, true), config_with("flip=1e-3", workers, true));
    std::vector<std::uint8_t> room(1u << 20);
    const std::vector<std::uint8_t> message = make_message(0, room.size());
    Request* const receive = pair.receive(room);
    Request* const send = pair.send(message);
    Status status;
    const Deadline deadline;
    while (status.is_ok()) {
      deadline.check("the failure");
      bool done = false;
      std::size_t bytes = 0;
      [[maybe_unused]] const Status of_sender = send->test(&done, &bytes);
      status = receive->test(&done, &bytes);
      ::usleep(50);
    }
    CHECK(status.code() == StatusCode::kDamagedData);
    check_contains(status.message(), "bytes of message 0 arrived damaged, and so did every other one: 32 in a row");
    check_contains(status.message(), "connection to 127.0.0.1:");
    pair.close_sender();
    pair.close_receiver();
  }
}

}  // namespace bagua_net

#include "bench/channel_connection.h"

#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <thread>

#include "base/monotonic_clock.h"
#include "bench/driver_protocol.h"

namespace bagua_net::bench {
namespace {

std::string to_hex(const RingTransport::Handle& handle) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::uint8_t byte : handle) {
    text.push_back(kDigits[byte >> 4]);
    text.push_back(kDigits[byte & 15]);
  }
  return text;
}

Status from_hex(const std::string& text, RingTransport::Handle* handle) {
  const auto digit = [](char character) {
    if (character >= '0' && character <= '9') return character - '0';
    if (character >= 'a' && character <= 'f') return character - 'a' + 10;
    return -1;
  };
  handle->clear();
  for (std::size_t i = 0; i + 1 < text.size(); i += 2) {
    const int high = digit(text[i]);
    const int low = digit(text[i + 1]);
    if (high < 0 || low < 0) break;
    handle->push_back(static_cast<std::uint8_t>(high * 16 + low));
  }
  if (handle->size() * 2 == text.size()) return Status::ok();
  return Status::invalid_argument("handle \"" + text + "\" is not made of pairs of lower-case hexadecimal digits");
}

}  // namespace

Status listen_on_channels(const std::string& transport_name, RingTransport* transport, JsonLine* answer) {
  std::vector<RingTransport::Handle> handles;
  BAGUA_NET_RETURN_IF_ERROR(transport->listen(&handles));
  std::vector<std::string> texts;
  texts.reserve(handles.size());
  for (const RingTransport::Handle& handle : handles) texts.push_back(to_hex(handle));

  answer->add("handles", texts).add("transport", transport_name);
  if (transport->table_name().empty()) {
    answer->add_null("table");
  } else {
    answer->add("table", transport->table_name());
  }
  answer->add("net_name", transport->net_name())
      .add("devices", transport->device_names())
      .add("pid", static_cast<std::int64_t>(getpid()));
  return Status::ok();
}

Status connect_channels(const std::vector<std::string>& words, int channel_count, std::int64_t timeout_ms,
                        const std::string& neighbours, RingTransport* transport) {
  const auto channels = static_cast<std::size_t>(channel_count);
  BAGUA_NET_RETURN_IF_ERROR(
      expect_arguments(words, channels, "connect HANDLE... (" + std::to_string(channels) + ", one per channel)"));
  std::vector<RingTransport::Handle> handles(channels);
  for (std::size_t i = 0; i < channels; ++i) BAGUA_NET_RETURN_IF_ERROR(from_hex(words[i + 1], &handles[i]));

  // Both directions at once, as NCCL: a rank that waits for one before it starts the other would stop the ring.
  std::vector<bool> connected(channels, false);
  std::vector<bool> accepted(channels, false);
  std::size_t missing = 2 * channels;
  const std::int64_t deadline = monotonic_ms() + timeout_ms;
  while (missing > 0) {
    for (std::size_t i = 0; i < channels; ++i) {
      bool is_done = false;
      if (!connected[i]) {
        BAGUA_NET_RETURN_IF_ERROR(transport->connect(static_cast<int>(i), &handles[i], &is_done));
        connected[i] = is_done;
        missing -= is_done ? 1 : 0;
      }
      if (!accepted[i]) {
        BAGUA_NET_RETURN_IF_ERROR(transport->accept(static_cast<int>(i), &is_done));
        accepted[i] = is_done;
        missing -= is_done ? 1 : 0;
      }
    }
    if (missing == 0) break;
    if (monotonic_ms() > deadline) {
      std::string open;
      for (std::size_t i = 0; i < channels; ++i) {
        if (!connected[i]) open += " send " + std::to_string(i);
        if (!accepted[i]) open += " receive " + std::to_string(i);
      }
      return Status::remote_error("the ring is not connected after " + std::to_string(timeout_ms) + " ms at " +
                                  neighbours + "; missing channels:" + open +
                                  ": see whether those ranks run and their addresses can be reached, or raise "
                                  "--timeout-ms");
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return Status::ok();
}

}  // namespace bagua_net::bench

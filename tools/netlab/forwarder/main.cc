// netlab's forwarder: wires with a delay. Each wire joins two TAP devices, whose descriptors netlab opened and passed
// on; two threads a wire, one for each direction. See docs/how-to/emulate-networks.md.
//
//   forwarder FIRST:SECOND:DELAY_NS:RING_BYTES...      (descriptors, decimal)
//
// Prints "ready", then for every line on its standard input a line of JSON: a list with the counters of each direction,
// wires in order, first to second before second to first. Ends at the end of its standard input, so that it cannot
// outlive who holds the other end; the devices vanish with the last descriptor.
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <charconv>
#include <cinttypes>
#include <cstdio>
#include <exception>
#include <memory>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

#include "delay_line.h"

namespace {

using netlab::Counters;
using netlab::DelayLine;

struct Wire {
  int first = -1;
  int second = -1;
  std::int64_t delay_ns = 0;
  std::int64_t ring_bytes = 0;
};

// One number of `text`, which ends with `separator`; what follows is left in `text`.
template <typename Number>
bool parse_number(std::string_view& text, char separator, Number& number) {
  const std::from_chars_result found = std::from_chars(text.data(), text.data() + text.size(), number);
  const auto length = static_cast<std::size_t>(found.ptr - text.data());
  const bool ends_well = separator == '\0' ? length == text.size() : length < text.size() && text[length] == separator;
  if (found.ec != std::errc() || number < 0 || !ends_well) {
    return false;
  }
  text.remove_prefix(separator == '\0' ? length : length + 1);
  return true;
}

bool parse_wire(std::string_view text, Wire& wire) {
  return parse_number(text, ':', wire.first) && parse_number(text, ':', wire.second) &&
         parse_number(text, ':', wire.delay_ns) && parse_number(text, '\0', wire.ring_bytes);
}

// A network does not wait for the machine's programs. Real-time priority is not given everywhere; then as much of a
// processor as there is to get. A timer may not be late by the 50 us that Linux allows itself to save wake-ups.
void hurry() {
  prctl(PR_SET_TIMERSLACK, 1UL);
  sched_param priority{};
  priority.sched_priority = 1;
  if (sched_setscheduler(0, SCHED_RR, &priority) != 0) {
    setpriority(PRIO_PROCESS, 0, -20);
  }
}

void print_counters(const std::vector<std::unique_ptr<DelayLine>>& lines) {
  const char* separator = "[";
  for (const auto& line : lines) {
    const Counters counted = line->counters();
    std::printf("%s{\"packets\": %" PRIu64 ", \"bytes\": %" PRIu64 ", \"refused\": %" PRIu64 ", \"full\": %" PRIu64
                ", \"late_ns\": %" PRIu64 ", \"latest_ns\": %" PRIu64 "}",
                separator, counted.packets, counted.bytes, counted.refused, counted.full, counted.late_ns,
                counted.latest_ns);
    separator = ", ";
  }
  std::printf("]\n");
  std::fflush(stdout);
}

int run(int count, char** arguments) {
  const int stop_event = eventfd(0, EFD_CLOEXEC);
  if (stop_event < 0) {
    std::perror("netlab forwarder: eventfd");
    return 1;
  }
  std::vector<std::unique_ptr<DelayLine>> lines;
  for (int number = 1; number < count; ++number) {
    Wire wire;
    if (!parse_wire(arguments[number], wire)) {
      std::fprintf(stderr, "netlab forwarder: '%s' is not FIRST:SECOND:DELAY_NS:RING_BYTES\n", arguments[number]);
      return 2;
    }
    const auto add = [&](int source, int target) {
      lines.push_back(std::make_unique<DelayLine>(source, target, stop_event, wire.delay_ns,
                                                  static_cast<std::size_t>(wire.ring_bytes)));
    };
    add(wire.first, wire.second);
    add(wire.second, wire.first);
  }
  std::vector<std::thread> threads;
  threads.reserve(lines.size());
  for (const auto& line : lines) {
    threads.emplace_back([delay_line = line.get()] {
      hurry();
      delay_line->run();
    });
  }
  std::printf("ready\n");
  std::fflush(stdout);
  for (int byte = std::getchar(); byte != EOF; byte = std::getchar()) {
    if (byte == '\n') {
      print_counters(lines);
    }
  }
  eventfd_write(stop_event, 1);
  for (std::thread& thread : threads) {
    thread.join();
  }
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  try {
    return run(count, arguments);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "netlab forwarder: %s\n", error.what());
    return 1;
  }
}

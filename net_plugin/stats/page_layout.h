// The statistics page of a process: what it looks like to whoever reads it from outside (bagua/net/stats/layout.py,
// which has the same numbers). A change of anything here is a new kPageVersion.
//
//   offset                         bytes
//   0                              sizeof(PageHeader)                  the process
//   kCommsOffset                   kCommSlots x sizeof(CommSlot)       comms
//   kStreamsOffset                 kStreamSlots x sizeof(StreamSlot)   their data streams
//
// [Note: how a reader gets a consistent page] Counters are single 64-bit words of one writer each, read and written
// relaxed: a reader sees each of them at some recent moment, which is all that a rate needs. What must fit together
// (which slots are in use, names, the totals of closed comms) changes only while `generation` is odd. A reader copies
// the page, and copies it again if the generation was odd or has changed meanwhile.
//
// Slots that were never used are holes in the file: they take no memory.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace bagua_net {

// One writer at a time: adding needs no locked instruction, which would cost more than all else that counting does.
class Counter {
 public:
  void add(std::uint64_t amount) { set(get() + amount); }
  void set(std::uint64_t value) { value_.store(value, std::memory_order_relaxed); }
  std::uint64_t get() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> value_{0};
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && sizeof(Counter) == 8);

using Word = std::atomic<std::uint32_t>;
static_assert(Word::is_always_lock_free && sizeof(Word) == 4);

constexpr char kPageMagic[8] = {'B', 'A', 'G', 'U', 'A', 'N', 'E', 'T'};
constexpr std::uint32_t kPageVersion = 4;
constexpr std::size_t kCommSlots = 2048;
constexpr std::size_t kStreamSlots = 8192;
constexpr std::size_t kRequestSlots = 64;  // of a comm
constexpr std::size_t kNicSlots = 16;      // NCCL uses at most 16 interfaces

// Messages by size: up to 256 B, 1 KiB, 4 KiB and so on by four up to 4 MiB, and larger.
constexpr std::size_t kSizeClasses = 9;

// Written by the thread that calls the comm, under the comm's mutex.
struct CommCounters {
  Counter inline_messages;  // sent by the calling thread
  Counter inline_bytes;
  Counter striped_messages;  // sent by workers
  Counter striped_bytes;
  Counter received_messages;
  Counter received_bytes;
  std::array<Counter, kSizeClasses> sizes;  // messages sent or received
  Counter handed_to_awake;                  // hand-over: messages given to workers that were awake,
  Counter handed_to_asleep;                 // and to such as had to wake for it
  Counter kept_from_asleep;                 // large enough for workers, which slept: the calling thread sent it
  Counter wake_ups;                         // wake-up: workers that were woken for what may follow
  Counter streams_joined;                   // after the comm began
  Counter streams_lost;
};

// Written by the driver of the stream.
struct StreamCounters {
  Counter bytes;  // with headers
  Counter chunks;
  Counter zero_copy_bytes;
  Counter full;            // send: times that the socket had no room
  Counter deferred;        // send, rate: chunks left to a stream that delivers them sooner
  Counter worker_waits;    // send: messages that found the stream idle, and how long they waited for its worker
  Counter worker_wait_ns;  //
  Counter parked;          // receive: times that a chunk came before its receive was posted, and how long it waited
  Counter parked_ns;       //
  Counter checksum_errors;
  Counter resent_chunks;
  // Of the kernel (TCP_INFO), sums since the connection was opened.
  Counter retransmits;       // segments
  Counter busy_us;           // while data was under way or waited to go out; of this:
  Counter peer_window_us;    // the peer did not read,
  Counter socket_buffer_us;  // the socket's buffer was too small
};

enum class CommState : std::uint32_t { kFree = 0, kOpen = 1, kFailed = 2 };
enum class CommDirection : std::uint32_t { kSend = 0, kReceive = 1 };
enum class SlotState : std::uint32_t { kFree = 0, kLive = 1, kParked = 2, kEnded = 3, kLost = 4 };

struct alignas(64) CommSlot {
  Word state;  // CommState
  Word direction;
  Word same_host;
  Word streams_target;  // growth: connections that a comm of this interface should use now; 0: the number is fixed
  Word growth_trials;   // growth, of the interface: trials of more connections,
  Word growth_gains;    // and those that gained
  Counter opened_ms;    // monotonic clock
  char interface[56];   // of the device: "eth0", "eth0#1"; four joined interfaces with long names fit
  char peer[128];       // "10.0.0.2:4711 (host node2, process 4242)"
  CommCounters counters;
  // By request: when it was posted, in milliseconds of the monotonic clock modulo 2^32; 0: not outstanding.
  std::array<Word, kRequestSlots> posted_ms;
};

struct alignas(64) StreamSlot {
  Word state;  // SlotState
  Word comm;   // index of its slot
  Word index;  // in the comm
  Word nic;    // 1 + its index in PageHeader::nics; 0: none, as within a host
  StreamCounters counters;
  // Of the kernel, when it was asked last.
  Counter sampled_ms;  // monotonic clock; 0: never
  Counter round_trip_us;
  Counter least_round_trip_us;
  Counter estimated_bytes_per_s;  // that the stream can deliver; 0: unknown
  Counter bytes_over_other_nics;  // of its bytes: before it was replaced over this NIC
};

// A network interface in use.
struct alignas(64) NicSlot {
  Word state;         // LinkState; 0: not known, because nothing watches it
  Word speed_mbps;    // 0: unknown
  Word downs;         // times that it became unusable
  Word streams_lost;  // connections over it
  Counter since_ms;   // monotonic clock: of its state; 0: from the beginning
  // Of streams that are closed, or were replaced over another NIC.
  Counter closed_sent_bytes;
  Counter closed_received_bytes;
  char name[24];  // empty: the slot is free
};

struct alignas(64) PageHeader {
  char magic[8];
  std::uint32_t version;
  std::uint32_t header_bytes;
  std::uint32_t comm_slots;
  std::uint32_t comm_bytes;
  std::uint32_t stream_slots;
  std::uint32_t stream_bytes;
  std::int64_t pid;  // as the process itself sees it
  std::int64_t started_unix_ms;
  std::int64_t started_ms;  // monotonic clock
  std::int32_t rank;        // -1: no launcher says
  std::int32_t local_rank;
  std::int32_t world_size;
  std::uint32_t workers;
  char plugin_version[64];
  char host[64];

  Counter generation;
  Word comms_used;  // slots from this on were never used
  Word streams_used;
  Counter comms_opened;
  Counter comms_hidden;  // open now and without a slot: their counts appear when they are closed
  Counter comms_failed;
  Counter last_failure_ms;  // monotonic clock
  char last_failure[256];
  // Of comms and streams that are closed.
  CommCounters closed_comms;
  StreamCounters closed_streams;
  std::array<NicSlot, kNicSlots> nics;
};

constexpr std::size_t kCommsOffset = sizeof(PageHeader);
constexpr std::size_t kStreamsOffset = kCommsOffset + kCommSlots * sizeof(CommSlot);
constexpr std::size_t kPageBytes = kStreamsOffset + kStreamSlots * sizeof(StreamSlot);

static_assert(offsetof(PageHeader, generation) == 200 && offsetof(PageHeader, closed_comms) == 504 &&
              offsetof(PageHeader, closed_streams) == 672 && offsetof(PageHeader, nics) == 832 &&
              sizeof(PageHeader) == 1856);
static_assert(offsetof(CommSlot, counters) == 216 && offsetof(CommSlot, posted_ms) == 384 && sizeof(CommSlot) == 640);
static_assert(offsetof(StreamSlot, counters) == 16 && offsetof(StreamSlot, sampled_ms) == 136 &&
              sizeof(StreamSlot) == 192);
static_assert(offsetof(NicSlot, since_ms) == 16 && offsetof(NicSlot, name) == 40 && sizeof(NicSlot) == 64);

}  // namespace bagua_net

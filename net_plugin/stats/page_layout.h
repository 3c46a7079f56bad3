// The statistics page of a process: what it looks like to whoever reads it from outside (bagua/net/stats/layout.py). A
// change of anything here is a new kPageVersion.
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
using SizeCounters = std::array<Counter, kSizeClasses>;

// Every counter once, in the order of the page: type, name, the metric of `bagua-net exporter` that it is, with a label
// where several counters are one metric ("": it is none), and what it counts, which is the metric's help. Python has
// this table from bagua.net._core. In JSON a counter has the same name; there, times are in seconds.
//
// Written by the thread that calls the comm, under the comm's mutex. Workers that a message is handed to are awake or
// asleep; while they sleep, the calling thread may send it itself (kept), and wake them for what may follow.
#define BAGUA_NET_COMM_COUNTERS(ROW)                                                                               \
  ROW(Counter, inline_messages, "sent_messages path=inline", "Messages sent.")                                     \
  ROW(Counter, inline_bytes, "sent_bytes path=inline", "Bytes of messages sent.")                                  \
  ROW(Counter, striped_messages, "sent_messages path=striped", "Messages sent by workers.")                        \
  ROW(Counter, striped_bytes, "sent_bytes path=striped", "Bytes of messages sent by workers.")                     \
  ROW(Counter, received_messages, "received_messages", "Messages received.")                                       \
  ROW(Counter, received_bytes, "received_bytes", "Bytes of messages received.")                                    \
  ROW(SizeCounters, message_sizes, "", "Messages sent or received, by size.")                                      \
  ROW(Counter, handed_to_awake, "decisions decision=handed_to_awake", "Decisions about who sends a message.")      \
  ROW(Counter, handed_to_asleep, "decisions decision=handed_to_asleep", "Messages that had to wake their worker.") \
  ROW(Counter, kept_from_asleep, "decisions decision=kept_from_asleep", "Large messages that the caller sent.")    \
  ROW(Counter, wake_ups, "decisions decision=woken_ahead", "Workers woken for what may follow.")                   \
  ROW(Counter, streams_joined, "streams_joined", "Data streams that joined a comm after its start.")               \
  ROW(Counter, streams_lost, "streams_lost", "Data streams lost.")

// Written by the driver of the stream. The last four are the kernel's (TCP_INFO).
#define BAGUA_NET_STREAM_COUNTERS(ROW)                                                                  \
  ROW(Counter, bytes, "", "Bytes, with headers.")                                                       \
  ROW(Counter, chunks, "", "Chunks.")                                                                   \
  ROW(Counter, zero_copy_bytes, "zero_copy_bytes", "Of the striped bytes, those sent without copying.") \
  ROW(Counter, socket_full, "", "Send: times that the socket had no room.")                             \
  ROW(Counter, deferred_chunks, "deferred_chunks", "Chunks left to a faster stream.")                   \
  ROW(Counter, worker_waits, "", "Send: messages that found the stream idle.")                          \
  ROW(Counter, worker_wait_ns, "", "How long they waited for its worker.")                              \
  ROW(Counter, parked, "", "Receive: times that a chunk came before its receive was posted.")           \
  ROW(Counter, parked_ns, "", "How long such chunks waited.")                                           \
  ROW(Counter, checksum_errors, "checksum_errors", "Chunks with a wrong checksum.")                     \
  ROW(Counter, resent_chunks, "resent_chunks", "Chunks sent again by Bagua-Net.")                       \
  ROW(Counter, retransmits, "retransmitted_segments", "TCP segments sent again.")                       \
  ROW(Counter, busy_us, "", "Time that data was under way or waited to go out; of this:")               \
  ROW(Counter, peer_not_reading_us, "", "the peer's window was closed,")                                \
  ROW(Counter, socket_buffer_us, "", "the socket's buffer was too small.")

#define BAGUA_NET_COUNTER_MEMBER(type, name, metric, help) type name;
struct CommCounters {
  BAGUA_NET_COMM_COUNTERS(BAGUA_NET_COUNTER_MEMBER)
};
struct StreamCounters {
  BAGUA_NET_STREAM_COUNTERS(BAGUA_NET_COUNTER_MEMBER)
};
#undef BAGUA_NET_COUNTER_MEMBER

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

// TraceEvent: one event of the trace, as it lies in the ring: no pointer in it but to constants of ours, so that the
// thread that writes the file never looks at memory of the one that recorded it.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "base/owned_fd.h"
#include "base/status.h"

namespace bagua_net {

class TraceEvent {
 public:
  static constexpr std::size_t kMaxArguments = 11;
  static constexpr std::size_t kNameBytes = 24;
  static constexpr std::size_t kTextBytes = 16;

  struct Argument {
    const char* key;  // a constant
    bool is_text;
    union {
      std::uint64_t number;
      char text[kTextBytes];
    };
  };

  TraceEvent() = default;
  // category: a constant. The name is copied, and cut where it is too long.
  TraceEvent(std::uint32_t track, const char* category, const char* name, std::int64_t begin_ns)
      : track_(track), category_(category), begin_ns_(begin_ns) {
    set_text(name_, name);
  }

  // Without an end it is an instant.
  void set_end(std::int64_t end_ns) {
    duration_ns_ = end_ns - begin_ns_;
    if (duration_ns_ < 0) duration_ns_ = 0;
  }
  void add(const char* key, std::uint64_t number) {
    if (Argument* argument = next(key, false)) argument->number = number;
  }
  // nullptr: there is none.
  void add(const char* key, const char* text) {
    if (text == nullptr) return;
    if (Argument* argument = next(key, true)) set_text(argument->text, text);
  }
  void append_to_name(const char* more) {
    const std::size_t length = std::strlen(name_);
    if (length + 1 < kNameBytes) copy_text(name_ + length, kNameBytes - length, more);
  }
  // The same thing elsewhere, from another time on.
  TraceEvent moved_to(std::uint32_t track, std::int64_t begin_ns) const {
    TraceEvent moved;
    copy_to(&moved);
    moved.track_ = track;
    moved.begin_ns_ = begin_ns;
    return moved;
  }
  // For the ring: what lies behind the arguments in use stays as it is.
  void copy_to(TraceEvent* other) const {
    std::memcpy(static_cast<void*>(other), static_cast<const void*>(this),
                offsetof(TraceEvent, arguments_) + used_ * sizeof(Argument));
  }

  std::uint32_t track() const { return track_; }
  const char* category() const { return category_; }
  const char* name() const { return name_; }
  std::int64_t begin_ns() const { return begin_ns_; }
  bool is_instant() const { return duration_ns_ < 0; }
  std::int64_t duration_ns() const { return duration_ns_; }
  const Argument* begin() const { return arguments_.data(); }
  const Argument* end() const { return arguments_.data() + used_; }

 private:
  static void copy_text(char* to, std::size_t bytes, const char* from) {
    std::size_t length = 0;
    while (length + 1 < bytes && from[length] != '\0') ++length;
    std::memcpy(to, from, length);
    to[length] = '\0';
  }
  template <std::size_t kBytes>
  static void set_text(char (&to)[kBytes], const char* from) {
    copy_text(to, kBytes, from);
  }
  Argument* next(const char* key, bool is_text) {
    if (used_ == kMaxArguments) return nullptr;
    Argument* argument = &arguments_[used_++];
    argument->key = key;
    argument->is_text = is_text;
    return argument;
  }

  std::uint32_t track_ = 0;
  std::uint32_t used_ = 0;
  const char* category_ = "";
  std::int64_t begin_ns_ = 0;  // monotonic
  std::int64_t duration_ns_ = -1;
  char name_[kNameBytes] = "";
  std::array<Argument, kMaxArguments> arguments_;
};

// Trace: what this process writes into its trace file, and the thread that writes it. Owned by the process instance; a
// transport, its comms and NCCL's profiler record into it. A forked child never touches its parent's.
//
// Recording is a copy into a ring, by any thread. What finds no room there, because the disk is slower
// than the job, or once the file has its full size, is dropped and counted. Tracks and notes take a mutex, which
// nobody holds while writing to the file: they come where connections open and close.
//
// The file is written every tenth of a second, so that a process that is killed leaves all but that. If it cannot be
// written any more, one warning says so, the file ends where it was whole, and the job goes on.
//
// Events as lines of a Chrome trace: "Trace Event Format", https://chromium.googlesource.com/catapult (docs), which
// Perfetto and chrome://tracing read. A file is a JSON array of which the end may be missing.
//
// EventRing: the events that wait to be written. Of a fixed size: an event that finds no room is not taken. Any thread
// adds events, one at a time takes them; nobody waits for anybody.
//
// Each cell has a turn: the position of the event that may be put there next, or that position + 1 once it is there.
class EventRing {
 public:
  // size: a power of two.
  explicit EventRing(std::size_t size) : mask_(size - 1), cells_(new Cell[size]) {
    for (std::size_t i = 0; i < size; ++i) cells_[i].turn.store(i, std::memory_order_relaxed);
  }

  // False: it is full.
  bool add(const TraceEvent& event) {
    std::uint64_t position = next_in_.load(std::memory_order_relaxed);
    for (;;) {
      Cell& cell = cells_[position & mask_];
      // Acquire: whoever took the former event has read it.
      const auto ahead = static_cast<std::int64_t>(cell.turn.load(std::memory_order_acquire) - position);
      if (ahead < 0) return false;
      if (ahead > 0) {
        position = next_in_.load(std::memory_order_relaxed);
      } else if (next_in_.compare_exchange_weak(position, position + 1, std::memory_order_relaxed)) {
        event.copy_to(&cell.event);
        cell.turn.store(position + 1, std::memory_order_release);  // with the event
        return true;
      }
    }
  }

  // The next event, until done(); nullptr: none, or it is still being put there. By one thread at a time.
  const TraceEvent* next() const {
    const Cell& cell = cells_[next_out_ & mask_];
    return cell.turn.load(std::memory_order_acquire) == next_out_ + 1 ? &cell.event : nullptr;
  }
  void done() {
    cells_[next_out_ & mask_].turn.store(next_out_ + mask_ + 1, std::memory_order_release);
    ++next_out_;
  }

 private:
  struct Cell {
    std::atomic<std::uint64_t> turn;
    TraceEvent event;
  };

  const std::uint64_t mask_;
  const std::unique_ptr<Cell[]> cells_;
  alignas(64) std::atomic<std::uint64_t> next_in_{0};
  alignas(64) std::uint64_t next_out_ = 0;
};

class EventJson {
 public:
  // base_ns: what the monotonic clock showed where the times of the file begin.
  EventJson(int process_id, std::int64_t base_ns) : process_id_(process_id), base_ns_(base_ns) {}

  // Each appends one line, with a comma at its end.
  void append(const TraceEvent& event, std::string* lines) const;
  void append_note(std::uint32_t track, const std::string& name, const std::string& detail, std::int64_t at_ns,
                   std::string* lines) const;
  // Metadata. `value` is JSON.
  void append_metadata(std::uint32_t track, const char* name, const char* key, const std::string& value,
                       std::string* lines) const;

  // Text from anywhere, also from the network, as a JSON string.
  static std::string quoted(const std::string& text);

 private:
  void begin(char phase, std::uint32_t track, std::string* lines) const;

  const int process_id_;
  const std::int64_t base_ns_;
};

// The name of a process's trace file: each process has one of its own.
struct TraceIdentity {
  int rank = -1;  // in the job; -1: not known
  std::string host;
  int process_id = 0;
};

// %r, %h and %p in `pattern` become rank, host and process id, %% a percent sign. Without %p, rank, host and process id
// are put before the extension: "trace.json" becomes "trace.rank3.node1.4242.json".
std::string trace_path(const std::string& pattern, const TraceIdentity& identity);

struct TraceLimits {
  std::size_t events = 32768;                         // that wait to be written; a power of two: 14 MiB
  std::uint64_t file_bytes = std::uint64_t{1} << 30;  // more than that, no viewer opens
  int period_ms = 100;
};

// What may take so long that the process is killed before it is over, and recorded.
class Watched {
 public:
  virtual ~Watched() = default;
  // Records what has been under way for 1, 2, 4, 8... seconds. By one thread at a time, and until it is removed.
  virtual void tell_of_waiting(std::int64_t now_ns) = 0;
};

class Trace {
 public:
  // pattern: see trace_path().
  static Status open(const std::string& pattern, const TraceIdentity& identity, const TraceLimits& limits,
                     std::unique_ptr<Trace>* trace);
  ~Trace();  // as close()

  // A group of tracks with one name, for things that may overlap; the id of the first. Shown once something is on them.
  enum class TrackKind { kNccl, kNetwork };
  std::uint32_t add_tracks(TrackKind kind, const std::string& name, int count = 1);

  void record(const TraceEvent& event) {
    if (!records_.load(std::memory_order_relaxed)) return;
    if (!ring_.add(event)) dropped_.fetch_add(1, std::memory_order_relaxed);
  }
  void count_dropped() { dropped_.fetch_add(1, std::memory_order_relaxed); }
  // An instant with a text of any length, now. Takes a mutex.
  void note(std::uint32_t track, const std::string& name, const std::string& detail);

  void watch(Watched* watched);
  void unwatch(Watched* watched);
  // By its own thread, once a second.
  void tell_of_waiting(std::int64_t now_ns);

  // Writes what was recorded before.
  void flush();
  // Writes the end; nothing is recorded after that.
  void close();

  const std::string& path() const { return path_; }
  std::uint64_t written_events() const { return written_events_.load(std::memory_order_relaxed); }
  std::uint64_t dropped_events() const { return dropped_.load(std::memory_order_relaxed); }
  bool is_recording() const { return records_.load(std::memory_order_relaxed); }

 private:
  struct Tracks {
    std::uint32_t first;
    std::uint32_t count;
    std::string name;
    std::uint64_t named;  // a bit for each that the file knows
  };

  Trace(std::string path, OwnedFd file, const TraceIdentity& identity, const TraceLimits& limits);
  Status start();
  void run();
  // A name for the track, where the file has none yet.
  void name_track(std::uint32_t id, std::string* lines) REQUIRES(mutex_);
  void write_events() REQUIRES(file_mutex_);
  void tell_of_drops() REQUIRES(file_mutex_);
  bool write_lines() REQUIRES(file_mutex_);
  void stop_recording(const std::string& why) REQUIRES(file_mutex_);
  void append_header(const TraceIdentity& identity) REQUIRES(file_mutex_);

  const std::string path_;
  const TraceLimits limits_;
  EventRing ring_;
  std::atomic<bool> records_{true};
  std::atomic<std::uint64_t> dropped_{0};
  std::atomic<std::uint64_t> written_events_{0};
  OwnedFd wake_;  // tells the thread to end
  std::thread thread_;

  const EventJson json_;

  Mutex watched_mutex_;
  std::vector<Watched*> watched_ GUARDED_BY(watched_mutex_);

  Mutex mutex_;
  std::vector<Tracks> tracks_[2] GUARDED_BY(mutex_);  // by kind, with rising ids
  std::string notes_ GUARDED_BY(mutex_);              // to be written

  Mutex file_mutex_;  // held also to take events out of the ring
  OwnedFd file_ GUARDED_BY(file_mutex_);
  std::string lines_ GUARDED_BY(file_mutex_);  // to be written
  std::uint64_t file_bytes_ GUARDED_BY(file_mutex_) = 0;
  std::uint64_t told_dropped_ GUARDED_BY(file_mutex_) = 0;
};

}  // namespace bagua_net

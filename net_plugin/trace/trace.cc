#include "trace/trace.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cstring>

#include "base/background_thread.h"
#include "base/log_sink.h"
#include "base/monotonic_clock.h"
#include "base/version.h"

namespace bagua_net {
namespace {

template <typename Number>
void append_number(Number number, std::string* lines) {
  char text[24];
  lines->append(text, std::to_chars(text, text + sizeof text, number).ptr);
}

void append_quoted(const char* text, std::size_t length, std::string* lines) {
  *lines += '"';
  for (const char* at = text; at != text + length; ++at) {
    const auto byte = static_cast<unsigned char>(*at);
    if (*at == '"' || *at == '\\') {
      *lines += '\\';
      *lines += *at;
    } else if (byte < 0x20 || byte >= 0x7f) {
      *lines += '?';  // what is not ASCII may not be UTF-8 either
    } else {
      *lines += *at;
    }
  }
  *lines += '"';
}

// Microseconds, exact.
void append_time(const char* key, std::int64_t ns, std::string* lines) {
  *lines += key;
  append_number(ns / 1000, lines);
  const auto rest = static_cast<int>(ns % 1000);
  const char digits[] = {'.', static_cast<char>('0' + rest / 100), static_cast<char>('0' + rest / 10 % 10),
                         static_cast<char>('0' + rest % 10)};
  lines->append(digits, sizeof digits);
}

}  // namespace

std::string EventJson::quoted(const std::string& text) {
  std::string json;
  append_quoted(text.data(), text.size(), &json);
  return json;
}

void EventJson::begin(char phase, std::uint32_t track, std::string* lines) const {
  *lines += R"({"ph":")";
  *lines += phase;
  *lines += R"(","pid":)";
  append_number(process_id_, lines);
  *lines += R"(,"tid":)";
  append_number(track, lines);
}

void EventJson::append(const TraceEvent& event, std::string* lines) const {
  begin(event.is_instant() ? 'i' : 'X', event.track(), lines);
  if (event.is_instant()) *lines += R"(,"s":"t")";
  append_time(R"(,"ts":)", event.begin_ns() - base_ns_, lines);
  if (!event.is_instant()) append_time(R"(,"dur":)", event.duration_ns(), lines);
  *lines += R"(,"cat":")";
  *lines += event.category();
  *lines += R"(","name":)";
  append_quoted(event.name(), std::strlen(event.name()), lines);
  *lines += R"(,"args":{)";
  const char* separator = "\"";
  for (const TraceEvent::Argument& argument : event) {
    *lines += separator;
    *lines += argument.key;
    *lines += "\":";
    if (argument.is_text) {
      append_quoted(argument.text, std::strlen(argument.text), lines);
    } else {
      append_number(argument.number, lines);
    }
    separator = ",\"";
  }
  *lines += "}},\n";
}

void EventJson::append_note(std::uint32_t track, const std::string& name, const std::string& detail, std::int64_t at_ns,
                            std::string* lines) const {
  begin('i', track, lines);
  *lines += R"(,"s":"t")";
  append_time(R"(,"ts":)", at_ns - base_ns_, lines);
  *lines += R"(,"cat":"note","name":)" + quoted(name) + R"(,"args":{"detail":)" + quoted(detail) + "}},\n";
}

void EventJson::append_metadata(std::uint32_t track, const char* name, const char* key, const std::string& value,
                                std::string* lines) const {
  begin('M', track, lines);
  *lines += R"(,"ts":0,"name":")";
  *lines += name;
  *lines += R"(","args":{")";
  *lines += key;
  *lines += "\":" + value + "}},\n";
}

namespace {

// Above the ids of threads (at most 2^22), which are the tracks of torch.profiler's trace of the same process.
constexpr std::uint32_t kFirstTrack[] = {10'000'000, 20'000'000};
constexpr std::uint32_t kProcessTrack = 9'999'999;

// Times in the file count from the last multiple of this since 1970: then they have few enough digits for the
// floating-point numbers of the viewers, and files of several processes go together.
constexpr std::int64_t kBaseNs = std::int64_t{90} * 24 * 3600 * 1'000'000'000;

constexpr std::int64_t kTellOfWaitingNs = 1'000'000'000;

// What is written at once.
constexpr std::size_t kBatchBytes = 1u << 20;

// What the monotonic clock showed at the time that the file counts from. Looked at once: later steps of the wall clock
// would make times go back.
std::int64_t monotonic_base_ns() {
  std::int64_t shortest_ns = 0;
  std::int64_t base_ns = 0;
  for (int i = 0; i < 5; ++i) {
    const std::int64_t before_ns = monotonic_ns();
    const std::int64_t now_ns = unix_ns();
    const std::int64_t took_ns = monotonic_ns() - before_ns;
    if (i > 0 && took_ns >= shortest_ns) continue;
    shortest_ns = took_ns;
    base_ns = before_ns + took_ns / 2 - now_ns % kBaseNs;
  }
  return base_ns;
}

Status cannot_open(const std::string& path, int error_number) {
  return Status::system_error("opening the trace file " + path, error_number);
}

}  // namespace

Status Trace::open(const std::string& pattern, const TraceIdentity& identity, const TraceLimits& limits,
                   std::unique_ptr<Trace>* trace) {
  struct stat facts{};
  if (pattern.empty() || pattern.back() == '/' || (::stat(pattern.c_str(), &facts) == 0 && S_ISDIR(facts.st_mode))) {
    return Status::invalid_usage(pattern + " is a folder");
  }
  const std::string path = trace_path(pattern, identity);
  // A pipe would wait for its reader.
  OwnedFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666));
  if (!file.is_open()) return cannot_open(path, errno);
  if (::fstat(file.get(), &facts) != 0) return cannot_open(path, errno);
  if (!S_ISREG(facts.st_mode)) return Status::invalid_usage(path + " is not a regular file");
  if (::ftruncate(file.get(), 0) != 0) return cannot_open(path, errno);
  std::unique_ptr<Trace> created(new Trace(path, std::move(file), identity, limits));
  BAGUA_NET_RETURN_IF_ERROR(created->start());
  *trace = std::move(created);
  return Status::ok();
}

Trace::Trace(std::string path, OwnedFd file, const TraceIdentity& identity, const TraceLimits& limits)
    : path_(std::move(path)),
      limits_(limits),
      ring_(limits.events),
      json_(identity.process_id, monotonic_base_ns()),
      file_(std::move(file)),
      lines_("[\n") {
  append_header(identity);
}

Trace::~Trace() { close(); }

void Trace::append_header(const TraceIdentity& identity) {
  const std::string rank = identity.rank < 0 ? "" : "rank " + std::to_string(identity.rank) + " on ";
  json_.append_metadata(kProcessTrack, "process_name", "name",
                        EventJson::quoted(rank + identity.host + ", process " + std::to_string(identity.process_id)),
                        &lines_);
  json_.append_metadata(kProcessTrack, "thread_name", "name", EventJson::quoted("Bagua-Net trace"), &lines_);
  const std::int64_t now_ns = unix_ns();
  json_.append_metadata(kProcessTrack, "bagua_net_trace", "baseTimeNanoseconds",
                        std::to_string(now_ns - now_ns % kBaseNs) + R"(,"host":)" + EventJson::quoted(identity.host) +
                            R"(,"rank":)" + std::to_string(identity.rank) + R"(,"version":)" +
                            EventJson::quoted(version()),
                        &lines_);
}

Status Trace::start() {
  wake_ = OwnedFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_.is_open()) return Status::system_error("eventfd", errno);
  {
    const MutexLock lock(file_mutex_);
    // A full disk is noticed here, not by the first event.
    if (!write_lines()) return Status::system_error("writing the trace file " + path_, errno);
  }
  return start_background_thread(
      "bagua-trace", nullptr, [this] { run(); }, &thread_,
      [](const Status& failure) { BAGUA_NET_WARN("Bagua-Net: the trace ends here: " + failure.message()); });
}

void Trace::run() {
  pollfd wake{wake_.get(), POLLIN, 0};
  std::int64_t told_ns = monotonic_ns();
  while (::poll(&wake, 1, limits_.period_ms) <= 0) {
    const std::int64_t now_ns = monotonic_ns();
    if (now_ns - told_ns >= kTellOfWaitingNs) {
      told_ns = now_ns;
      tell_of_waiting(now_ns);
    }
    flush();
  }
}

void Trace::watch(Watched* watched) {
  const MutexLock lock(watched_mutex_);
  watched_.push_back(watched);
}

void Trace::unwatch(Watched* watched) {
  const MutexLock lock(watched_mutex_);
  watched_.erase(std::find(watched_.begin(), watched_.end(), watched));
}

void Trace::tell_of_waiting(std::int64_t now_ns) {
  const MutexLock lock(watched_mutex_);
  for (Watched* watched : watched_) watched->tell_of_waiting(now_ns);
}

std::uint32_t Trace::add_tracks(TrackKind kind, const std::string& name, int count) {
  const MutexLock lock(mutex_);
  std::vector<Tracks>& tracks = tracks_[static_cast<int>(kind)];
  const std::uint32_t first =
      tracks.empty() ? kFirstTrack[static_cast<int>(kind)] : tracks.back().first + tracks.back().count;
  tracks.push_back({first, static_cast<std::uint32_t>(count), name, 0});
  return first;
}

void Trace::name_track(std::uint32_t id, std::string* lines) {
  std::vector<Tracks>& all = tracks_[id >= kFirstTrack[1] ? 1 : 0];
  const auto behind = std::upper_bound(all.begin(), all.end(), id,
                                       [](std::uint32_t left, const Tracks& right) { return left < right.first; });
  if (behind == all.begin()) return;
  Tracks& tracks = *std::prev(behind);
  const std::uint32_t lane = id - tracks.first;
  if (lane >= tracks.count || (tracks.named >> lane & 1) != 0) return;
  tracks.named |= std::uint64_t{1} << lane;
  const std::string name = lane == 0 ? tracks.name : tracks.name + " (" + std::to_string(lane + 1) + ")";
  json_.append_metadata(id, "thread_name", "name", EventJson::quoted(name), lines);
  json_.append_metadata(id, "thread_sort_index", "sort_index", std::to_string(id), lines);
}

void Trace::note(std::uint32_t track, const std::string& name, const std::string& detail) {
  if (!is_recording()) return;
  const std::int64_t now_ns = monotonic_ns();
  const MutexLock lock(mutex_);
  if (notes_.size() > kBatchBytes) {
    count_dropped();
    return;
  }
  name_track(track, &notes_);
  json_.append_note(track, name, detail, now_ns, &notes_);
  written_events_.fetch_add(1, std::memory_order_relaxed);
}

void Trace::tell_of_drops() {
  const std::uint64_t dropped = dropped_events();
  if (dropped == told_dropped_) return;
  json_.append_note(kProcessTrack, std::to_string(dropped - told_dropped_) + " events dropped",
                    std::to_string(dropped) + " in all: the disk is slower than the events come", monotonic_ns(),
                    &lines_);
  told_dropped_ = dropped;
}

void Trace::write_events() {
  {
    const MutexLock lock(mutex_);
    lines_ += notes_;
    notes_.clear();
  }
  // No more than there is room for: producers may add as fast as this takes.
  for (std::size_t taken = 0; taken < limits_.events; ++taken) {
    const TraceEvent* event = ring_.next();
    if (event == nullptr) break;
    if (is_recording()) {
      {
        const MutexLock lock(mutex_);
        name_track(event->track(), &lines_);
      }
      json_.append(*event, &lines_);
      written_events_.fetch_add(1, std::memory_order_relaxed);
    } else {
      count_dropped();
    }
    ring_.done();
    if (lines_.size() > kBatchBytes && !write_lines()) return;
  }
  if (!is_recording()) return;
  tell_of_drops();
  write_lines();
}

bool Trace::write_lines() {
  if (!file_.is_open()) return false;
  if (file_bytes_ + lines_.size() > limits_.file_bytes) {
    stop_recording("it has " + std::to_string(file_bytes_ >> 20) + " MiB, the most that a file has");
    return false;
  }
  std::size_t written = 0;
  while (written < lines_.size()) {
    const ssize_t result = ::write(file_.get(), lines_.data() + written, lines_.size() - written);
    if (result < 0 && errno == EINTR) continue;
    if (result <= 0) {
      const int error_number = result < 0 ? errno : ENOSPC;
      stop_recording(Status::system_error("writing it", error_number).message());
      errno = error_number;
      return false;
    }
    written += static_cast<std::size_t>(result);
  }
  file_bytes_ += lines_.size();
  lines_.clear();
  return true;
}

// The file ends with the last whole line.
void Trace::stop_recording(const std::string& why) {
  records_.store(false, std::memory_order_relaxed);
  lines_.clear();
  lines_.shrink_to_fit();
  if (::ftruncate(file_.get(), static_cast<off_t>(file_bytes_)) == 0 && file_bytes_ > 0) {
    ::lseek(file_.get(), static_cast<off_t>(file_bytes_), SEEK_SET);
    json_.append_note(kProcessTrack, "the trace ends here", why, monotonic_ns(), &lines_);
    lines_.resize(lines_.size() - 2);
    lines_ += "\n]\n";
    [[maybe_unused]] const ssize_t ignored = ::write(file_.get(), lines_.data(), lines_.size());
    lines_.clear();
  }
  file_.reset();
  BAGUA_NET_WARN("the trace file " + path_ + " ends before the job does: " + why + ". The job goes on without a trace");
}

void Trace::flush() {
  const MutexLock lock(file_mutex_);
  write_events();
}

void Trace::close() {
  if (thread_.joinable()) {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t ignored = ::write(wake_.get(), &one, sizeof one);
    thread_.join();
  }
  const MutexLock lock(file_mutex_);
  if (!file_.is_open()) return;
  write_events();
  records_.store(false, std::memory_order_relaxed);
  if (!file_.is_open()) return;
  json_.append_metadata(kProcessTrack, "bagua_net_trace_end", "events",
                        std::to_string(written_events()) + R"(,"dropped":)" + std::to_string(dropped_events()),
                        &lines_);
  lines_.resize(lines_.size() - 2);  // the comma
  lines_ += "\n]\n";
  write_lines();
  file_.reset();
}

namespace {

// Host names come from the kernel, and become part of a file name.
std::string file_name_part(const std::string& text) {
  std::string part;
  for (const char letter : text) {
    const bool is_plain =
        std::isalnum(static_cast<unsigned char>(letter)) != 0 || letter == '-' || letter == '_' || letter == '.';
    part += is_plain ? letter : '_';
  }
  return part;
}

}  // namespace

std::string trace_path(const std::string& pattern, const TraceIdentity& identity) {
  const std::string rank = identity.rank < 0 ? "none" : std::to_string(identity.rank);
  const std::string host = file_name_part(identity.host);
  const std::string process = std::to_string(identity.process_id);
  std::string path;
  bool has_process = false;
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    const char next = pattern[i] == '%' && i + 1 < pattern.size() ? pattern[i + 1] : '\0';
    if (next == '\0' || std::string("rhp%").find(next) == std::string::npos) {
      path += pattern[i];
      continue;
    }
    ++i;
    switch (next) {
      case 'r': path += rank; break;
      case 'h': path += host; break;
      case 'p':
        path += process;
        has_process = true;
        break;
      default: path += '%'; break;
    }
  }
  if (has_process) return path;
  const std::string own = (identity.rank < 0 ? "." : ".rank" + rank + ".") + host + "." + process;
  const std::size_t slash = path.rfind('/');
  const std::size_t name = slash == std::string::npos ? 0 : slash + 1;
  const std::size_t dot = path.rfind('.');
  const bool has_extension = dot != std::string::npos && dot > name;
  return path.insert(has_extension ? dot : path.size(), own);
}

}  // namespace bagua_net

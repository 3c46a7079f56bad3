#include "stats/stats_page.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

#include "base/monotonic_clock.h"
#include "base/status.h"
#include "base/version.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010  // Linux 5.1
#endif

namespace bagua_net {
namespace {

template <std::size_t kBytes>
void set_text(char (&field)[kBytes], const std::string& text) {
  const std::size_t bytes = std::min(text.size(), kBytes - 1);
  std::memcpy(field, text.data(), bytes);
  std::memset(field + bytes, 0, kBytes - bytes);
}

// Both structures are nothing but counters.
template <typename Counters>
void add_counters(Counters* sum, const Counters* added) {
  auto* to = reinterpret_cast<Counter*>(sum);
  const auto* from = reinterpret_cast<const Counter*>(added);
  for (std::size_t i = 0; i < sizeof(Counters) / sizeof(Counter); ++i) to[i].add(from[i].get());
}

template <typename Slot>
Slot* free_slot(Slot* slots, std::size_t count, Word* used, std::vector<std::uint32_t>* free) {
  std::uint32_t index = used->load(std::memory_order_relaxed);
  if (!free->empty()) {
    index = free->back();
    free->pop_back();
  } else if (slots == nullptr || index == count) {
    return nullptr;
  } else {
    used->store(index + 1, std::memory_order_relaxed);
  }
  return new (slots + index) Slot();  // zeroes it
}

}  // namespace

// The fences keep what is in between apart from the two numbers, as a sequence lock needs it.
class StatsPage::Change {
 public:
  explicit Change(PageHeader* header) : header_(header) {
    header_->generation.add(1);
    std::atomic_thread_fence(std::memory_order_release);
  }
  ~Change() {
    std::atomic_thread_fence(std::memory_order_release);
    header_->generation.add(1);
  }
  Change(const Change&) = delete;
  Change& operator=(const Change&) = delete;

 private:
  PageHeader* const header_;
};

StatsPage::StatsPage(bool shared, const JobPosition& position, const std::string& host, int workers,
                     const std::vector<NetworkInterface>& nics)
    : memory_(kPageName, kPageBytes, shared),
      nics_(nics.begin(), nics.begin() + static_cast<std::ptrdiff_t>(std::min(nics.size(), kNicSlots))) {
  if (memory_.data() == nullptr) {
    header_of_none_ = std::make_unique<PageHeader>();
    header_ = header_of_none_.get();
    return;
  }
  auto* bytes = static_cast<unsigned char*>(memory_.data());
  header_ = new (bytes) PageHeader();
  comms_ = reinterpret_cast<CommSlot*>(bytes + kCommsOffset);
  streams_ = reinterpret_cast<StreamSlot*>(bytes + kStreamsOffset);
  header_->version = kPageVersion;
  header_->header_bytes = sizeof(PageHeader);
  header_->comm_slots = kCommSlots;
  header_->comm_bytes = sizeof(CommSlot);
  header_->stream_slots = kStreamSlots;
  header_->stream_bytes = sizeof(StreamSlot);
  header_->pid = ::getpid();
  header_->started_unix_ms = unix_ns() / 1'000'000;
  header_->started_ms = monotonic_ms();
  header_->rank = position.rank;
  header_->local_rank = position.local_rank;
  header_->world_size = position.world_size;
  header_->workers = static_cast<std::uint32_t>(workers);
  set_text(header_->plugin_version, version());
  set_text(header_->host, host);
  for (std::size_t index = 0; index < nics_.size(); ++index) {
    NicSlot& slot = header_->nics[index];
    slot.speed_mbps.store(static_cast<std::uint32_t>(nics_[index].speed_mbps));
    set_text(slot.name, nics_[index].name);
  }
  // Last: a page without it is not one yet.
  std::atomic_thread_fence(std::memory_order_release);
  std::memcpy(header_->magic, kPageMagic, sizeof kPageMagic);
}

CommSlot* StatsPage::open_comm(const CommNames& names) {
  const MutexLock lock(mutex_);
  const Change change(header_);
  header_->comms_opened.add(1);
  CommSlot* slot = free_slot(comms_, kCommSlots, &header_->comms_used, &free_comms_);
  if (slot == nullptr) return nullptr;
  slot->direction.store(static_cast<std::uint32_t>(names.direction));
  slot->same_host.store(names.same_host ? 1 : 0);
  slot->opened_ms.set(static_cast<std::uint64_t>(monotonic_ms()));
  set_text(slot->interface, names.interface);
  set_text(slot->peer, names.peer);
  slot->state.store(static_cast<std::uint32_t>(CommState::kOpen));
  return slot;
}

StreamSlot* StatsPage::open_stream(const CommSlot* comm, int index) {
  const MutexLock lock(mutex_);
  const Change change(header_);
  StreamSlot* slot = free_slot(streams_, kStreamSlots, &header_->streams_used, &free_streams_);
  if (slot == nullptr) return nullptr;
  slot->comm.store(index_of(comm));
  slot->index.store(static_cast<std::uint32_t>(index));
  slot->state.store(static_cast<std::uint32_t>(SlotState::kLive));
  return slot;
}

NicSlot* StatsPage::set_nic(const CommSlot* comm, StreamSlot* stream, const SocketAddress& local) {
  const bool leaves_host = comm->same_host.load(std::memory_order_relaxed) == 0;
  std::size_t index = 0;
  while (index < nics_.size() && !(leaves_host && nics_[index].address.same_host(local))) ++index;
  const auto nic = static_cast<std::uint32_t>(index < nics_.size() ? index + 1 : 0);
  const MutexLock lock(mutex_);
  if (stream->nic.load(std::memory_order_relaxed) != nic) {
    const Change change(header_);
    settle_nic(comm, stream);
    stream->nic.store(nic);
  }
  return nic == 0 ? nullptr : &header_->nics[index];
}

void StatsPage::settle_nic(const CommSlot* comm, StreamSlot* stream) {
  const std::uint32_t nic = stream->nic.load(std::memory_order_relaxed);
  const std::uint64_t bytes = stream->counters.bytes.get();
  if (nic != 0) {
    NicSlot& slot = header_->nics[nic - 1];
    const bool sends =
        comm->direction.load(std::memory_order_relaxed) == static_cast<std::uint32_t>(CommDirection::kSend);
    (sends ? slot.closed_sent_bytes : slot.closed_received_bytes).add(bytes - stream->bytes_over_other_nics.get());
  }
  stream->bytes_over_other_nics.set(bytes);
}

bool StatsPage::set_link_state(const std::string& nic, LinkState state) {
  for (std::size_t index = 0; index < nics_.size(); ++index) {
    if (nics_[index].name != nic) continue;
    const MutexLock lock(mutex_);
    NicSlot& slot = header_->nics[index];
    const std::uint32_t before = slot.state.load(std::memory_order_relaxed);
    const bool was_usable = before == 0 || before == static_cast<std::uint32_t>(LinkState::kUsable);
    const Change change(header_);
    slot.state.store(static_cast<std::uint32_t>(state));
    if (was_usable ? state == LinkState::kUsable : before == static_cast<std::uint32_t>(state)) return false;
    if (was_usable) slot.downs.fetch_add(1, std::memory_order_relaxed);
    slot.since_ms.set(static_cast<std::uint64_t>(monotonic_ms()));
    return true;
  }
  return false;
}

void StatsPage::close(CommSlot* comm, const std::vector<StreamSlot*>& streams) {
  const MutexLock lock(mutex_);
  const Change change(header_);
  add_counters(&header_->closed_comms, &comm->counters);
  for (StreamSlot* stream : streams) {
    add_counters(&header_->closed_streams, &stream->counters);
    settle_nic(comm, stream);
    if (streams_ == nullptr || stream < streams_ || stream >= streams_ + kStreamSlots) continue;
    stream->state.store(static_cast<std::uint32_t>(SlotState::kFree));
    free_streams_.push_back(static_cast<std::uint32_t>(stream - streams_));
  }
  if (comms_ == nullptr || comm < comms_ || comm >= comms_ + kCommSlots) return;
  comm->state.store(static_cast<std::uint32_t>(CommState::kFree));
  free_comms_.push_back(index_of(comm));
}

void StatsPage::fail(CommSlot* comm, const std::string& why) {
  const MutexLock lock(mutex_);
  const Change change(header_);
  comm->state.store(static_cast<std::uint32_t>(CommState::kFailed));
  header_->comms_failed.add(1);
  header_->last_failure_ms.set(static_cast<std::uint64_t>(monotonic_ms()));
  set_text(header_->last_failure, why);
}

void StatsPage::count_hidden(int difference) {
  const MutexLock lock(mutex_);
  const Change change(header_);
  header_->comms_hidden.set(header_->comms_hidden.get() + static_cast<std::uint64_t>(difference));
}

SharedMemory::SharedMemory(const std::string& name, std::size_t bytes, bool shared) : bytes_(bytes) {
  if (shared && open_file(name)) return;
  void* memory = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory != MAP_FAILED) data_ = memory;
}

bool SharedMemory::open_file(const std::string& name) {
  const auto failed = [this](const char* operation) {
    failure_ = Status::system_error(operation, errno).message();
    file_.reset();
    return false;
  };
  // Beyond this limit the kernel also raises SIGXFSZ, which ends a program unless it is Python.
  rlimit largest{};
  if (::getrlimit(RLIMIT_FSIZE, &largest) == 0 && bytes_ > largest.rlim_cur) {
    failure_ = "it takes " + std::to_string(bytes_) + " bytes of shared memory, and files may have " +
               std::to_string(largest.rlim_cur) + " (raise the limit: ulimit -f)";
    return false;
  }
  file_ = OwnedFd(::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file_.is_open()) return failed("memfd_create");
  if (::ftruncate(file_.get(), static_cast<off_t>(bytes_)) != 0) return failed("ftruncate of a memfd");
  void* memory = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file_.get(), 0);
  if (memory == MAP_FAILED) return failed("mmap of a memfd");
  data_ = memory;
  // A file that somebody cuts off would end this process with SIGBUS. Old kernels cannot forbid others to write.
  ::fcntl(file_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);
  ::fcntl(file_.get(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE);
  return true;
}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

}  // namespace bagua_net

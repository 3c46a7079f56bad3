// StatsPage: the statistics page of this process (page_layout.h), and which of its slots are taken. Shared by the
// transport and its comms, which may outlive each other. Opening and closing take a mutex; counting takes none.
//
// A forked child has its parent's page in memory and never touches it: it makes one of its own when it starts a
// transport. Readers tell the two apart by the process id in the page.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/owned_fd.h"
#include "os/launcher.h"
#include "os/link_watch.h"
#include "os/network_interface.h"
#include "stats/page_layout.h"

namespace bagua_net {

// SharedMemory: zeroed memory that other processes can read through /proc/<pid>/fd, and nobody can shrink.
//
// A memfd and not a file in /dev/shm: it is there where /dev/shm is full, missing or private to a container, goes with
// its process however that ends, and the kernel lets read it whoever may trace the process: its user, and root.
class SharedMemory {
 public:
  // `name` is what the file is called in /proc: "/memfd:<name> (deleted)". Where there are no memfds or descriptors
  // left, the memory is this process's alone: is_shared() is false, and failure() says why.
  SharedMemory(const std::string& name, std::size_t bytes, bool shared);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  void* data() const { return data_; }  // nullptr: no memory at all
  bool is_shared() const { return file_.is_open(); }
  const std::string& failure() const { return failure_; }

 private:
  bool open_file(const std::string& name);

  const std::size_t bytes_;
  OwnedFd file_;
  void* data_ = nullptr;
  std::string failure_;
};

constexpr char kPageName[] = "bagua-net-stats";

class StatsPage {
 public:
  // shared: other processes may read it.
  StatsPage(bool shared, const JobPosition& position, const std::string& host, int workers,
            const std::vector<NetworkInterface>& nics = {});

  bool is_shared() const { return memory_.is_shared(); }
  // Why it is not, though it was to be; empty otherwise.
  const std::string& failure() const { return memory_.failure(); }

  struct CommNames {
    CommDirection direction = CommDirection::kSend;
    bool same_host = false;
    std::string interface;
    std::string peer;
  };
  // nullptr: every slot is taken.
  CommSlot* open_comm(const CommNames& names);
  StreamSlot* open_stream(const CommSlot* comm, int index);
  // The NIC over which a stream of the comm goes: the one that has this address. nullptr: none.
  NicSlot* set_nic(const CommSlot* comm, StreamSlot* stream, const SocketAddress& local);
  // True: it was another one.
  bool set_link_state(const std::string& nic, LinkState state);
  // Adds the counts of a comm and of its streams to those of closed ones. Slots that are not the page's are merely
  // added.
  void close(CommSlot* comm, const std::vector<StreamSlot*>& streams);
  void fail(CommSlot* comm, const std::string& why);
  void count_hidden(int difference);

  std::uint32_t index_of(const CommSlot* comm) const { return static_cast<std::uint32_t>(comm - comms_); }

 private:
  class Change;  // while it lives, readers wait

  // Adds what the stream has moved over its NIC to what that has carried.
  void settle_nic(const CommSlot* comm, StreamSlot* stream) REQUIRES(mutex_);

  const SharedMemory memory_;
  const std::vector<NetworkInterface> nics_;  // by slot
  Mutex mutex_;                               // also guards the slots, but for their counters
  PageHeader* header_ PT_GUARDED_BY(mutex_) = nullptr;
  CommSlot* comms_ = nullptr;
  StreamSlot* streams_ = nullptr;
  std::vector<std::uint32_t> free_comms_ GUARDED_BY(mutex_);  // below comms_used
  std::vector<std::uint32_t> free_streams_ GUARDED_BY(mutex_);
  std::unique_ptr<PageHeader> header_of_none_;  // where there is no memory for a page
};

}  // namespace bagua_net

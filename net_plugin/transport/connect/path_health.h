// PathHealth: what the comms of a process have found out about paths, one for all.
//
// - Whether a path works again. It opens a connection, over which it sends a packet as large as those of a chunk, and
//   closes it: what is found out is only that the listener's host answers. A listener sees one connection a second,
//   however many comms ask.
// - Which paths are silent. A collective goes over several comms in turn, and each would wait for the silence by
//   itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "base/mutex.h"
#include "base/owned_fd.h"
#include "transport/connect/nic_paths.h"

namespace bagua_net {

class PathHealth {
 public:
  // Never blocks. True: the path was found to work within the last second. Otherwise it is being tried, and the answer
  // is that of a later call. Any thread.
  bool works(const NicPath& path, std::int64_t now_ms);
  // A connection is open, and the packet under way: the answer is due in no time. Any thread.
  bool is_due(const NicPath& path);
  // When the last packet was sent that was answered; 0: never. Any thread.
  std::int64_t answered_ms(const NicPath& path);
  // Connections can be opened, and packets of this size are not answered: of each such time, to the first who asks.
  // Otherwise 0. Any thread.
  std::size_t take_lost_packet_bytes(const NicPath& path);
  // A stream over the path was not answered. Any thread.
  void on_silent(const NicPath& path, std::int64_t now_ms);
  // When that was last; 0: never. Any thread.
  std::int64_t silent_ms(const NicPath& path);

 private:
  struct Known {
    OwnedFd socket;                // of a connection that is being tried
    std::int64_t asked_ms = 0;     // when it was opened
    std::int64_t sent_ms = 0;      // when a packet was sent over it; 0: it is not open yet
    std::int64_t found_ms = 0;     // when the last packet was found to be answered; 0: never
    std::int64_t answered_ms = 0;  // when that packet was sent
    std::int64_t silent_ms = 0;
    int lost_packets = 0;  // in a row
    bool is_told = false;  // of them
    std::size_t packet_bytes = 0;
  };
  void look(Known& probe, std::int64_t now_ms) REQUIRES(mutex_);
  Known& known(const NicPath& path) REQUIRES(mutex_) { return paths_[{path.interface.name, path.address.to_string()}]; }

  Mutex mutex_;
  std::map<std::pair<std::string, std::string>, Known> paths_ GUARDED_BY(mutex_);  // by interface and address
};

}  // namespace bagua_net

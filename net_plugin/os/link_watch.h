// LinkWatch: whether the network interfaces in use can carry traffic, as the kernel announces it (rtnetlink). TCP
// notices a lost link only by silence. Needs no privilege and no thread of its own: the owner's poller has fd(). Not
// thread-safe.
//
// [Note: what counts as a change]
// A message only says that something has changed; the state is then read from the kernel. That happens once no message
// has come for kQuietMs, so what is undone at once is not reported: a DHCP client that replaces an address, a short
// flap. A socket that overflowed and a message that cannot be read have the same effect as a message. Other interfaces,
// such as those of containers that start and end, and other addresses of a watched one do not matter.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "base/owned_fd.h"
#include "base/status.h"
#include "os/network_interface.h"

namespace bagua_net {

enum class LinkState {
  kUsable = 1,
  kAbsent,     // unplugged, or moved to another network namespace
  kDown,       // by the administrator
  kNoCarrier,  // cable, switch or driver
  kNoAddress,  // its address in use is gone; it may have others
};

// rows: what the kernel has. An interface that was removed and made again is the same one if its name is.
LinkState link_state(const NetworkInterface& interface, const std::vector<InterfaceAddress>& rows);
// "eth0 has no carrier".
std::string describe(LinkState state, const NetworkInterface& interface);

// What one datagram of rtnetlink may have changed.
struct LinkMessages {
  bool interfaces = false;  // of the watched ones
  bool routes = false;
};
// indices: of the watched interfaces; 0: there is none now.
LinkMessages read_link_messages(const void* datagram, std::size_t bytes, const std::vector<NetworkInterface>& watched,
                                const std::vector<unsigned>& indices);

class LinkWatch {
 public:
  static constexpr int kQuietMs = 100;
  static constexpr int kMaxDelayMs = 500;  // messages may come without a pause, as on a router
  static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

  // Fails where rtnetlink is not available, as in some sandboxes.
  Status open(std::vector<NetworkInterface> watched);

  const std::vector<NetworkInterface>& watched() const { return watched_; }
  // As reported last.
  LinkState state(std::size_t index) const { return states_[index]; }

  // update() is to be called when fd() is readable, and at due_ms() of the monotonic clock.
  int fd() const { return socket_.get(); }
  std::int64_t due_ms() const { return due_ms_; }

  struct Changes {
    std::vector<std::size_t> interfaces;  // whose state() has changed, by their index in watched()
    bool routes = false;                  // some may have: has_route_over() tells of those in use
  };
  Changes update(std::int64_t now_ms);

 private:
  // True: something may have changed.
  bool receive();
  Status read_states(std::vector<LinkState>* states);

  OwnedFd socket_;
  std::vector<NetworkInterface> watched_;
  std::vector<unsigned> indices_;
  std::vector<LinkState> states_;
  LinkMessages pending_;
  std::int64_t first_ms_ = 0;  // of the messages since the last look
  std::int64_t due_ms_ = kNever;
};

}  // namespace bagua_net

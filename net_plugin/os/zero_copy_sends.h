// ZeroCopySends: what one TCP socket sends with MSG_ZEROCOPY. The kernel refers to the memory, and says in the socket's
// error queue when it no longer does, and whether it copied after all, as it does where the network card cannot gather
// pages or the packets stay on this machine. The first send is a trial: if it was copied, all others are plain.
//
// Source: Documentation/networking/msg_zerocopy.rst of Linux. One thread at a time.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace bagua_net {

class ZeroCopySends {
 public:
  // Whether this socket may send so (allow_zero_copy_sends).
  static bool are_allowed(int socket);

  explicit ZeroCopySends(int socket) : socket_(socket) {}

  // Like send() on a non-blocking socket. The memory must stay as it is until the peer's program has the bytes.
  // EOPNOTSUPP: nothing was sent, because the kernel copies after all, or cannot refer to this memory.
  ssize_t send(const void* data, std::size_t bytes);
  // Reads what the kernel says of earlier sends: until then the socket counts as one with an error.
  void take_notices();
  bool has_any_under_way() const { return under_way_ > 0; }
  // Of a socket that is disconnected: until the network card has let go of the memory, too. False: it has not in time.
  bool wait_until_released(int limit_ms);

 private:
  enum class Trial { kNotBegun, kUnderWay, kRefers, kCopies };

  const int socket_;
  Trial trial_ = Trial::kNotBegun;
  std::uint32_t under_way_ = 0;  // sends that the kernel has not released
};

// A kernel that cannot leaves it off.
void allow_zero_copy_sends(int socket, bool allowed);

}  // namespace bagua_net

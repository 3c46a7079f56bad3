#include "os/random_bytes.h"

#include <sys/random.h>

#include <cerrno>

namespace bagua_net {

Status fill_random(std::uint8_t* bytes, std::size_t count) {
  while (count > 0) {
    const ssize_t got = ::getrandom(bytes, count, 0);
    if (got < 0) {
      if (errno == EINTR) continue;
      return Status::system_error("getrandom", errno);
    }
    bytes += got;
    count -= static_cast<std::size_t>(got);
  }
  return Status::ok();
}

}  // namespace bagua_net

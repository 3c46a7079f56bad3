#include "bench/raw_end.h"

#include <sys/socket.h>
#include <unistd.h>

#include "bench/driver_protocol.h"

namespace bagua_net::bench {

Status RawEnd::allocate_memory() {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  region_stride_ = (region_bytes(options_.memory_bytes) + page - 1) / page * page;
  return memory_.allocate(options_.streams * region_stride_, "the buffer of all streams");
}

void RawEnd::stop_threads() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_stopping_ = true;
  }
  changed_.notify_all();
  for (const OwnedFd& socket : sockets_) {
    if (socket.is_open()) shutdown(socket.get(), SHUT_RDWR);  // wakes a thread that waits in recv or send
  }
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void RawEnd::fail(Status status) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_.is_ok()) failure_ = std::move(status);
  }
  changed_.notify_all();
}

void RawEnd::report(std::int64_t bytes, double seconds, const ResourceUsage& used) {
  JsonLine line("result");
  line.add("bytes", bytes).add("seconds", seconds);
  used.add_to(&line);
  write_event(line);
}

}  // namespace bagua_net::bench

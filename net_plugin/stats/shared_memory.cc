#include "stats/shared_memory.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "base/status.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010  // Linux 5.1
#endif

namespace bagua_net {

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

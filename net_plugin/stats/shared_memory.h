// SharedMemory: zeroed memory that other processes can read through /proc/<pid>/fd, and nobody can shrink.
//
// A memfd and not a file in /dev/shm: it is there where /dev/shm is full, missing or private to a container, goes with
// its process however that ends, and the kernel lets read it whoever may trace the process: its user, and root.
#pragma once

#include <cstddef>
#include <string>

#include "base/owned_fd.h"

namespace bagua_net {

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

}  // namespace bagua_net

#include "crypto/protected_memory.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

namespace bagua_net {
namespace {

std::size_t in_pages(std::size_t bytes) {
  static const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

}  // namespace

void wipe(void* memory, std::size_t bytes) { ::explicit_bzero(memory, bytes); }

void* allocate_protected(std::size_t bytes) {
  const std::size_t size = in_pages(bytes);
  void* const memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  // Every kernel that we serve has the first; the others are worth having, and a container may refuse them.
  ::madvise(memory, size, MADV_DONTDUMP);
  ::madvise(memory, size, MADV_WIPEONFORK);
  ::mlock(memory, size);
  return memory;
}

void free_protected(void* memory, std::size_t bytes) {
  wipe(memory, bytes);
  ::munmap(memory, in_pages(bytes));
}

}  // namespace bagua_net

/* What the files of libsodium beside this one name and Bagua-Net never calls: keys come from the kernel
   (os/random_bytes.h), and nothing uses libsodium's own allocator. */
#include <stdlib.h>

#include "core.h"
#include "randombytes.h"

void sodium_misuse(void) { abort(); }

void randombytes_buf(void* const buf, const size_t size) {
  (void)buf;
  (void)size;
  abort();
}

/* What the files of libsodium beside this one name and Bagua-Net never calls: keys come from the kernel
   (os/random_bytes.h), and nothing uses libsodium's own allocator. And sodium_init() for these files alone. */
#include <stdlib.h>

#include "core.h"
#include "private/implementations.h"
#include "randombytes.h"
#include "runtime.h"

int _sodium_runtime_get_cpu_features(void);

/* Called once, before anything else of this library, but HMAC. */
int sodium_init(void) {
  _sodium_runtime_get_cpu_features();
  _crypto_onetimeauth_poly1305_pick_best_implementation();
  _crypto_scalarmult_curve25519_pick_best_implementation();
  _crypto_stream_chacha20_pick_best_implementation();
  return 0;
}

void sodium_misuse(void) { abort(); }

void randombytes_buf(void* const buf, const size_t size) {
  (void)buf;
  (void)size;
  abort();
}

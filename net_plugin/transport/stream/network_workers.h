// How many workers connections between hosts keep busy. It follows from the speed of the interface and from the time
// that a core needs for a byte that is sent and one that is received:
//
//   what is done with them                          ps    Gb/s each way that keep a worker busy
//   copied (measured: docs/design/performance.md)   640   12.5
//   and sealed and opened with AES-256-GCM        1,000    8
//   and with ChaCha20-Poly1305                    2,000    4
//
// One core seals or opens 5.0 GB/s with AES and 1.6 GB/s with ChaCha20 on an AMD Zen 4 at 32 KiB a record; older cores
// with AES take up to half as long again, so 300 and 800 ps are counted for each of the two.
#pragma once

#include "crypto/cipher_state.h"

namespace bagua_net {

// fastest_mbps: of the interfaces; 0: unknown, taken for 100 Gb/s, or encrypted for 80. At least as many as for 50
// Gb/s, or encrypted for 48, because the interface of a virtual machine may tell a wrong speed. cpus: of the rank; what
// only copies takes at most half of them. The pool may have fewer (os/cpu_budget.h).
int network_workers(int fastest_mbps, Cipher cipher, int cpus);

}  // namespace bagua_net

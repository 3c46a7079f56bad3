// ConnectHandle: the 128 bytes that NCCL carries from the listener to the connector, unchecked and unversioned, so
// everything needed to recognise an unauthenticated peer is in it. It goes through NCCL's bootstrap, not over the data
// connections. Pure bytes, no system call.
//
//   byte  size  field
//      0     8  magic "BAGUANET"
//      8     2  protocol version
//     10     2  address family: 4 or 6
//     12     2  port
//     14     2  most data streams that the listener takes
//     16    16  address (IPv4: the first 4 bytes)
//     32     4  IPv6 scope id: means something on the listener's own host only
//     36    16  token: random, one per listen; a secret that no other message carries
//     52     4  protection: 1 = the listener encrypts, 2 = its CPU has AES instructions; a sum
//     56     8  connect state: zero from the listener; the connector keeps the number of its attempt here
//     64    16  listen id: random, one per listen; names the token without telling it
//     80     8  key id: names the secret of the listener's job; zero: it has none
//     88     1  number of further addresses of the listener, each of which takes connections of this comm
//     89     3  zero
//     92    36  the first of them, of the family above: 4 or 16 bytes, and 2 of the port; the rest is zero. Those for
//               which there is no room are in the reply to stream 0 (wire/handshake_message.h)
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "crypto/job_secret.h"

namespace bagua_net {

// Protection: with what a rank protects its connections. It is the same on all ranks of a job; the connect handle and
// each hello say it, so that ranks that differ are named at once.
struct Protection {
  KeyId key_id{};  // of the secret; zeros: none
  bool encrypts = false;
};

// "this rank has the secret 3f2a9c0d1e4b5a67, that rank has no secret", and what to do in another line. "": they agree.
std::string protection_mismatch(const Protection& own, const Protection& peers);

// Also raised when the tuner's choices change (abi/collective_policy.h).
constexpr std::uint16_t kProtocolVersion = 4;
constexpr std::size_t kConnectHandleBytes = 128;

using Token = std::array<std::uint8_t, 16>;     // secret
using RandomId = std::array<std::uint8_t, 16>;  // public

// An address of the listener; the family is that of the handle.
struct HandleAddress {
  std::array<std::uint8_t, 16> bytes{};
  std::uint16_t port = 0;
};

constexpr std::size_t kMaxAddresses = 16;  // of a listener: NCCL uses at most 16 interfaces
// How many of them a handle has room for, with the first one.
constexpr std::size_t max_handle_addresses(int family) { return 1 + 36 / (family == 4 ? 4 + 2 : 16 + 2); }

struct ConnectHandle {
  std::uint16_t protocol_version = kProtocolVersion;
  std::uint8_t address_family = 4;
  std::uint16_t port = 0;
  std::uint16_t max_streams = 1;
  std::array<std::uint8_t, 16> address{};
  std::uint32_t scope_id = 0;
  Token token{};
  RandomId listen_id{};
  Protection protection;
  bool has_aes = false;
  std::vector<HandleAddress> further;  // at most max_handle_addresses() - 1
  std::size_t unnamed = 0;             // that there are besides

  std::size_t addresses() const { return 1 + further.size() + unnamed; }
};

void encode_connect_handle(const ConnectHandle& handle, std::uint8_t* bytes);
// kRemoteError when the handle comes from a rank without this plugin or with another protocol version.
Status decode_connect_handle(const std::uint8_t* bytes, ConnectHandle* handle);

std::uint64_t load_connect_state(const std::uint8_t* bytes);
void store_connect_state(std::uint8_t* bytes, std::uint64_t state);

}  // namespace bagua_net

#include "wire/connect_handle.h"

#include <algorithm>
#include <cstring>

#include "wire/byte_order.h"

namespace bagua_net {
namespace {

constexpr char kMagic[] = "BAGUANET";
constexpr std::size_t kMagicBytes = sizeof kMagic - 1;
constexpr std::size_t kStateOffset = 56;
constexpr std::size_t kListenIdOffset = 64;
constexpr std::size_t kProtectionOffset = 52;
constexpr std::size_t kKeyIdOffset = 80;
constexpr std::size_t kFurtherCountOffset = 88;
constexpr std::size_t kFurtherOffset = 92;
constexpr std::uint32_t kEncrypts = 1;
constexpr std::uint32_t kHasAes = 2;

constexpr std::size_t address_bytes(int family) { return family == 4 ? 4 : 16; }

static_assert(kFurtherOffset + (max_handle_addresses(4) - 1) * (address_bytes(4) + 2) == kConnectHandleBytes);
static_assert(kFurtherOffset + (max_handle_addresses(6) - 1) * (address_bytes(6) + 2) == kConnectHandleBytes);

}  // namespace

void encode_connect_handle(const ConnectHandle& handle, std::uint8_t* bytes) {
  std::memset(bytes, 0, kConnectHandleBytes);
  std::memcpy(bytes, kMagic, kMagicBytes);
  store_little_endian<std::uint16_t>(bytes + 8, handle.protocol_version);
  store_little_endian<std::uint16_t>(bytes + 10, handle.address_family);
  store_little_endian<std::uint16_t>(bytes + 12, handle.port);
  store_little_endian<std::uint16_t>(bytes + 14, handle.max_streams);
  std::copy(handle.address.begin(), handle.address.end(), bytes + 16);
  store_little_endian<std::uint32_t>(bytes + 32, handle.scope_id);
  std::copy(handle.token.begin(), handle.token.end(), bytes + 36);
  store_little_endian<std::uint32_t>(bytes + kProtectionOffset,
                                     (handle.protection.encrypts ? kEncrypts : 0) | (handle.has_aes ? kHasAes : 0));
  std::copy(handle.listen_id.begin(), handle.listen_id.end(), bytes + kListenIdOffset);
  std::copy(handle.protection.key_id.begin(), handle.protection.key_id.end(), bytes + kKeyIdOffset);
  const std::size_t count = std::min(handle.further.size(), max_handle_addresses(handle.address_family) - 1);
  bytes[kFurtherCountOffset] = static_cast<std::uint8_t>(count + handle.unnamed);
  std::uint8_t* at = bytes + kFurtherOffset;
  for (std::size_t index = 0; index < count; ++index) {
    at = std::copy_n(handle.further[index].bytes.begin(), address_bytes(handle.address_family), at);
    store_little_endian<std::uint16_t>(at, handle.further[index].port);
    at += 2;
  }
}

Status decode_connect_handle(const std::uint8_t* bytes, ConnectHandle* handle) {
  if (std::memcmp(bytes, kMagic, kMagicBytes) != 0) {
    return Status::remote_error(
        "the peer's connect handle does not come from Bagua-Net: that rank uses another NCCL network. "
        "Set ENABLE_BAGUA_NET=1 and install the same version of bagua on every rank, or on none");
  }
  handle->protocol_version = load_little_endian<std::uint16_t>(bytes + 8);
  if (handle->protocol_version != kProtocolVersion) {
    return Status::remote_error("the peer speaks Bagua-Net protocol version " +
                                std::to_string(handle->protocol_version) + ", this rank speaks version " +
                                std::to_string(kProtocolVersion) + ". Install the same version of bagua on every rank");
  }
  const auto family = load_little_endian<std::uint16_t>(bytes + 10);
  if (family != 4 && family != 6) {
    return Status::remote_error("the peer's connect handle names address family " + std::to_string(family) +
                                ", neither 4 nor 6: the handle is corrupt");
  }
  handle->address_family = static_cast<std::uint8_t>(family);
  handle->port = load_little_endian<std::uint16_t>(bytes + 12);
  handle->max_streams = load_little_endian<std::uint16_t>(bytes + 14);
  std::copy(bytes + 16, bytes + 32, handle->address.begin());
  handle->scope_id = load_little_endian<std::uint32_t>(bytes + 32);
  std::copy(bytes + 36, bytes + 52, handle->token.begin());
  const auto protection = load_little_endian<std::uint32_t>(bytes + kProtectionOffset);
  handle->protection.encrypts = (protection & kEncrypts) != 0;
  handle->has_aes = (protection & kHasAes) != 0;
  std::copy_n(bytes + kKeyIdOffset, handle->protection.key_id.size(), handle->protection.key_id.begin());
  std::copy(bytes + kListenIdOffset, bytes + kListenIdOffset + handle->listen_id.size(), handle->listen_id.begin());
  const std::size_t count = bytes[kFurtherCountOffset];
  if (count >= kMaxAddresses) {
    return Status::remote_error("the peer's connect handle says that there are " + std::to_string(count) +
                                " further addresses, more than " + std::to_string(kMaxAddresses - 1) +
                                ": the handle is corrupt");
  }
  handle->further.assign(std::min(count, max_handle_addresses(family) - 1), {});
  handle->unnamed = count - handle->further.size();
  const std::uint8_t* at = bytes + kFurtherOffset;
  for (HandleAddress& address : handle->further) {
    std::copy_n(at, address_bytes(family), address.bytes.begin());
    at += address_bytes(family);
    address.port = load_little_endian<std::uint16_t>(at);
    at += 2;
  }
  return Status::ok();
}

std::uint64_t load_connect_state(const std::uint8_t* bytes) {
  return load_little_endian<std::uint64_t>(bytes + kStateOffset);
}

void store_connect_state(std::uint8_t* bytes, std::uint64_t state) {
  store_little_endian<std::uint64_t>(bytes + kStateOffset, state);
}

namespace {

std::string secret_text(const KeyId& id) { return id == KeyId{} ? "no secret" : "the secret " + key_id_text(id); }

const char* encryption_text(bool encrypts) { return encrypts ? "encrypts" : "does not encrypt"; }

}  // namespace

std::string protection_mismatch(const Protection& own, const Protection& peers) {
  if (own.key_id != peers.key_id) {
    return "this rank has " + secret_text(own.key_id) + ", that rank has " + secret_text(peers.key_id) +
           ".\nSet BAGUA_NET_SECRET_FILE to the same file on every rank, or on none";
  }
  if (own.encrypts != peers.encrypts) {
    return std::string("this rank ") + encryption_text(own.encrypts) + ", that rank " +
           encryption_text(peers.encrypts) + ".\nSet BAGUA_NET_ENCRYPTION to the same value on every rank";
  }
  return {};
}

}  // namespace bagua_net

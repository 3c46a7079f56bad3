#include "wire/protection.h"

namespace bagua_net {
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

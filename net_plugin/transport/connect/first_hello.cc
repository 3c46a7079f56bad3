#include "transport/connect/first_hello.h"

#include "os/random_bytes.h"
#include "wire/sealed_handshake.h"

namespace bagua_net {

Status fill_first_hello(const HandshakeSettings& settings, const ConnectHandle& handle, Hello* hello) {
  hello->listen_id = handle.listen_id;
  hello->key_id = settings.protection().key_id;
  if (settings.encrypts) hello->cipher = choose_cipher(settings.uses_aes, handle.has_aes);
  hello->process_id = settings.process_id;
  hello->host_name = settings.host_name;
  hello->max_chunk_bytes = settings.max_chunk_bytes;
  hello->features = kFeatureAcknowledgements | kFeatureLostAddresses | (settings.checksums ? kFeatureChecksums : 0) |
                    (settings.uses_aes ? kFeatureAes : 0);
  return fill_random(hello->comm_id.data(), hello->comm_id.size());
}

}  // namespace bagua_net

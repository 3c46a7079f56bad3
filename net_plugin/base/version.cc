#include "base/version.h"

namespace bagua_net {

const char* version() { return BAGUA_NET_VERSION; }

}  // namespace bagua_net

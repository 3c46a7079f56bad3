#include "base/version.h"

namespace bagua_net {
namespace {

constexpr char kBanner[] = "Bagua-Net " BAGUA_NET_VERSION " active";
constexpr char kVersion[] = BAGUA_NET_VERSION;

}  // namespace

const char* version() { return kVersion; }
const char* active_banner() { return kBanner; }

}  // namespace bagua_net

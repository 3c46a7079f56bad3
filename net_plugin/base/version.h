// The version of the package that this library was built for.
#pragma once

namespace bagua_net {

// A string such as "1.0.0" or "1.0.1.dev3+g1a2b3c4d"; lives as long as the library.
const char* version();

// "Bagua-Net <version> active", one string in the library's file: `bagua-net doctor` reads the version there.
const char* active_banner();

}  // namespace bagua_net

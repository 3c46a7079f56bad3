// Random bytes from the kernel, for tokens that nobody can guess.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/status.h"

namespace bagua_net {

Status fill_random(std::uint8_t* bytes, std::size_t count);

}  // namespace bagua_net

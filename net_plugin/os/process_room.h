// ProcessRoom: how much of this process's limits is left for what it can do without: further connections, pipes. Half
// of its descriptors, and most of the host's local ports, are not for that: they are the application's, other
// processes', and those of connections that are needed.
#pragma once

namespace bagua_net {

// Descriptors that something optional may take now.
int optional_descriptors();
// Local ports that optional connections of one process may have, in all.
int optional_ports();

}  // namespace bagua_net

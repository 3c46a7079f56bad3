// The sockets that a forked child must not keep: as long as it has its copies of them, its parent's end goes unnoticed
// by the peers, and the kernel answers for a process that is gone.
//
// A bit for each descriptor, so that the child can find them without a lock or memory: it has one thread, and any lock
// may be held indefinitely in its copy of the process. A socket that another thread opens or closes at the very moment
// of a fork may be missed.
#pragma once

namespace bagua_net {

// A socket that a child is not to keep; any thread.
void mark_uninherited(int fd);
// Before it is closed; harmless for a descriptor that was never marked.
void unmark_uninherited(int fd);
// In the child, before fork() returns: async-signal-safe.
void close_uninherited();

}  // namespace bagua_net

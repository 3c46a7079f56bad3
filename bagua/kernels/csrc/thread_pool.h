// Threads that share the work of a call, and sleep between calls.
//
// One pool serves the process. A call that finds it busy with another's work does its own alone. The pool is never
// destroyed: its threads end with the process. After fork() the child has none of them, and makes its own when needed.
#pragma once

#include <cstddef>
#include <functional>

namespace bagua_kernels {

// Calls `work(i)` once for every i below `pieces`, in the caller's thread and up to `threads` - 1 others, and returns
// when all have returned. In all of them floating point behaves as the C standard's default: to nearest even, with
// subnormals. `work` must not throw and must not call this.
void run_in_parallel(size_t pieces, size_t threads, const std::function<void(size_t)>& work);

}  // namespace bagua_kernels

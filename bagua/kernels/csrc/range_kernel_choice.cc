// Which of the tables of range_kernel_*.cc this processor can run.
#include <cstring>
#include <initializer_list>

#include "range_kernel.h"

namespace bagua_kernels {

extern const RangeKernel kPortableKernel;
#if defined(BAGUA_KERNELS_X86)
extern const RangeKernel kAvx2Kernel;
extern const RangeKernel kAvx512Kernel;
#if defined(BAGUA_KERNELS_AVX512BF16)
extern const RangeKernel kAvx512Bf16Kernel;
#endif
#endif

const RangeKernel* range_kernel_named(const char* name) {
  if (std::strcmp(name, "portable") == 0) return &kPortableKernel;
#if defined(BAGUA_KERNELS_X86)
  __builtin_cpu_init();
  // Every processor with AVX2 has F16C; these checks ask the operating system's part, too.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (std::strcmp(name, "avx2") == 0 && avx2) return &kAvx2Kernel;
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
  if (std::strcmp(name, "avx512") == 0 && avx512) return &kAvx512Kernel;
#if defined(BAGUA_KERNELS_AVX512BF16)
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  if (std::strcmp(name, "avx512bf16") == 0 && bf16) return &kAvx512Bf16Kernel;
#endif
#endif
  return nullptr;
}

const RangeKernel& range_kernel() {
  static const RangeKernel& best = []() -> const RangeKernel& {
    for (const char* name : {"avx512bf16", "avx512", "avx2"}) {
      if (const RangeKernel* kernel = range_kernel_named(name)) return *kernel;
    }
    return kPortableKernel;
  }();
  return best;
}

}  // namespace bagua_kernels

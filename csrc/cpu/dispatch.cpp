#include "kernels.h"

#include <cstdlib>
#include <cstring>

namespace xlnet_kernels::cpu {

const Kernels* choose_kernels() {
  const Kernels* usable[3];
  int count = 0;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    usable[count++] = &avx512_kernels;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) usable[count++] = &avx2_kernels;
#endif
  usable[count++] = &generic_kernels;
  const char* wanted = std::getenv("XLNET_KERNELS_CPU");
  if (wanted == nullptr || *wanted == '\0') return usable[0];
  for (int i = 0; i < count; ++i)
    if (std::strcmp(wanted, usable[i]->name) == 0) return usable[i];
  return nullptr;
}

}  // namespace xlnet_kernels::cpu

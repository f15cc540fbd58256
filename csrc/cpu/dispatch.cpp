#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include "bfloat16/products.h"
#include "kernels.h"

namespace xlnet_kernels::cpu {

Choice choose_kernels() {
  Choice usable[6] = {};
  int count = 0;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    for (const Products* products : {amx_products(), avx512_products()})
      if (products != nullptr) usable[count++] = {products->name, &avx512_kernels, products};
    usable[count++] = {avx512_kernels.name, &avx512_kernels, nullptr};
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    usable[count++] = {avx2_kernels.name, &avx2_kernels, nullptr};
#elif defined(__aarch64__)
  if (const Products* products = neon_products()) usable[count++] = {products->name, &neon_kernels, products};
  usable[count++] = {neon_kernels.name, &neon_kernels, nullptr};
#endif
  usable[count++] = {generic_kernels.name, &generic_kernels, nullptr};
  const char* wanted = std::getenv("XLNET_KERNELS_CPU");
  for (int i = 0; wanted == nullptr || *wanted == '\0'; ++i)
    if (usable[i].products == nullptr || usable[i].products->is_faster) return usable[i];
  const Kernels* best = usable[0].kernels;
  usable[count++] = {best->emulated->name, best, best->emulated};
  for (int i = 0; i < count; ++i)
    if (std::strcmp(wanted, usable[i].name) == 0) return usable[i];
  return {};
}

}  // namespace xlnet_kernels::cpu

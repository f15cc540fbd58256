// What csrc/module.cpp is to the package, in Python's limited API: the facts of the build as operators of its
// namespace. _extension.py reads them.

#include <Python.h>
#include <torch/library.h>
#include <torch/version.h>

#include <sstream>

#include "autograd.h"
#include "call.h"
#include "cpu/kernels.h"
#include "cuda/kernels.h"

#ifdef CUDA_KERNEL  // kernel-builder's
#include <cuda.h>
#endif

namespace {

// "" where XLNET_KERNELS_CPU asks for one that this processor has not got
std::string cpu_instruction_set() {
  const char* name = xlnet_kernels::cpu::choose_kernels().name;
  return name == nullptr ? "" : name;
}

// A line for each kernel, its fields in the order of KernelSizes
std::string cuda_kernels() {
  std::ostringstream text;
  for (const auto& sizes : xlnet_kernels::cuda::kernel_sizes())
    text << sizes.kernel << ' ' << sizes.dtype << ' ' << sizes.head_dim << ' ' << sizes.block_m << ' ' << sizes.block_n
         << ' ' << sizes.threads << ' ' << sizes.shared_bytes << '\n';
  return text.str();
}

// 0 in a build without CUDA
int64_t cuda_version() {
#ifdef CUDA_KERNEL
  return CUDA_VERSION;
#else
  return 0;
#endif
}

int64_t cuda_shared_memory([[maybe_unused]] int64_t device) {
#ifdef CUDA_KERNEL
  return xlnet_kernels::cuda::shared_memory_limit(int(device));
#else
  return -1;
#endif
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, library) {
  library.def("cpu_instruction_set() -> str", cpu_instruction_set);
  library.def("cuda_kernels() -> str", cuda_kernels);
  library.def("cuda_version() -> int", cuda_version);
  library.def("cuda_shared_memory(int device) -> int", cuda_shared_memory);
  library.def("register_autograd(str name) -> ()", xlnet_kernels::register_autograd);
}

#define INIT_(name) PyInit_##name
#define INIT(name) INIT_(name)

PyMODINIT_FUNC INIT(TORCH_EXTENSION_NAME)() {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, XLNET_KERNELS_QUOTE(TORCH_EXTENSION_NAME), nullptr, 0,
                                   nullptr};
  return PyModule_Create(&definition);
}

// The extension module xlnet_kernels._C: what it was built with and for, and gradients of operators. Importing it runs
// the operator registrations of each register.cpp, which torch finds through the dispatcher.

#include <pybind11/pybind11.h>
#include <torch/version.h>

#include "autograd.h"
#include "cpu/bfloat16/products.h"
#include "cpu/kernels.h"
#include "cuda/heuristics.h"
#include "cuda/kernels.h"
#include "fast_path.h"

#define STRINGIFY_(...) #__VA_ARGS__
#define STRINGIFY(...) STRINGIFY_(__VA_ARGS__)

namespace {

const char* compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#elif defined(__GNUC__)
  return "g++ " __VERSION__;
#else
  return "unknown compiler";
#endif
}

// The macros come from setup.py when CUDA sources are part of the build.
#ifdef XLNET_KERNELS_CUDA_VERSION
constexpr const char* cuda_version = STRINGIFY(XLNET_KERNELS_CUDA_VERSION);
constexpr const char* cuda_architectures = STRINGIFY(XLNET_KERNELS_CUDA_ARCHITECTURES);
#else
constexpr const char* cuda_version = nullptr;
constexpr const char* cuda_architectures = nullptr;
#endif

// Name of the instruction set that the CPU kernels use here; None if XLNET_KERNELS_CPU asks for one there is not
const char* cpu_instruction_set() { return xlnet_kernels::cpu::choose_kernels().name; }

// Name of the 16-bit products that bfloat16 calls take; None if they are converted to float32
const char* cpu_bfloat16_products() {
  const xlnet_kernels::cpu::Products* products = xlnet_kernels::cpu::choose_kernels().products;
  return products == nullptr ? nullptr : products->name;
}

// Tiles, threads and shared memory of each CUDA kernel that the sources have, in a build without CUDA as well.
pybind11::list cuda_kernels() {
  using namespace pybind11::literals;
  pybind11::list found;
  for (const auto& sizes : xlnet_kernels::cuda::kernel_sizes())
    found.append(pybind11::dict("kernel"_a = sizes.kernel, "dtype"_a = sizes.dtype, "head_dim"_a = sizes.head_dim,
                                "block_m"_a = sizes.block_m, "block_n"_a = sizes.block_n, "threads"_a = sizes.threads,
                                "shared_bytes"_a = sizes.shared_bytes));
  return found;
}

// Which CUDA kernels run: for each kind the calls that it serves, the first that does being chosen.
template <typename Choices>
pybind11::list cuda_choices(const Choices& choices) {
  pybind11::list found;
  for (const auto& choice : choices) found.append(pybind11::make_tuple(choice.kernels, choice.calls));
  return found;
}
pybind11::list cuda_forward_choices() { return cuda_choices(xlnet_kernels::cuda::FORWARD_CHOICES); }
pybind11::list cuda_backward_choices() { return cuda_choices(xlnet_kernels::cuda::BACKWARD_CHOICES); }

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "Compiled kernels of xlnet_kernels, and the facts of their build.";
  module.attr("torch_version") = TORCH_VERSION;
  module.attr("compiler") = compiler();
  module.attr("cpp_standard") = static_cast<long>(__cplusplus);
  module.attr("cpu_instruction_set") = cpu_instruction_set();
  module.attr("cpu_bfloat16_products") = cpu_bfloat16_products();
  module.attr("cuda_version") = cuda_version;              // None in a build without CUDA
  module.attr("cuda_architectures") = cuda_architectures;  // e.g. "8.0;9.0+PTX"
  module.def("cuda_kernels", cuda_kernels);
  module.def("cuda_forward_choices", cuda_forward_choices);
  module.def("cuda_backward_choices", cuda_backward_choices);
  module.def("register_autograd", xlnet_kernels::register_autograd, pybind11::arg("name"),
             "Gives the operator of that name and its backward their gradients (csrc/autograd.h).");
  xlnet_kernels::add_fast_path(module.ptr());
#ifdef XLNET_KERNELS_CUDA_VERSION
  module.def("cuda_shared_memory", xlnet_kernels::cuda::shared_memory_limit, pybind11::arg("device"),
             "Bytes of shared memory that a block may have on the device of this index, -1 if there is none.");
#endif
}

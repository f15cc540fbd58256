// The extension module xlnet_kernels._C: what it was built with, and nothing else. Importing it runs the operator
// registrations of register.cpp, which torch finds through the dispatcher.

#include <pybind11/pybind11.h>
#include <torch/version.h>

#define STRINGIFY_(...) #__VA_ARGS__
#define STRINGIFY(...) STRINGIFY_(__VA_ARGS__)

namespace {

const char* compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#elif defined(__GNUC__)
  return "g++ " __VERSION__;
#elif defined(_MSC_FULL_VER)
  return "MSVC " STRINGIFY(_MSC_FULL_VER);
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

#if defined(_MSVC_LANG)
constexpr long cpp_standard = _MSVC_LANG;
#else
constexpr long cpp_standard = __cplusplus;
#endif

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "Compiled kernels of xlnet_kernels, and the facts of their build.";
  module.attr("torch_version") = TORCH_VERSION;
  module.attr("compiler") = compiler();
  module.attr("cpp_standard") = cpp_standard;
  module.attr("cuda_version") = cuda_version;              // None in a build without CUDA
  module.attr("cuda_architectures") = cuda_architectures;  // e.g. "8.0;9.0+PTX"
}

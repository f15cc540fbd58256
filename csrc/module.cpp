// The extension module xlnet_kernels._C: what it was built with and for, and nothing else. Importing it runs the
// operator registrations of each register.cpp, which torch finds through the dispatcher. Python's limited API alone, so
// that one build serves every version of Python.

#include <Python.h>
#include <torch/version.h>

#include "cpu/kernels.h"
#include "cuda/kernels.h"

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
const char* cpu_instruction_set() {
  const xlnet_kernels::cpu::Kernels* kernels = xlnet_kernels::cpu::choose_kernels();
  return kernels == nullptr ? nullptr : kernels->name;
}

PyObject* text_or_none(const char* text) { return Py_BuildValue("z", text); }

// Tiles, threads and shared memory of each CUDA kernel that the sources have, in a build without CUDA as well.
PyObject* cuda_kernels(PyObject*, PyObject*) {
  PyObject* found = PyList_New(0);
  if (found == nullptr) return nullptr;
  for (const auto& sizes : xlnet_kernels::cuda::kernel_sizes()) {
    PyObject* kernel = Py_BuildValue("{s:s, s:s, s:i, s:i, s:i, s:i, s:i}", "kernel", sizes.kernel, "dtype",
                                     sizes.dtype, "head_dim", sizes.head_dim, "block_m", sizes.block_m, "block_n",
                                     sizes.block_n, "threads", sizes.threads, "shared_bytes", sizes.shared_bytes);
    const bool appended = kernel != nullptr && PyList_Append(found, kernel) == 0;
    Py_XDECREF(kernel);
    if (!appended) {
      Py_DECREF(found);
      return nullptr;
    }
  }
  return found;
}

#ifdef XLNET_KERNELS_CUDA_VERSION
PyObject* cuda_shared_memory(PyObject*, PyObject* device) {
  const long index = PyLong_AsLong(device);
  if (index == -1 && PyErr_Occurred()) return nullptr;
  return PyLong_FromLong(xlnet_kernels::cuda::shared_memory_limit(int(index)));
}
#endif

PyMethodDef methods[] = {
    {"cuda_kernels", cuda_kernels, METH_NOARGS, "Sizes of the CUDA kernels."},
#ifdef XLNET_KERNELS_CUDA_VERSION
    {"cuda_shared_memory", cuda_shared_memory, METH_O,
     "Bytes of shared memory that a block may have on the device of this index, -1 if there is none."},
#endif
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    STRINGIFY(TORCH_EXTENSION_NAME),
    "Compiled kernels of xlnet_kernels, and the facts of their build.",
    -1,  // it keeps no state
    methods,
};

#define INIT_(name) PyInit_##name
#define INIT(name) INIT_(name)

}  // namespace

PyMODINIT_FUNC INIT(TORCH_EXTENSION_NAME)() {
  PyObject* module = PyModule_Create(&definition);
  if (module == nullptr) return nullptr;
  const struct {
    const char* name;
    PyObject* value;
  } facts[] = {
      {"torch_version", text_or_none(TORCH_VERSION)},
      {"compiler", text_or_none(compiler())},
      {"cpp_standard", PyLong_FromLong(__cplusplus)},
      {"cpu_instruction_set", text_or_none(cpu_instruction_set())},
      {"cuda_version", text_or_none(cuda_version)},              // None in a build without CUDA
      {"cuda_architectures", text_or_none(cuda_architectures)},  // e.g. "8.0;9.0+PTX"
  };
  for (const auto& fact : facts) PyModule_AddObject(module, fact.name, fact.value);
  return module;
}

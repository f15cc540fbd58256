// The Python module that `kernels` imports to load the operators: csrc has them, and the facts of the build.

#include <Python.h>

#include "inputs.h"

#define INIT_(name) PyInit_##name
#define INIT(name) INIT_(name)

PyMODINIT_FUNC INIT(TORCH_EXTENSION_NAME)() {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, XLNET_KERNELS_QUOTE(TORCH_EXTENSION_NAME), nullptr, 0,
                                   nullptr};
  return PyModule_Create(&definition);
}

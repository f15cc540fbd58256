// The fast path of plain calls on the CPU or CUDA: the checks of Python, in C++.
#pragma once

#include <Python.h>

namespace xlnet_kernels {

// Adds `fast_path` to the module. Its arguments are the fields of `Call` (xlnet_kernels/call.py),
// where max_distance, scale, deterministic and float32_precision may be None for their defaults. Returns (out, lse), or
// None for a call that `attend` of xlnet_kernels/functional.py must serve or refuse.
void add_fast_path(PyObject* module);

}  // namespace xlnet_kernels

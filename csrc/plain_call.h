// The short way of a call of the operator on the CPU or CUDA that nothing special is about.
#pragma once

#include <Python.h>

namespace xlnet_kernels {

// Adds `plain_call` to the module. Its arguments are those of the schema in xlnet_kernels/ops.py up to `deterministic`,
// where max_distance, scale and deterministic may be None for their defaults. Returns (out, lse), or None for a call
// that rel_attention of xlnet_kernels/functional.py has to look at, be it to serve it or to say what is wrong.
void add_plain_call(PyObject* module);

}  // namespace xlnet_kernels

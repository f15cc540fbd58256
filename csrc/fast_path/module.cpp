// The extension module xlnet_kernels._fast_path: makes small calls cheaper. What serves without it is the library of
// kernels, to which this one is bound by `use`, and xlnet_kernels/ops.py.

#include <pybind11/pybind11.h>
#include <torch/version.h>

#include "autograd.h"
#include "fast_path.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "Checks of plain calls, and gradients of the operators, in C++.";
  module.attr("torch_version") = TORCH_VERSION;
  module.def("register_autograd", xlnet_kernels::register_autograd, pybind11::arg("name"),
             "Gives the operator of that name and its backward their gradients (csrc/fast_path/autograd.h).");
  module.def("use", xlnet_kernels::use, pybind11::arg("entries"),
             "Lets plain calls go to the library of kernels, whose operator `entries` gave this address.");
  xlnet_kernels::add_fast_path(module.ptr());
}

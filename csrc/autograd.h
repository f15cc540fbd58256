// Gradients of the operators that xlnet_kernels/ops.py defines, wired up without Python.
#pragma once

#include <string>

namespace xlnet_kernels {

// Does for the operator of this name in our namespace, and for its backward, what ops.py does where there is no
// extension, in a tenth of the time: torch's own way, in Python, reads the schema once for every argument of every
// call.
void register_autograd(const std::string& name);

}  // namespace xlnet_kernels

"""Where the operators are: their namespace in torch.ops, which C++ has as XLNET_KERNELS_NAMESPACE (csrc/inputs.h).

Builders of Hugging Face's `kernels` write a file of this name in its place, with the same two names, that loads their
extension and has its namespace.
"""

import torch

_NAMESPACE = "xlnet_kernels"
ops = getattr(torch.ops, _NAMESPACE)


def add_op_namespace_prefix(op_name: str) -> str:
    """ "xlnet_kernels::linear" for "linear": the name by which torch.library knows an operator."""
    return f"{_NAMESPACE}::{op_name}"

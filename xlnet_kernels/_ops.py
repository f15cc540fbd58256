"""The operators' namespace in torch.ops, XLNET_KERNELS_NAMESPACE in C++ (csrc/inputs.h).

Builders of Hugging Face's `kernels` replace this file by one with the same two names, for their own extension and
namespace.
"""

import torch

_NAMESPACE = "xlnet_kernels"
ops = getattr(torch.ops, _NAMESPACE)


def add_op_namespace_prefix(op_name: str) -> str:
    """ "xlnet_kernels::linear" for "linear": an operator's name in torch.library."""
    return f"{_NAMESPACE}::{op_name}"

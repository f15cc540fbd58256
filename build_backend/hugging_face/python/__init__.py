"""Transformer-XL and XLNet attention, forward and backward, memory linear in length.

The operator, masks and modules of the package `xlnet_kernels`, whose documentation applies. The XLNet model,
pre-training and the integrations of the package are left out.
"""

from . import layers
from ._version import __version__
from .attention import TwoStreamAttention
from .backends import Available, Unavailable, backends
from .functional import rel_attention
from .integrations.conformer import RelPositionAttention, conformer_positions
from .linear import Linear
from .masks import RankMask
from .positions import relative_positions
from .segments import Segments

__all__ = [
    "Available",
    "Linear",
    "RankMask",
    "RelPositionAttention",
    "Segments",
    "TwoStreamAttention",
    "Unavailable",
    "__version__",
    "backends",
    "conformer_positions",
    "layers",
    "rel_attention",
    "relative_positions",
]

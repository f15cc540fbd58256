"""Declaration of the operator's arguments.

`Call` has a field for each, in the order of the schema. The schema (ops.py), checks (call_checks.py), autocast,
sharding and ring attention are loops over its fields and axes. A layer raises an error for an argument that it does not
support. csrc/inputs.h has the list in C++, and tests/operator/test_call.py compares the two.
"""

import re
from typing import Annotated, Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from .masks import RankMask
from .segments import Segments
from .two_streams import RowPositions, split_positions


class Argument(NamedTuple):
    """A tensor among the operator's arguments.

    axes: a letter for each dimension: B sequences, H heads, L query rows, K keys of the segment, M of the memory,
        T = M + K, P rows of rel_key, D = head_dim, S = 2 kinds of segments. A lower-case letter stands for its size or
        1; "[B]" for a dimension that may be left out. Empty: not an axis of the problem.
    is_floating: whether it has query's dtype; autocast casts it.
    has_gradient: whether it is differentiable; true for the first fields of `Call`.
    label: its name in `rel_attention`, for errors.
    """

    axes: str
    is_floating: bool = False
    has_gradient: bool = False
    label: str = ""

    def axes_of(self, tensor: Tensor) -> str:
        """The axes of this tensor, without those that it leaves out."""
        core = self.axes.removeprefix("[B]")
        return "B" + core if core != self.axes and tensor.dim() > len(core) else core


def _rows(axes: str, label: str = "") -> Argument:
    return Argument(axes, is_floating=True, has_gradient=True, label=label)


class Call(NamedTuple):
    """One call of the operator: the arguments of `rel_attention` as kernels take them.

    query_positions (B, L): the position of row n. With query_order: the positions in ascending order, the n-th being
    that of row query_order[b, n]. dropout_state: see dropout.py; set where dropout_p > 0.
    """

    query: Annotated[Tensor, _rows("BHLD")]
    key: Annotated[Tensor, _rows("BHKD")]
    value: Annotated[Tensor, _rows("BHKD")]
    rel_key: Annotated[Tensor, _rows("[B]HPD")]
    content_bias: Annotated[Tensor | None, _rows("HD")] = None
    position_bias: Annotated[Tensor | None, _rows("HD")] = None
    memory_key: Annotated[Tensor | None, _rows("BHMD", "memory[0]")] = None
    memory_value: Annotated[Tensor | None, _rows("BHMD", "memory[1]")] = None
    segment_embed: Annotated[Tensor | None, _rows("SHD", "segments.embed")] = None
    segment_bias: Annotated[Tensor | None, _rows("HD", "segments.bias")] = None
    query_ids: Annotated[Tensor | None, Argument("BL", label="segments.query_ids")] = None
    key_ids: Annotated[Tensor | None, Argument("BT", label="segments.key_ids")] = None
    query_rank: Annotated[Tensor | None, Argument("bL", label="mask.query_rank")] = None
    key_rank: Annotated[Tensor | None, Argument("bT", label="mask.key_rank")] = None
    query_floor: Annotated[Tensor | None, Argument("bL", label="mask.query_floor")] = None
    sees_self: Annotated[Tensor | None, Argument("bL", label="mask.sees_self")] = None
    mask: Annotated[Tensor | None, Argument("bhlt")] = None
    query_positions: Annotated[Tensor | None, Argument("BL")] = None
    query_order: Annotated[Tensor | None, Argument("BL", label="query_positions")] = None
    dropout_state: Annotated[Tensor | None, Argument("")] = None
    # `rel_attention` takes None for defaults, and call_checks.py fills them in
    max_distance: int = None  # type: ignore[assignment]
    dropout_p: float = 0.0
    scale: float = None  # type: ignore[assignment]
    deterministic: bool = None  # type: ignore[assignment]
    float32_precision: int = None  # type: ignore[assignment]  # Float32Precision of csrc/inputs.h


def _table() -> dict[str, Argument]:
    found = {}
    for name, hint in get_type_hints(Call, include_extras=True).items():
        for argument in getattr(hint, "__metadata__", ()):
            found[name] = argument._replace(label=argument.label or name)
    return found


TENSORS = _table()  # by name, in the schema's order
INPUT_NAMES = tuple(TENSORS)
NUMBERS = Call._fields[len(TENSORS) :]
DIFFERENTIABLE = sum(argument.has_gradient for argument in TENSORS.values())  # leading fields only
ROWS = tuple(name for name, argument in TENSORS.items() if re.fullmatch("BH[LKM]D", argument.axes))

PLACE = {name: index for index, name in enumerate(Call._fields)}
_BLANK: list[Any] = [Call._field_defaults.get(name) for name in Call._fields[4:]]


def _places(first: str, last: str) -> slice:
    return slice(PLACE[first], PLACE[last] + 1)


_MEMORY, _SEGMENTS = _places("memory_key", "memory_value"), _places("segment_embed", "key_ids")
_RANKS, _POSITIONS = _places("query_rank", "sees_self"), _places("query_positions", "query_order")


def collect(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rel_key: Tensor,
    *,
    segments: Segments | None = None,
    mask: RankMask | Tensor | None = None,
    query_positions: Tensor | RowPositions | None = None,
    memory: tuple[Tensor, Tensor] | None = None,
    **others: Any,
) -> Call:
    """The call of `rel_attention` with these arguments, not checked.

    others: fields of `Call` under their own names.

    Raises:
        ValueError: segments or memory have another type.
    """
    # A list, because keywords of a named tuple cost a small call a tenth of its time.
    values = [query, key, value, rel_key, *_BLANK]
    for name, given in others.items():
        if name not in PLACE:
            raise TypeError(f"the operator has no argument {name!r}")
        values[PLACE[name]] = given
    if segments is not None:
        if not isinstance(segments, Segments):
            raise ValueError(f"segments must be xlnet_kernels.Segments or None, got {type(segments).__name__}")
        values[_SEGMENTS] = segments.embed, segments.bias, segments.query_ids, segments.key_ids
    if isinstance(mask, RankMask):
        values[_RANKS] = rank_vectors(mask)
    elif mask is not None:
        values[PLACE["mask"]] = mask
    if query_positions is not None:
        values[_POSITIONS] = split_positions(query_positions)
    if memory is not None:
        if not isinstance(memory, (tuple, list)) or len(memory) != 2:
            raise ValueError(f"memory must be a pair (mem_key, mem_value), got {type(memory).__name__}")
        if not (isinstance(memory[0], Tensor) and isinstance(memory[1], Tensor)):
            index = int(isinstance(memory[0], Tensor))
            raise ValueError(f"memory[{index}] must be a tensor, got {type(memory[index]).__name__}")
        values[_MEMORY] = memory
    # Not `_make`, because torch 2.6 does not compile it.
    return Call(*values)


def rank_vectors(mask: RankMask) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """query_rank, key_rank, query_floor and sees_self as `Call` has them."""
    sees_self: bool | Tensor | None = mask.sees_self
    if isinstance(sees_self, bool):
        sees_self = torch.ones_like(mask.query_rank, dtype=torch.bool) if sees_self else None
    return mask.query_rank, mask.key_rank, mask.query_floor, sees_self


def replace(call: Call, **changes: Any) -> Call:
    """The call with other values, without `_replace`, to avoid relying on a compiler's support of it."""
    values: list[Any] = list(call)
    for name, value in changes.items():
        values[PLACE[name]] = value
    return Call(*values)


def positions_by_row(positions: Tensor | None, order: Tensor | None) -> Tensor | None:
    """(B, L), the position of each query row, of query_positions and query_order; None: row i is at position i."""
    if positions is None or order is None:
        return positions
    return torch.zeros_like(positions).scatter(1, order.long(), positions)


def mem_len(call: Call) -> int:
    """M, the number of memory keys."""
    return 0 if call.memory_key is None else call.memory_key.shape[2]


def with_memory(memory: Tensor | None, current: Tensor) -> Tensor:
    """Keys or values (B, H, M + K, D), memory first."""
    return current if memory is None else torch.cat([memory, current], 2)

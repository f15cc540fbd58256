"""Outputs of models: dictionaries of the existing entries, also accessible by index and attribute."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import Tensor

from .._torch import register_output
from .memory import ProjectedMemory


class ModelOutput(OrderedDict):
    """Ordered dictionary of tensors by name, like transformers' outputs.

    A value that was not requested is not an entry: ``len``, ``keys()`` and indices skip it, and its attribute is None.
    ``out[0]`` and ``out[:2]`` index the entries, ``out.to_tuple()`` has all of them; iteration is over names. The
    constructor takes a dictionary's arguments and drops entries that are None. Attributes and entries can be set.

    >>> out = XLNetOutput(last_hidden_state=torch.zeros(2, 7, 32), mems=None, attentions=())
    >>> list(out), out["last_hidden_state"] is out[0] is out.last_hidden_state, out.mems
    (['last_hidden_state', 'attentions'], True, None)
    """

    _names: tuple[str, ...] = ()

    def __init_subclass__(cls) -> None:
        cls._names = (*cls._names, *cls.__annotations__)
        register_output(cls)

    def __init__(self, *entries: Any, **named: Any) -> None:
        super().__init__()
        for name, value in dict(*entries, **named).items():
            if value is not None:
                self[name] = value

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else self.to_tuple()[key]

    def __getattr__(self, name: str) -> Any:
        if name not in self._names:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return self.get(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if value is None:
            self.pop(name, None)
        else:
            self[name] = value

    def __reduce__(self) -> tuple:
        return type(self), (dict(self),)  # a form supported by torch.load(weights_only=True)

    def to_tuple(self) -> tuple:
        """The existing entries, in order."""
        return tuple(self.values())


class XLNetOutput(ModelOutput):
    """Output of `XLNetModel`; values not requested are None.

    last_hidden_state: (B, N, d_model) of the targets if any, else (B, L, d_model).
    mems: one (M, B, d_model) per layer, detached, or `ProjectedMemory` if given one.
    hidden_states: the input of every layer and the last output, (B, L, d_model); with targets h and g alternate.
    attentions: per layer (B, H, L, M + L) after dropout; with targets a pair (content, query) of these.
    """

    last_hidden_state: Tensor
    mems: list[Tensor] | ProjectedMemory | None
    hidden_states: tuple[Tensor, ...] | None
    attentions: tuple | None


class HeadOutput(ModelOutput):
    """Output of the language model, classifiers and multiple choice.

    `loss` with labels, `logits`, and the rest of `XLNetOutput`.
    """

    loss: Tensor | None
    logits: Tensor
    mems: list[Tensor] | ProjectedMemory | None
    hidden_states: tuple[Tensor, ...] | None
    attentions: tuple | None


class SpanOutput(ModelOutput):
    """Output of `XLNetForQuestionAnsweringSimple`: start_logits and end_logits (B, L)."""

    loss: Tensor | None
    start_logits: Tensor
    end_logits: Tensor
    mems: list[Tensor] | ProjectedMemory | None
    hidden_states: tuple[Tensor, ...] | None
    attentions: tuple | None


class BeamOutput(ModelOutput):
    """Output of `XLNetForQuestionAnswering`: `loss` in training, the other entries without answers.

    start_top_log_probs, start_top_index: (B, S), the S = min(start_n_top, L) likeliest starts.
    end_top_log_probs, end_top_index: (B, E * S), E = min(end_n_top, L) ends for each; entry e * S + s belongs to
        start s.
    cls_logits: (B,), higher where the question has no answer.

    The log-probabilities are logarithms; transformers' fields of these names hold probabilities.
    """

    loss: Tensor | None
    start_top_log_probs: Tensor | None
    start_top_index: Tensor | None
    end_top_log_probs: Tensor | None
    end_top_index: Tensor | None
    cls_logits: Tensor | None
    mems: list[Tensor] | ProjectedMemory | None
    hidden_states: tuple[Tensor, ...] | None
    attentions: tuple | None


def rest_of(output: XLNetOutput) -> dict[str, Any]:
    """The encoder's output without the last hidden state."""
    return {name: value for name, value in output.items() if name != "last_hidden_state"}

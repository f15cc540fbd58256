"""XLNetConfig: the hyperparameters under the names of public config.json files."""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch.nn.functional as F

from .._checks import shortened
from .files import entry_of, read_json, write_whole

ACTIVATIONS = {
    "gelu": F.gelu,  # exact, with erf
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),  # the original XLNet's
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": F.tanh,
}
_ALIASES = {
    "n_token": "vocab_size",
    "hidden_size": "d_model",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
# Limit of all sizes, because kernels count rows and columns in 32 bits.
_LARGEST = 2**31 - 1


@dataclass
class XLNetConfig:
    """Hyperparameters of XLNet, of a Transformer-XL (``attn_type="uni"``), or of a plain encoder.

    Args:
        vocab_size, d_model, n_layer, n_head, d_inner: sizes. d_head: width of a head, default d_model / n_head.
        ff_activation: "gelu" (erf), "gelu_new" (tanh, the original's), "relu", "silu", "swish" or "tanh".
        attn_type: "bi", or "uni" where keys ahead are invisible.
        dropout: everywhere but in the summary. layer_norm_eps: of LayerNorm. initializer_range: standard deviation.
        pad_token_id, bos_token_id, eos_token_id: ids of the vocabulary; None, -1 or an id beyond it for none.
        mem_len: memory positions kept; None or 0 keeps everything. reuse_len: number of first tokens of a segment that
            enter the memory; None or 0 for all. use_mems_eval, use_mems_train: whether memory is returned.
        bi_data: the second half of each batch is reversed text.
        clamp_len: limit beyond which distances are equal, -1 for no limit.
        same_length: with "uni", every position sees itself and as many keys as there are memory positions.
        summary_*: options of the sequence vector (`XLNetForSequenceClassification`, `XLNetForMultipleChoice`).
        start_n_top, end_n_top: beam of `XLNetForQuestionAnswering`.
        num_labels, problem_type: of the classification heads; problem_type None: chosen by num_labels and label dtype.
        tie_word_embeddings: whether the language model's output weight is the embedding.
        output_attentions, output_hidden_states: defaults of the model's arguments.
        extra: unknown entries of a config.json; they are written back.

    Raises:
        ValueError: a value is impossible; the text names it.

    >>> config = XLNetConfig(vocab_size=100, d_model=32, n_layer=2, n_head=4, d_inner=64)
    >>> config.d_head, XLNetConfig.from_dict(config.to_dict()) == config
    (8, True)
    """

    model_type: ClassVar[str] = "xlnet"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["mems"]  # Trainer's predictions are without these

    vocab_size: int = 32000
    d_model: int = 1024
    n_layer: int = 24
    n_head: int = 16
    d_inner: int = 4096
    d_head: int | None = None
    ff_activation: str = "gelu"
    attn_type: str = "bi"
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    dropout: float = 0.1
    mem_len: int | None = 512
    reuse_len: int | None = None
    use_mems_eval: bool = True
    use_mems_train: bool = False
    bi_data: bool = False
    clamp_len: int = -1
    same_length: bool = False
    summary_type: str = "last"
    summary_use_proj: bool = True
    summary_activation: str | None = "tanh"
    summary_proj_to_labels: bool = False
    summary_first_dropout: float = 0.0
    summary_last_dropout: float = 0.1
    start_n_top: int = 5
    end_n_top: int = 5
    num_labels: int = 2
    problem_type: str | None = None
    pad_token_id: int | None = 5
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = True
    output_attentions: bool = False
    output_hidden_states: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "n_layer", "n_head", "d_inner", "start_n_top", "end_n_top", "num_labels"):
            self._check_integer(name, 1)
        for name in ("mem_len", "reuse_len"):
            self._check_integer(name, 0, optional=True)
        for name in ("pad_token_id", "bos_token_id"):
            self._check_integer(name, -1, optional=True)
        self._check_stop_tokens()
        self._check_integer("clamp_len", -1)
        if self.d_head is None:
            if self.d_model % self.n_head:
                raise ValueError(
                    f"d_head must be given where d_model ({self.d_model}) is no multiple of n_head ({self.n_head})"
                )
            self.d_head = self.d_model // self.n_head
        self._check_integer("d_head", 1)
        if self.d_model % 2:
            raise ValueError(f"d_model must be even for sinusoidal positions, got {self.d_model}")
        for name in ("dropout", "summary_first_dropout", "summary_last_dropout"):
            self._check_number(name, 0 <= _real(getattr(self, name)) < 1, "in [0, 1)")
        self._check_number("layer_norm_eps", 0 < _real(self.layer_norm_eps) < math.inf, "a finite number above 0")
        self._check_number(
            "initializer_range", 0 <= _real(self.initializer_range) < math.inf, "a finite number of at least 0"
        )
        for field_ in dataclasses.fields(self):
            if isinstance(field_.default, bool) and not isinstance(getattr(self, field_.name), bool):
                raise ValueError(f"{field_.name} must be true or false, got {shortened(getattr(self, field_.name))}")
        self._check_choice("attn_type", ("bi", "uni"))
        self._check_choice("ff_activation", tuple(ACTIVATIONS))
        self._check_choice("summary_activation", (None, *ACTIVATIONS))
        self._check_choice("summary_type", ("last", "first", "mean"))
        problems = (None, "regression", "single_label_classification", "multi_label_classification")
        self._check_choice("problem_type", problems)
        if not isinstance(self.extra, dict) or not all(isinstance(name, str) for name in self.extra):
            raise ValueError(f"extra must be a dictionary of entries by name, got {shortened(self.extra)}")
        self._check_labels()
        if self.extra.get("untie_r", True) is not True:
            raise ValueError("untie_r must be true: biases shared by all layers are not supported")

    def _check_integer(self, name: str, least: int, optional: bool = False) -> None:
        value = getattr(self, name)
        if optional and value is None:
            return
        if not _is_integer(value, least):
            none = "None or " if optional else ""
            bound = f"at most {_LARGEST}" if _is_integer(value, least, math.inf) else f"at least {least}"
            raise ValueError(f"{name} must be {none}an integer of {bound}, got {shortened(value)}")
        # Because config.json cannot hold a numpy integer.
        setattr(self, name, int(value))

    def _check_stop_tokens(self) -> None:
        if not isinstance(self.eos_token_id, (list, tuple)):
            self._check_integer("eos_token_id", -1, optional=True)
        elif not all(_is_integer(value, -1) for value in self.eos_token_id):
            got = shortened(self.eos_token_id)
            raise ValueError(f"eos_token_id must be None or one or several integers of at least -1, got {got}")
        else:
            self.eos_token_id = [int(value) for value in self.eos_token_id]

    def _check_labels(self) -> None:
        for name, content in (("id2label", "names by number"), ("label2id", "numbers by name")):
            found = self.extra.get(name)
            valid = found is None or isinstance(found, dict)
            if found and valid and name == "id2label":
                valid = all(str(i).isdecimal() and isinstance(label, (str, int)) for i, label in found.items())
            if not valid:
                raise ValueError(f"{name} must be a dictionary of {content}, got {shortened(found)}")

    def _check_number(self, name: str, valid: bool, needed: str) -> None:
        value = getattr(self, name)
        if not valid:
            raise ValueError(f"{name} must be {needed}, got {shortened(value)}")
        if type(value) is not int:
            setattr(self, name, float(value))

    def _check_choice(self, name: str, choices: tuple) -> None:
        value = getattr(self, name)
        if not isinstance(value, (str, type(None))) or value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {shortened(value)}")

    def __getattr__(self, name: str) -> Any:
        """Fields by their aliases, and entries of `extra`, for code that reads transformers' configurations."""
        fields = vars(self)
        if name in _ALIASES and _ALIASES[name] in fields:
            return fields[_ALIASES[name]]
        if name in fields.get("extra", ()):
            return fields["extra"][name]
        raise AttributeError(f"XLNetConfig has no attribute {name!r}")

    @property
    def id2label(self) -> dict[int, str]:
        """The classes' names, by default LABEL_0, ..."""
        names = self.extra.get("id2label")
        if names is None or len(names) != self.num_labels:
            names = dict(enumerate(_default_labels(self.num_labels)))
        return {int(i): name for i, name in names.items()}

    @property
    def label2id(self) -> dict[str, int]:
        """The classes' numbers."""
        return {name: i for i, name in self.id2label.items()}

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> XLNetConfig:
        """The configuration itself, because it has no other part."""
        return self

    @classmethod
    def of(cls, config: Any) -> XLNetConfig:
        """`config` itself, or a new one with the entries of transformers' configuration of an XLNet.

        Raises:
            ValueError: `config` is neither, or has an impossible value.
        """
        if isinstance(config, XLNetConfig):
            return config
        if getattr(config, "model_type", None) == "xlnet" and hasattr(config, "to_dict"):
            return cls.from_dict(config.to_dict())
        kind = f"{type(config).__module__}.{type(config).__name__}"
        raise ValueError(f"config must be an XLNetConfig, or transformers' of an XLNet, got {kind}")

    @classmethod
    def from_dict(cls, entries: dict[str, Any]) -> XLNetConfig:
        """The configuration from a config.json's content; unknown entries go to `extra`.

        Raises:
            ValueError: another model's configuration, or an impossible value.
        """
        if not isinstance(entries, dict) or entries.get("model_type", "xlnet") != "xlnet":
            got = entries.get("model_type") if isinstance(entries, dict) else type(entries).__name__
            raise ValueError(f'config must be a dictionary with model_type "xlnet", got {shortened(got)}')
        for old, name in _ALIASES.items():
            if old in entries and name in entries and entries[old] != entries[name]:
                raise ValueError(
                    f"{old} and {name} must agree, got {shortened(entries[old])} and {shortened(entries[name])}"
                )
        entries = {_ALIASES.get(name, name): value for name, value in entries.items() if name != "model_type"}
        labels = entries.get("id2label")
        if isinstance(labels, dict):
            entries.setdefault("num_labels", len(labels))
            if list(labels.values()) == _default_labels(len(labels)):
                entries = {name: value for name, value in entries.items() if name not in ("id2label", "label2id")}
        names = {f.name for f in dataclasses.fields(cls)} - {"extra"}
        known = {name: value for name, value in entries.items() if name in names}
        return cls(**known, extra={name: value for name, value in entries.items() if name not in names})

    @classmethod
    def from_file(cls, path: str | Path) -> XLNetConfig:
        """The configuration in a config.json, or in the config.json of a folder.

        Raises:
            FileNotFoundError: there is no config.json.
            OSError: it cannot be read.
            ValueError: it is not JSON, of another model, or has an impossible value; the text names the file.
        """
        path = entry_of(Path(path), "config.json")
        entries = read_json(path)
        try:
            return cls.from_dict(entries)
        # RecursionError, because comparing deeply nested values exhausts the stack.
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """The content of config.json, in transformers' format."""
        entries = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "extra"}
        entries = {**self.extra, "model_type": "xlnet", **entries}
        # transformers takes the number of labels from their names.
        if len(entries.get("id2label") or ()) != entries.pop("num_labels"):
            labels = _default_labels(self.num_labels)
            entries["id2label"] = {str(i): label for i, label in enumerate(labels)}
            entries["label2id"] = {label: i for i, label in enumerate(labels)}
        return entries

    def save(self, folder: str | Path, **entries: Any) -> None:
        """Write config.json, with additional `entries`, into `folder`, atomically; makes the folder."""
        text = json.dumps(self.to_dict() | entries, indent=2, sort_keys=True) + "\n"
        write_whole(Path(folder) / "config.json", lambda path: path.write_text(text, encoding="utf-8"))


def _default_labels(count: int) -> list[str]:
    return [f"LABEL_{i}" for i in range(count)]


def _is_integer(value: object, least: int, largest: float = _LARGEST) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and least <= int(value) <= largest


def _real(value: object) -> float:
    """The number as a float; NaN for anything else, because it lies in no range."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf

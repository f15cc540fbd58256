"""Checkpoint folders in the public layout: config.json beside model.safetensors or pytorch_model.bin."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from ..attention import TwoStreamAttention
from .config import XLNetConfig
from .files import entry_of, write_whole
from .interface import ModelInterface
from .weights import DTYPES, NEEDED, WEIGHTS, owned, read_weights, some

_ENCODER, _EMBEDDING, _OUTPUT = "transformer.", "transformer.word_embedding.weight", "lm_loss.weight"
# Modules besides the encoder, in any published model; a bare encoder may ignore these.
_HEADS = (
    "lm_loss",
    "sequence_summary",
    "logits_proj",
    "classifier",
    "qa_outputs",
    "start_logits",
    "end_logits",
    "answer_class",
)


class PretrainedModel(ModelInterface):
    """Base class of models with a configuration, an initialisation and a folder."""

    def __init__(self, config: XLNetConfig) -> None:
        super().__init__()
        self.config = XLNetConfig.of(config)
        self.name_or_path = str(self.config.extra.get("_name_or_path", ""))  # the folder of `from_pretrained`

    def init_weights(self, module: nn.Module) -> None:
        """XLNet's initialisation of one module: normal(0, config.initializer_range), biases zero."""
        std = self.config.initializer_range
        if isinstance(module, TwoStreamAttention):
            module.reset_parameters(std)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=std)
            bias = getattr(module, "bias", None)
            if isinstance(bias, Tensor):
                nn.init.zeros_(bias)

    def init_head(self, device: torch.device | str | None = None) -> None:
        """Initialise all modules but the encoder; with `device`, meta tensors become real tensors."""
        for name, child in self.named_children():
            if name != "transformer":
                if device is not None:
                    child.to_empty(device=device)
                child.apply(self.init_weights)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        config: XLNetConfig | None = None,
        backend: str | None = None,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        new_head: bool = False,
        output_loading_info: bool = False,
        torch_dtype: torch.dtype | str | None = None,
        **entries: Any,
    ) -> Any:
        """Load the model of a folder, in evaluation mode; later changes of the files do not affect it.

        The folder holds config.json and model.safetensors, its sharded form with model.safetensors.index.json, or
        pytorch_model.bin, as published and as transformers writes them. `XLNetModel` reads the encoder of any model. A
        model with a head needs that head in the file.

        Args:
            folder: a path; nothing is downloaded. `huggingface_hub.snapshot_download(name)` fetches a model of the
                Hugging Face Hub and returns its folder.
            config: instead of the folder's config.json.
            backend: of the attention.
            dtype: of all parameters, or its name ("bfloat16"); None or "auto" keeps the file's (the widest in it).
            device: of the parameters; default the CPU.
            new_head: initialise a new head and ignore the file's head, to start a fine-tuning.
            output_loading_info: also return a dictionary as in transformers: missing_keys are the parameters of a new
                head, unexpected_keys those of the file that the model lacks. Any other difference is an error.
            torch_dtype: old name of `dtype`.
            entries: fields of the configuration in place of its own, such as num_labels.

        Raises:
            FileNotFoundError: the folder, its config.json or its weights are missing.
            OSError: `folder` is a file, or a file in it cannot be read; the text names it.
            ValueError: `dtype` is not a supported floating-point dtype, a file is damaged, or parameters are missing,
                unexpected or of the wrong shape. The text names them, and nothing is loaded.
            TypeError: an argument is unknown.
        """
        folder = Path(folder)
        if entry_of(folder, "config.json") == folder:
            raise NotADirectoryError(f"folder must hold config.json and weights, got the file {str(folder)!r}")
        config = XLNetConfig.from_file(folder) if config is None else XLNetConfig.of(config)
        unknown = entries.keys() - {field.name for field in dataclasses.fields(config)}
        if unknown:
            raise TypeError(f"from_pretrained has no argument, and XLNetConfig no field, named {some(sorted(unknown))}")
        config = dataclasses.replace(config, **entries) if entries else config
        dtype = torch_dtype if dtype is None else dtype
        if isinstance(dtype, str):
            dtype = None if dtype == "auto" else _dtype_named(dtype)
        if dtype not in (None, *DTYPES):
            raise ValueError(f"dtype must be None or one of {NEEDED}, got {dtype}")
        path, state = read_weights(folder)
        _check_sizes(state, config, path, cls.__name__)
        in_file = set(state)
        with torch.device("meta"):
            make: Any = cls  # the models, unlike this base class, take a backend
            model = make(config, backend)
        state = _match(state, model, path, new_head)
        dtype = dtype or reduce(torch.promote_types, {x.dtype for x in state.values()})
        model.load_state_dict(owned(state), strict=False, assign=True)
        if new_head:
            model.init_head(device="cpu")
        model.tie_weights()
        model.name_or_path = str(folder)
        model.to(device=device, dtype=dtype).eval()
        if not output_loading_info:
            return model
        unread = {x for x in in_file if not state.keys() & {x, _ENCODER + x, x.removeprefix(_ENCODER)}}
        missing = model.state_dict().keys() - state.keys()
        return model, dict(missing_keys=missing, unexpected_keys=unread, mismatched_keys=set(), error_msgs=[])

    def save_pretrained(self, folder: str | Path) -> None:
        """Write model.safetensors and config.json as transformers does; each file is replaced atomically."""
        state = dict(self.state_dict())
        if self.config.tie_word_embeddings and _EMBEDDING in state:
            state.pop(_OUTPUT, None)
        state = {name: x.detach().contiguous() for name, x in state.items()}
        folder = Path(folder)
        write_whole(folder / WEIGHTS, lambda path: safetensors.torch.save_file(state, path, {"format": "pt"}))
        self.config.save(folder, architectures=[type(self).__name__], dtype=str(next(self.parameters()).dtype)[6:])


def _dtype_named(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f'dtype must be a torch.dtype, its name, "auto" or None, got {name!r}')
    return found


def _check_sizes(state: dict[str, Tensor], config: XLNetConfig, path: Path, kind: str) -> None:
    """Refuse a file whose encoder has other sizes than `config`, to avoid building an impossibly large model.

    Raises:
        ValueError: the file has another number of layers, lacks tensors that show the sizes, or has other sizes.
    """
    prefix = _ENCODER if any(name.startswith(_ENCODER) for name in state) else ""
    pattern = re.compile(rf"{re.escape(prefix)}layer\.(\d+)\.")
    layers = len({found[1] for found in map(pattern.match, state) if found})
    width = config.d_model
    sizes = {
        "word_embedding.weight": (config.vocab_size, width),
        "layer.0.rel_attn.q": (width, config.n_head, config.d_head),
        "layer.0.ff.layer_1.weight": (config.d_inner, width),
    }
    expected = {prefix + name: shape for name, shape in sizes.items()}
    missing = expected.keys() - state
    foreign = len(missing) == len(expected)
    wrong = _other_shapes(state, expected)
    if layers != config.n_layer and not foreign:
        wrong.append(f"{layers} layers instead of {config.n_layer}")
    _refuse({"missing": missing, "unexpected": state if foreign else (), "wrong": wrong}, path, kind)


def _match(state: dict[str, Tensor], model: PretrainedModel, path: Path, new_head: bool) -> dict[str, Tensor]:
    """The file's tensors under the model's names.

    Raises:
        ValueError: the tensors are not exactly those of the model.
    """
    expected = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    if not hasattr(model, "transformer"):
        if any(name.startswith(_ENCODER) for name in state):
            state = {n.removeprefix(_ENCODER): x for n, x in state.items() if n.split(".")[0] not in _HEADS}
    else:
        if _EMBEDDING.removeprefix(_ENCODER) in state:  # an encoder's file
            state = {n if n.split(".")[0] in _HEADS else _ENCODER + n: x for n, x in state.items()}
        if new_head:
            expected = {name: shape for name, shape in expected.items() if name.startswith(_ENCODER)}
            state = {name: x for name, x in state.items() if name.split(".")[0] not in _HEADS}
        elif _OUTPUT in expected and model.config.tie_word_embeddings and _EMBEDDING in state:
            embedding = state[_EMBEDDING]
            output = state.setdefault(_OUTPUT, embedding)
            comparable = embedding.dtype in DTYPES  # other dtypes are refused below
            if output.dtype != embedding.dtype or (comparable and not torch.equal(output, embedding)):
                raise ValueError(f"{path}: {_OUTPUT} is not {_EMBEDDING}, as tie_word_embeddings says it should be")
    missing, unexpected = expected.keys() - state, state.keys() - expected
    heads = hasattr(model, "transformer") and all(n.split(".")[0] in _HEADS for n in missing | unexpected)
    hint = ". new_head=True starts with a new head" if heads and not new_head else ""
    wrong = _other_shapes(state, expected)
    wrong += [f"{name} of {x.dtype} instead of {NEEDED}" for name, x in state.items() if x.dtype not in DTYPES]
    found = {"missing": missing, "unexpected": unexpected, "wrong": wrong}
    _refuse(found, path, type(model).__name__, hint)
    return state


def _other_shapes(state: dict[str, Tensor], expected: Mapping[str, tuple[int | None, ...]]) -> list[str]:
    return [
        f"{name} {tuple(x.shape)} instead of {expected[name]}"
        for name, x in state.items()
        if name in expected and tuple(x.shape) != expected[name]
    ]


def _refuse(problems: Mapping[str, Collection[str]], path: Path, kind: str, hint: str = "") -> None:
    found = "; ".join(f"{problem}: {some(names)}" for problem, names in problems.items() if names)
    if found:
        raise ValueError(f"{path} is no checkpoint of {kind} of this config: {found}{hint}")

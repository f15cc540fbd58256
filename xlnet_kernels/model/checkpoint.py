"""Folders in the public layout: config.json beside model.safetensors or pytorch_model.bin."""

from __future__ import annotations

import dataclasses
import json
import pickle
from functools import reduce
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ..attention import TwoStreamAttention
from .config import XLNetConfig
from .files import write_whole
from .interface import ModelInterface

_WEIGHTS, _OLD_WEIGHTS = "model.safetensors", "pytorch_model.bin"
_ENCODER, _EMBEDDING, _OUTPUT = "transformer.", "transformer.word_embedding.weight", "lm_loss.weight"
# Modules beside the encoder, in any published model: what an encoder alone may leave in the file.
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
    """A model with a configuration, an initialisation and a folder."""

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
        """Initialises what is not the encoder; `device` makes tensors of meta tensors."""
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
        """The model of a folder, in evaluation mode.

        The folder holds config.json and model.safetensors, its sharded form with model.safetensors.index.json, or
        pytorch_model.bin, as published and as transformers writes them. `XLNetModel` reads the encoder of any model; a
        model with a head needs that head in the file.

        Args:
            folder: a path; nothing is downloaded.
            config: instead of the folder's config.json.
            backend: of the attention.
            dtype: of all parameters, or its name ("bfloat16"); None or "auto" keeps the file's (the widest in it).
            device: where the parameters go; default the CPU.
            new_head: initialise the head anew, whatever head the file has: the start of a fine-tuning.
            output_loading_info: return the model and a dictionary as transformers does: missing_keys are the parameters
                of a new head, unexpected_keys those of the file that the model has not got; nothing else is let pass.
            torch_dtype: the older name of `dtype`.
            entries: fields of the configuration in place of its own, such as num_labels.

        Raises:
            FileNotFoundError: config.json or the weights are missing.
            ValueError: a file is damaged, or parameters are missing, unexpected or of the wrong shape; the text names
                them, and nothing is loaded.
        """
        folder = Path(folder)
        config = XLNetConfig.from_file(folder) if config is None else XLNetConfig.of(config)
        config = dataclasses.replace(config, **entries) if entries else config
        dtype = torch_dtype if dtype is None else dtype
        if isinstance(dtype, str):
            dtype = None if dtype == "auto" else _dtype_named(dtype)
        path, state = read_weights(folder)
        in_file = set(state)
        with torch.device("meta"):
            make: Any = cls  # the models, unlike this base class, take a backend
            model = make(config, backend)
        state = _match(state, model, path, new_head)
        dtype = dtype or reduce(torch.promote_types, {x.dtype for x in state.values()})
        model.load_state_dict(state, strict=False, assign=True)
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
        """Writes model.safetensors and config.json as transformers does; each file is whole at any moment."""
        state = dict(self.state_dict())
        if self.config.tie_word_embeddings and _EMBEDDING in state:
            state.pop(_OUTPUT, None)
        state = {name: x.detach().contiguous() for name, x in state.items()}
        folder = Path(folder)
        write_whole(folder / _WEIGHTS, lambda path: safetensors.torch.save_file(state, path, {"format": "pt"}))
        self.config.save(folder, architectures=[type(self).__name__], dtype=str(next(self.parameters()).dtype)[6:])


def _dtype_named(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f'dtype must be a torch.dtype, its name, "auto" or None, got {name!r}')
    return found


def read_weights(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """The file that was read, and its tensors by name."""
    path, index, old = folder / _WEIGHTS, folder / f"{_WEIGHTS}.index.json", folder / _OLD_WEIGHTS
    try:
        if path.exists():
            return path, safetensors.torch.load_file(path)
        if index.exists():
            path = index
            names: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            state: dict[str, Tensor] = {}
            for shard in sorted(set(names.values())):
                path = folder / Path(shard).name
                state |= safetensors.torch.load_file(path)
            return index, state
        if not old.exists():
            raise FileNotFoundError(f"{folder} has neither {_WEIGHTS} nor {index.name} nor {_OLD_WEIGHTS}")
        path = old
        state = torch.load(old, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except (SafetensorError, RuntimeError, ValueError, KeyError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is damaged or no checkpoint: {error}") from error
    if not isinstance(state, dict) or not all(isinstance(x, Tensor) for x in state.values()):
        raise ValueError(f"{path} must hold tensors by name, got {type(state).__name__}")
    return path, state


def _match(state: dict[str, Tensor], model: PretrainedModel, path: Path, new_head: bool) -> dict[str, Tensor]:
    """The file's tensors under the model's names.

    Raises:
        ValueError: they are not exactly those of the model.
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
            if not torch.equal(state.setdefault(_OUTPUT, embedding), embedding):
                raise ValueError(f"{path}: {_OUTPUT} is not {_EMBEDDING}, as tie_word_embeddings says it should be")
    wrong = [
        f"{name} {tuple(x.shape)} instead of {expected[name]}"
        for name, x in state.items()
        if name in expected and tuple(x.shape) != expected[name]
    ]
    wrong += [f"{name} of {x.dtype}" for name, x in state.items() if not x.is_floating_point()]
    problems = (("missing", expected.keys() - state), ("unexpected", state.keys() - expected), ("wrong", wrong))
    found = "; ".join(f"{kind}: {_some(sorted(names))}" for kind, names in problems if names)
    if found:
        heads = hasattr(model, "transformer") and all(n.split(".")[0] in _HEADS for n in expected.keys() ^ state.keys())
        hint = ". new_head=True starts with a new head" if heads and not new_head else ""
        raise ValueError(f"{path} is no checkpoint of {type(model).__name__} of this config: {found}{hint}")
    return state


def _some(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")

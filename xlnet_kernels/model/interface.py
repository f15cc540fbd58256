"""Interface expected by transformers' Trainer and pipelines, PEFT and ported scripts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .._checks import shortened
from .config import XLNetConfig


class ModelInterface(nn.Module):
    """Mixin of methods and attributes with transformers' names, unused by the model's own computations."""

    config: XLNetConfig
    config_class = XLNetConfig
    base_model_prefix = "transformer"
    main_input_name = "input_ids"
    accepts_loss_kwargs = False  # transformers' Trainer then passes only the collator's arguments
    supports_gradient_checkpointing = True
    _no_split_modules = ["XLNetLayer"]  # for FSDP's wrapping and for device maps
    _tied_weights_keys: dict[str, str] | None = None  # for PEFT: tied parameter -> source
    _keys_to_ignore_on_save: list[str] | None = None  # for a resuming Trainer

    @property
    def base_model(self) -> nn.Module:
        """The encoder: `transformer` of a model with a head, else the model itself."""
        return getattr(self, self.base_model_prefix, self)

    @property
    def device(self) -> torch.device:
        """Device of the first parameter."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the first floating-point parameter."""
        return next(x.dtype for x in self.parameters() if x.is_floating_point())

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Number of elements in all parameters; shared parameters count once."""
        left_out = {id(self.get_input_embeddings().weight)} if exclude_embeddings else set()
        counted = (x for x in self.parameters() if x.requires_grad or not only_trainable)
        return sum(x.numel() for x in counted if id(x) not in left_out)

    def get_input_embeddings(self) -> nn.Embedding:
        """The token embedding."""
        return self.base_model.word_embedding  # type: ignore[return-value]

    def set_input_embeddings(self, embeddings: nn.Module) -> None:
        """Replace the token embedding; `tie_weights` shares its weight with the language model's output again."""
        self.base_model.word_embedding = embeddings

    def get_output_embeddings(self) -> nn.Linear | None:
        """The output layer of the language model; None for other models."""
        return getattr(self, "lm_loss", None)

    def set_output_embeddings(self, embeddings: nn.Module) -> None:
        """Replace the output layer.

        Raises:
            ValueError: the model has no output layer.
        """
        if self.get_output_embeddings() is None:
            raise ValueError(f"{type(self).__name__} scores no tokens: there is no output embedding to set")
        self.add_module("lm_loss", embeddings)

    def tie_weights(self) -> None:
        """Share tied parameters; most models have none."""

    @torch.no_grad()
    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Resize the vocabulary, in the modules and in `config.vocab_size`; requires a new optimizer.

        Args:
            new_num_tokens: at least 1; None keeps the current size.
            pad_to_multiple_of: round the size up to a multiple.
            mean_resizing: new rows are the mean of the old rows; False: XLNet's initialisation.

        Raises:
            ValueError: a number is invalid.
        """
        embedding, head = self.get_input_embeddings(), self.get_output_embeddings()
        size = embedding.weight.shape[0] if new_num_tokens is None else new_num_tokens
        for name, value in (("new_num_tokens", size), ("pad_to_multiple_of", pad_to_multiple_of)):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be an integer of at least 1 or None, got {shortened(value)}")
        size += -size % (pad_to_multiple_of or 1)
        std = None if mean_resizing else self.config.initializer_range
        embedding.weight = _resized(embedding.weight, size, std)
        embedding.num_embeddings = self.config.vocab_size = size
        if head is not None:
            head.weight = _resized(head.weight, size, std)
            head.bias = _resized(head.bias, size, None if mean_resizing else 0.0)
            head.out_features = size
            self.tie_weights()
        return embedding

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether training recomputes layers in the backward pass."""
        return bool(getattr(self.base_model, "gradient_checkpointing", False))

    is_activation_checkpointing = is_gradient_checkpointing

    def gradient_checkpointing_enable(
        self, enable: bool = True, gradient_checkpointing_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Enable gradient checkpointing: training stores only layer inputs and recomputes layers in the backward pass.

        Raises:
            ValueError: `gradient_checkpointing_kwargs` (from transformers' Trainer) is neither None nor
                {"use_reentrant": False}.
        """
        # Because in transformers the first argument is gradient_checkpointing_kwargs.
        if isinstance(enable, dict):
            enable, gradient_checkpointing_kwargs = True, enable
        if gradient_checkpointing_kwargs not in (None, {}, {"use_reentrant": False}):
            raise ValueError(
                f"gradient_checkpointing_kwargs must be None or {{'use_reentrant': False}}, got "
                f"{gradient_checkpointing_kwargs!r}"
            )
        for module in self.modules():
            if hasattr(module, "gradient_checkpointing"):
                vars(module)["gradient_checkpointing"] = enable

    def gradient_checkpointing_disable(self) -> None:
        """Disable gradient checkpointing."""
        self.gradient_checkpointing_enable(False)

    def activation_checkpointing_enable(
        self,
        activation_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Alias of `gradient_checkpointing_enable` with transformers' newer arguments."""
        if every_n_layers != 1 or offload:
            raise ValueError(
                f"every layer is computed again and nothing offloaded: every_n_layers must be 1 and offload False, "
                f"got {shortened(every_n_layers)} and {shortened(offload)}"
            )
        self.gradient_checkpointing_enable(True, activation_checkpointing_kwargs)

    activation_checkpointing_disable = gradient_checkpointing_disable

    def enable_input_require_grads(self) -> None:
        """Make embedded tokens require gradients even where their table is frozen, for adapters."""
        self.disable_input_require_grads()
        hook = self.get_input_embeddings().register_forward_hook(_require_grad)
        vars(self)["_require_grads_hook"] = hook

    def disable_input_require_grads(self) -> None:
        """Undo `enable_input_require_grads`."""
        hook: RemovableHandle | None = vars(self).pop("_require_grads_hook", None)
        if hook is not None:
            hook.remove()

    @classmethod
    def can_generate(cls) -> bool:
        """Whether the model has `generate`."""
        return hasattr(cls, "generate")


def _require_grad(module: nn.Module, inputs: tuple, output: Tensor) -> None:
    output.requires_grad_(True)


def _resized(old: Tensor, size: int, std: float | None) -> nn.Parameter:
    """Copy of a parameter with `size` rows, new rows normal(0, std), or the old rows' mean without std."""
    new = old.new_empty(size, *old.shape[1:])
    kept = min(size, old.shape[0])
    new[:kept] = old[:kept]
    if std is None:
        new[kept:] = old.float().mean(0).to(old.dtype)
    else:
        new[kept:].normal_(0, std)
    return nn.Parameter(new, old.requires_grad)

"""One line accelerates a transformers model: `accelerate(model)`; `restore(model)` takes it back.

Each module of the model that `STAND_INS` knows gets another class, which derives from its own class and from our
stand-in. Parameters, buffers, hooks and attributes stay where they are, other models of the same class keep theirs, and
pickle and copy.deepcopy work.

A stand-in is a class of the same name as the transformers class it derives from, in the module of this package that
`STAND_INS` names (imported when a model has such a module). It overrides methods, `forward` above all, and

- finds everything of its instance in the attributes that transformers gave it: `__init__` never runs;
- has ``backend = None`` as a class attribute where it calls the operator; `accelerate` sets it in the instance;
- lists in ``made_here`` (a class attribute, a tuple of names) the attributes that an instance may get beyond those of
  transformers; `restore` deletes them;
- may define ``check_accelerable(self)``, which raises ValueError, with a sentence, where an instance cannot be served.

In a subclass of the transformers class the stand-in comes after it in the method resolution order, so that what the
subclass overrides stays, and its ``super().forward`` is ours.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from torch import nn

from ..backends import check_name
from ..linear import Linear

# Name of a class of transformers -> module of this package with its stand-in.
STAND_INS = {
    "XLNetLayer": "xlnet",
    "XLNetModel": "xlnet",
    "XLNetPreTrainedModel": "xlnet",  # models with a head
    "XLNetRelativeAttention": "xlnet",
    "FastSpeech2ConformerAttention": "parakeet",
    "NemotronAsrStreamingEncoderAttention": "parakeet",
    "ParakeetEncoderAttention": "parakeet",
    "SeamlessM4TConformerSelfAttention": "parakeet",
    "SeamlessM4Tv2ConformerSelfAttention": "parakeet",
    "Wav2Vec2BertSelfAttention": "parakeet",
    "Wav2Vec2ConformerSelfAttention": "parakeet",
}
_ORIGINAL = "_class_before_accelerate"


def accelerate(model: nn.Module, backend: str | None = None, linears: bool = False) -> nn.Module:
    """Makes every attention layer of this transformers model call `rel_attention`; other instances keep theirs.

    Weights are neither copied nor renamed. Outputs, gradients and memory are those of transformers; from_pretrained,
    save_pretrained, generate, Trainer, hooks and subclasses work as before. A copy (copy.deepcopy, pickle, torch.save)
    of an accelerated model is accelerated too, so that loading a pickle needs this package; a folder that
    save_pretrained has written does not.

    XLNet: gradient checkpointing, 16-bit models with two streams, bool masks, and masks in batches where ``attn_type``
    is "uni" work too, which transformers refuses. One-hot rows of a target_mapping cost N query rows, not L. Rows that
    see nothing average over all keys, as in transformers. Attention maps (`output_attentions`) come from the reference
    backend, in time and memory like transformers' own. Dropout of the position encodings is drawn once for a batch and
    not for each of its sequences. A target_mapping with positions beyond the text is left to transformers' code.

    Speech models: see `integrations/parakeet.py`.

    Args:
        model: an XLNet or any model that has one inside, or one of the speech models in `STAND_INS`.
        backend: of the attention, None for the best available, or "reference", "cpu", "triton", "cuda".
        linears: give every torch.nn.Linear of the model the products of `xlnet_kernels.Linear` as well, which are
            faster on some processors and the same within float32 rounding.

    Returns:
        `model` itself. Accelerating it again changes no more than the backend.

    Raises:
        ValueError: `model` has nothing that could be accelerated, or a layer of a kind that cannot be; the text says
            what was found. Nothing is changed then.

    >>> import transformers
    >>> config = transformers.XLNetConfig(vocab_size=100, d_model=32, n_layer=2, n_head=4, d_inner=64)
    >>> model = transformers.XLNetModel(config).eval()
    >>> ids = torch.randint(100, (2, 7))
    >>> wanted = model(ids).last_hidden_state
    >>> found = accelerate(model)(ids).last_hidden_state
    >>> torch.allclose(found, wanted, atol=1e-4)
    True
    """
    _check_model(model)
    check_name(backend)
    pairs = [(module, _substitute(type(module))) for module in model.modules()]
    substitutes = [(module, cls) for module, cls in pairs if cls is not None]
    if all(issubclass(cls, Linear) for _, cls in substitutes):
        names = {type(module).__name__ for module in model.modules()}
        kinds = sorted(name for name in names if "Attention" in name) or [type(model).__name__]
        raise ValueError(
            f"model must have a module of transformers among {', '.join(STAND_INS)}, got {', '.join(kinds)}"
        )
    for module, cls in substitutes:
        check = getattr(cls, "check_accelerable", None)
        if check is not None:
            check(module)
    for module, cls in substitutes:
        if issubclass(cls, Linear) and not linears:
            continue
        module.__class__ = cls
        if hasattr(cls, "backend"):
            vars(module)["backend"] = backend
    return model


def restore(model: nn.Module) -> nn.Module:
    """Undoes `accelerate`: every module has its class and its attributes again; harmless where nothing is to be undone.

    Returns:
        `model` itself.

    Raises:
        RuntimeError: a module was given yet another class since then (by parametrizations or fully_shard).

    >>> import transformers
    >>> config = transformers.XLNetConfig(vocab_size=100, d_model=32, n_layer=2, n_head=4, d_inner=64)
    >>> model = transformers.XLNetModel(config)
    >>> type(restore(accelerate(model))) is transformers.XLNetModel
    True
    """
    _check_model(model)
    accelerated = [module for module in model.modules() if hasattr(type(module), _ORIGINAL)]
    for module in accelerated:
        if _ORIGINAL not in vars(type(module)):
            raise RuntimeError(
                f"model has a {type(module).__name__} whose class was changed after accelerate: undo that first"
            )
    for module in accelerated:
        for name in getattr(module, "made_here", ()):
            vars(module).pop(name, None)
        module.__class__ = getattr(type(module), _ORIGINAL)
    return model


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")


def _substitute(cls: type) -> type[nn.Module] | None:
    """The accelerated form of a class, which may be that already; None for what we have nothing for."""
    if hasattr(cls, _ORIGINAL):
        return cls
    if cls is nn.Linear:
        return _derive(cls, Linear)
    for base in cls.__mro__:
        if base.__name__ in STAND_INS and base.__module__.partition(".")[0] == "transformers":
            module = importlib.import_module(f".{STAND_INS[base.__name__]}", __package__)
            return _derive(cls, getattr(module, base.__name__))
    return None


@cache
def _derive(cls: type, stand_in: type) -> Any:
    """`cls` with the stand-in's methods, under its own name, which save_pretrained writes down."""
    bases = (stand_in,) if issubclass(stand_in, cls) else (cls, stand_in)
    names = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__new__": _make,
        "__reduce_ex__": _reduce,
        _ORIGINAL: cls,
    }
    return type(cls)(cls.__name__, bases, names)


def _make(cls: type, *args, **kwargs) -> nn.Module:
    """Only instances that exist are accelerated: calling the class (as from_pretrained does) makes an original one."""
    if args or kwargs:
        return getattr(cls, _ORIGINAL)(*args, **kwargs)
    return object.__new__(cls)  # a shell, to be filled by pickle or torch.nn.parallel.replicate


def _reduce(self: nn.Module, protocol: int) -> tuple:
    """For copy and pickle, which would look for the class under its name and find the original."""
    reduced: Any = object.__reduce_ex__(self, max(protocol, 2))  # from 2 on a tuple
    original = vars(type(self)).get(_ORIGINAL)
    return reduced if original is None else (_new, (original,), *reduced[2:])


def _new(original: type[nn.Module]) -> nn.Module:
    cls: Any = _substitute(original)
    return cls.__new__(cls)

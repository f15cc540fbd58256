"""`accelerate(model)` replaces the attention of another library's model; `restore(model)` undoes it.

Each module of the model that the registry (`_libraries`) knows gets another class, derived from its own class and from
a stand-in. Parameters, buffers, hooks and attributes are unchanged, other models of the same class are not affected,
and pickle and copy.deepcopy work.

A stand-in is a class given to `register`, or the class of the same name in a module of this package. `LIBRARIES` names
that module, which is imported when a model needs it. It derives from the library's class, or is a mixin placed before
it. It overrides methods, above all `forward`, and

- uses the attributes that the library gave the instance: `__init__` never runs;
- has ``backend = None`` as a class attribute where it calls the operator; `accelerate` sets it in the instance;
- has ``window = None`` likewise where it supports a window (`_window.Window`), or in ``no_window`` the reason against
  one;
- lists in ``made_here`` (a class attribute, a tuple of names) the attributes added to an instance; `restore` deletes
  them;
- may define ``check_accelerable(self)``, which raises ValueError, with a sentence, for an unsupported instance;
- may define ``serves_parts(self)``: whether it calls its parts as their stand-ins expect. If not, the module and its
  parts do not count as accelerated.

An instance may have its own `forward`, which overrides any class: a hook of HF accelerate, a wrapper. The method kept
by these is exchanged with the class (`_own_methods`), so that they wrap the stand-in's. A `forward` that does not call
its class's is refused; if set later, its module no longer counts in `accelerated`.

For a subclass of the library's class the stand-in comes after it in the method resolution order. So the subclass's
overrides stay, and its ``super().forward`` is the stand-in's.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from torch import nn

from .._checks import as_python, shortened
from ..backends import check_name
from ..linear import Linear
from ._accelerated_class import ORIGINAL, accelerated_class
from ._libraries import LIBRARIES, known_bases, library_of
from ._own_methods import leads, overridden, rebind
from ._window import make_window

_LOGGER = logging.getLogger("xlnet_kernels")


def accelerate(
    model: nn.Module,
    backend: str | None = None,
    linears: bool = False,
    window: tuple[int, int] | None = None,
    window_over: int = 0,
    global_tokens: int = 0,
    skip_padding: bool = False,
) -> nn.Module:
    """Make the relative attention of this model call `rel_attention`; other instances of its classes are not affected.

    For models of transformers, NeMo, ESPnet, SpeechBrain and fairseq2, or with such modules inside: `python -m
    xlnet_kernels.info --models` lists the classes, docs/how-to/accelerate.md the differences for each library. Weights
    are neither copied nor renamed, and the state dict is untouched. Outputs, gradients, masks and caches are those of
    the library; its training loops, checkpoints, hooks and subclasses keep working. A copy (copy.deepcopy, pickle,
    torch.save) of an accelerated model is accelerated too, so loading a pickle needs this package. A state dict, or a
    folder written by save_pretrained, does not need it.

    The logger "xlnet_kernels" lists the replaced modules in one line (INFO); `integrations.accelerated` returns them.

    Args:
        model: any torch.nn.Module. No library is imported, because those of its modules already are.
        backend: of the attention, None for the best available, or "reference", "torch", "cpu", "triton", "cuda".
        linears: also use the products of `xlnet_kernels.Linear` in every torch.nn.Linear of the model. They are faster
            on some processors and equal within float32 rounding.
        window: (left, right), the numbers of frames before and after its own that a query sees, for audio too long for
            full attention: time and memory of attention are then linear in length. Scores of visible frames are
            unchanged. None for full attention.
        window_over: sequences of no more frames than this, cached ones included, keep full attention.
        global_tokens: the number of first frames that see all frames and are visible to all. The whole sequence is then
            in one call: with a cache they are refused. Without other frames, this is full attention.
        skip_padding: compute whole layers of the frames only, all sequences of a batch in one row. Outputs at padding
            are zeros. BatchNorm in training ignores padding. For Parakeet's layers in transformers, whose convolutions
            read zeros at padding.

    Returns:
        `model` itself. Accelerating it again sets every argument anew, but linears stay until `restore`.

    Raises:
        ValueError: `model` has no supported layer, has an unsupported layer or version of its library, or a layer whose
            instance has another computation as `forward`; `window` is not such a pair, shows only the query's own key,
            or is given for XLNet; `skip_padding` is given with global tokens, or for a model without such layers. The
            text names the cause. The model is then unchanged.

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
    frames_seen = make_window(window, window_over, global_tokens)
    for library in {library_of(base) for cls in set(map(type, model.modules())) for base in known_bases(cls)} - {None}:
        library.check_version()
    pairs = [(module, accelerated_class(type(module))) for module in model.modules()]
    substitutes = [(module, cls) for module, cls in pairs if cls is not None]
    if not any(hasattr(cls, "backend") and not issubclass(cls, Linear) for _, cls in substitutes):
        raise ValueError(_nothing_found(model))
    _check_skip_padding(skip_padding, global_tokens, model, [cls for _, cls in substitutes])
    substitutes = [
        (module, cls)
        for module, cls in substitutes
        if (not issubclass(cls, Linear) or (linears and not _hidden(module, cls)))
        and (not hasattr(cls, "skip_padding") or skip_padding or type(module) is cls)
    ]
    for module, cls in substitutes:
        if frames_seen is not None:
            _check_takes_window(cls)
        if "forward" in _hidden(module, cls) and not issubclass(cls, Linear):
            raise ValueError(_replaced(model, module))
    before = [(module, type(module)) for module, _ in substitutes]
    try:
        for module, cls in substitutes:
            module.__class__ = cls
        for module, cls in substitutes:
            check: Any = getattr(cls, "check_accelerable", None)
            if check is not None:
                check(module)
    # E.g. TypeError, because a class may have its own __slots__.
    except BaseException:
        for module, original in before:
            if type(module) is not original:
                module.__class__ = original
        raise
    for module, cls in substitutes:
        rebind(module, getattr(cls, ORIGINAL), cls)
    for module, cls in substitutes:
        if hasattr(cls, "backend"):
            vars(module)["backend"] = backend
        if hasattr(cls, "window"):
            vars(module)["window"] = frames_seen
        if hasattr(cls, "skip_padding"):
            vars(module)["skip_padding"] = skip_padding
    _LOGGER.info("accelerated: %s", ", ".join(f"{count} x {name}" for name, count in accelerated(model).items()))
    return model


def accelerated(model: nn.Module) -> dict[str, int]:
    """The number of accelerated modules of this model by class, named with its library.

    Modules whose `forward` was replaced after `accelerate`, by a function that does not call the class's, do not count.

    >>> import transformers
    >>> config = transformers.XLNetConfig(vocab_size=100, d_model=32, n_layer=2, n_head=4, d_inner=64)
    >>> accelerated(accelerate(transformers.XLNetModel(config)))["transformers XLNetRelativeAttention"]
    2
    """
    _check_model(model)
    changed = [module for module in model.modules() if hasattr(type(module), ORIGINAL)]
    idle = {module for module in changed if _hidden(module, type(module))}
    for module in changed:
        if not getattr(module, "serves_parts", lambda: True)():
            idle |= {*module.modules()}
    return dict(Counter(_full_name(getattr(type(module), ORIGINAL)) for module in changed if module not in idle))


def restore(model: nn.Module) -> nn.Module:
    """Undo `accelerate`: every module gets its class and attributes back; harmless for a model that is not accelerated.

    Returns:
        `model` itself.

    Raises:
        RuntimeError: a module's class was changed after `accelerate` (by parametrizations or fully_shard).

    >>> import transformers
    >>> config = transformers.XLNetConfig(vocab_size=100, d_model=32, n_layer=2, n_head=4, d_inner=64)
    >>> model = transformers.XLNetModel(config)
    >>> type(restore(accelerate(model))) is transformers.XLNetModel
    True
    """
    _check_model(model)
    changed = [module for module in model.modules() if hasattr(type(module), ORIGINAL)]
    for module in changed:
        if ORIGINAL not in vars(type(module)):
            raise RuntimeError(
                f"model has a {type(module).__name__} whose class was changed after accelerate: undo that first"
            )
    for module in changed:
        for name in getattr(module, "made_here", ()):
            vars(module).pop(name, None)
        accelerated = type(module)
        module.__class__ = original = getattr(accelerated, ORIGINAL)
        rebind(module, original, accelerated)
    return model


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")


def _check_takes_window(cls: type) -> None:
    reason = getattr(cls, "no_window", None)
    if reason is None and hasattr(cls, "backend") and not hasattr(cls, "window") and not issubclass(cls, Linear):
        reason = "its stand-in attends to everything"
    if reason is not None:
        raise ValueError(f"window must be None for {_full_name(getattr(cls, ORIGINAL))}: {reason}")


def _check_skip_padding(skip_padding: Any, global_tokens: int, model: nn.Module, classes: list[type]) -> None:
    if not isinstance(skip_padding, bool):
        raise ValueError(f"skip_padding must be a bool, got {shortened(skip_padding)}")
    if skip_padding and global_tokens:
        raise ValueError(f"global_tokens must be 0 with skip_padding, got {as_python(global_tokens)}")
    if skip_padding and not any(hasattr(cls, "skip_padding") for cls in classes):
        raise ValueError(
            f"skip_padding needs layers of transformers' ParakeetEncoder, whose convolutions read zeros at padding, "
            f"got {type(model).__name__} without them"
        )


def _hidden(module: nn.Module, cls: type) -> list[str]:
    """The methods of the accelerated class that the instance's own methods hide."""
    original = getattr(cls, ORIGINAL)
    names = [*overridden(original, cls)]
    # A subclass's forward stays and calls the stand-in's.
    names += ["forward"] if any("forward" in vars(base) for base in {*cls.__mro__} - {*original.__mro__}) else []
    return [name for name in names if not leads(module, name)]


def _replaced(model: nn.Module, module: nn.Module) -> str:
    name = next(name for name, part in model.named_modules() if part is module)
    own = vars(module)["forward"]
    return (
        f"model must have the forward of {_full_name(getattr(type(module), ORIGINAL, type(module)))} in "
        f"{repr(name) if name else 'itself'}, got {getattr(own, '__qualname__', type(own).__name__)}, set in the "
        f"instance and not seen to call it: delete it (`del module.forward`), or accelerate before it is set"
    )


def _full_name(cls: type) -> str:
    """The class's name after that of its library."""
    libraries = filter(None, map(library_of, known_bases(cls)))
    return " ".join([*(library.name for library in [*libraries][:1]), cls.__name__])


def _nothing_found(model: nn.Module) -> str:
    """Error for a model without supported layers: the layers found, and why they are not supported."""
    found = []
    for cls in sorted({type(module) for module in model.modules()}, key=lambda cls: cls.__name__):
        if "Attention" not in cls.__name__ and "MHA" not in cls.__name__:
            continue
        library = library_of(cls)
        reason = library.refused.get(cls.__name__) if library else None
        if cls.__module__.startswith("xlnet_kernels."):
            reason = "it calls rel_attention already"
        if issubclass(cls, nn.MultiheadAttention):
            reason = "torch's has no relative positions"
        found.append(f"{cls.__name__} ({reason})" if reason else cls.__name__)
    return (
        f"model must have supported relative attention, got {', '.join(found) or type(model).__name__}; "
        f"`python -m xlnet_kernels.info --models` lists the classes of "
        f"{', '.join(library.name for library in LIBRARIES)}; xlnet_kernels.integrations.register adds others"
    )

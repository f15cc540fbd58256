"""One line accelerates a model of another library: `accelerate(model)`; `restore(model)` takes it back.

Each module of the model that the registry (`_libraries`) knows gets another class, which derives from its own class and
from our stand-in. Parameters, buffers, hooks and attributes stay where they are, other models of the same class keep
theirs, and pickle and copy.deepcopy work.

A stand-in is what `register` was told, or a class of the same name as the class it stands for, in the module of this
package that `LIBRARIES` names (imported when a model has such a module). It derives from that class, or is a mixin that
is put before it. It overrides methods, `forward` above all, and

- finds everything of its instance in the attributes that the library gave it: `__init__` never runs;
- has ``backend = None`` as a class attribute where it calls the operator; `accelerate` sets it in the instance;
- has ``window = None`` as one where it attends under a window (`_window.Window`), or says in ``no_window`` why not;
- lists in ``made_here`` (a class attribute, a tuple of names) the attributes that an instance may get beyond those of
  the library; `restore` deletes them;
- may define ``check_accelerable(self)``, which raises ValueError, with a sentence, where an instance cannot be served;
- may define ``serves_parts(self)``: whether it calls its parts as their stand-ins expect. If not, neither it nor its
  parts count as accelerated.

An instance may have a `forward` of its own, which wins over any class: a hook of HF accelerate, a wrapper. The method
that these keep is exchanged with the class (`_own_methods`), so that they run around ours. One that does not call its
class's is refused; set later, it takes its module out of `accelerated`.

In a subclass of the library's class the stand-in comes after it in the method resolution order, so that what the
subclass overrides stays, and its ``super().forward`` is ours.
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
    """Makes the relative attention of this model call `rel_attention`; other instances of its classes keep theirs.

    For models of transformers, NeMo, ESPnet, SpeechBrain and fairseq2, or with such modules inside: `python -m
    xlnet_kernels.info --models` lists the classes, docs/how-to/accelerate.md what is different for each library.
    Weights are neither copied nor renamed, and the state dict is untouched. Outputs, gradients, masks and caches are
    those of the library; its training loops, checkpoints, hooks and subclasses work as before. A copy (copy.deepcopy,
    pickle, torch.save) of an accelerated model is accelerated too, so that loading a pickle needs this package; a state
    dict, or a folder that save_pretrained has written, does not.

    The logger "xlnet_kernels" says in one line (INFO) what was replaced; `integrations.accelerated` returns it.

    Args:
        model: any torch.nn.Module. No library is imported: those of its modules are.
        backend: of the attention, None for the best available, or "reference", "torch", "cpu", "triton", "cuda".
        linears: give every torch.nn.Linear of the model the products of `xlnet_kernels.Linear` as well, which are
            faster on some processors and the same within float32 rounding.
        window: (left, right), the numbers of frames before and after its own that a query sees, for audio that is too
            long for full attention: time and memory of attention are then linear in length. Scores of the frames that
            are seen are unchanged. None for full attention.
        window_over: sequences of no more frames than this, cached ones included, keep full attention.
        global_tokens: so many first frames see all frames and are seen by all. The whole sequence is in one call then:
            with a cache they are refused. Where there are no other frames, this is full attention.
        skip_padding: compute whole layers of the frames alone, all sequences of a batch in one row. Outputs at padding
            are zeros. BatchNorm in training counts no padding. For Parakeet's layers in transformers, whose
            convolutions read zeros at padding.

    Returns:
        `model` itself. Accelerating it again changes no more than the backend and the window.

    Raises:
        ValueError: `model` has nothing that could be accelerated, a layer of a kind that cannot be, one whose `forward`
            was replaced in the instance by another computation, or is of a version of its library that is not served;
            `window` is no such pair, shows no key but the query's own, or is given for XLNet, whose masks are its own;
            `skip_padding` is given with global tokens, or for a model without such layers. The text says what was
            found. Nothing is changed then.

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
    except BaseException:  # e.g. TypeError: a class with __slots__ of its own
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
    """The modules of this model that run accelerated: how many of each class, named with its library.

    Modules whose `forward` was replaced after `accelerate`, by one that does not call that of the class, do not count.

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
    """The methods of the accelerated class that the instance's own keep from running."""
    original = getattr(cls, ORIGINAL)
    names = [*overridden(original, cls)]
    # that of a subclass stays and calls ours
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
    """The class after the name of its library."""
    libraries = filter(None, map(library_of, known_bases(cls)))
    return " ".join([*(library.name for library in [*libraries][:1]), cls.__name__])


def _nothing_found(model: nn.Module) -> str:
    """What the model has in place of what is known, and why that is not served."""
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
        f"model must have relative attention that is known, got {', '.join(found) or type(model).__name__}; "
        f"`python -m xlnet_kernels.info --models` lists what is known of "
        f"{', '.join(library.name for library in LIBRARIES)}; xlnet_kernels.integrations.register makes others known"
    )

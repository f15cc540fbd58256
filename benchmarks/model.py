"""Whole models, measured: this package's XLNet against transformers', same weights, eager and compiled.

    python benchmarks/model.py --plot       base size, forward and training step; compiling takes most of the time
    python benchmarks/model.py --implementations xlnet_kernels eager --mem-lens 0 --seconds 1
    python benchmarks/model.py --size large --lengths 512 2048 --dtype bfloat16
    python benchmarks/model.py --precisions float32 at torch's medium precision and under autocast, too (CPU)
    python benchmarks/model.py --quick      a tiny model, to see that everything runs

Pre-training: both streams, one target for six tokens (85 of 512), language-model loss. Fine-tuning: the content stream
alone, classification loss. A training step is forward, backward and AdamW's update (fused, learning rate 0 so that
every step is the same), or forward and backward alone (--optimizer none). Outputs and gradients are checked against
transformers' model in float64 before they are timed, at lengths where its maps fit into memory.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import xlnet_kernels as xk
from lib import session
from lib.harness import CannotRun, Run, at_precision, free_memory
from lib.measure import DIRECTIONS, Bench, Job
from lib.session import positive
from lib.text import CLS, Batch, build_batch

OWN, OWN_COMPILED, OWN_PROJECTED = "xlnet_kernels", "xlnet_kernels compiled", "xlnet_kernels projected"
OWN_MEDIUM, OWN_BFLOAT16 = "xlnet_kernels, medium", "xlnet_kernels, bfloat16 autocast"  # with --precisions
THEIRS, THEIRS_COMPILED = "transformers eager", "transformers compiled"
NAMES = (OWN, OWN_COMPILED, OWN_PROJECTED, THEIRS, THEIRS_COMPILED)
TASKS = {"pre-training": "XLNetLMHeadModel", "fine-tuning": "XLNetForSequenceClassification"}
SIZES = {
    "base": dict(layers=12, d_model=768, heads=12, d_inner=3072),
    "large": dict(layers=24, d_model=1024, heads=16, d_inner=4096),
}
QUICK = dict(layers=2, d_model=64, heads=4, d_inner=96, vocab=CLS + 1, lengths=[48], mem_lens=[0, 24], seconds=0.01)
OPTIMIZERS = {"adamw": "AdamW, fused", "none": "none: forward and backward alone"}
# (L, M + K) maps per layer that transformers' training step keeps at its peak, as measured
MAPS = 14


@dataclass(frozen=True)
class ModelCase:
    """One model on one batch."""

    task: str
    length: int
    batch: int
    mem_len: int
    layers: int
    d_model: int
    heads: int
    d_inner: int
    vocab: int
    dropout: float
    optimizer: str
    dtype: torch.dtype
    device: str

    @property
    def labels(self) -> dict[str, object]:
        """Labels of a row for its problem."""
        targets = f"{self.length // 6} targets" if self.task == "pre-training" else "no targets"
        memory = f" + {self.mem_len}" if self.mem_len else ""
        names = ("task", "length", "batch", "mem_len")
        return {name: getattr(self, name) for name in names} | {
            "case": f"{targets}, {self.length} x {self.batch}{memory}",
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    def precision(self) -> contextlib.AbstractContextManager:
        """Weights are float32; half precision is autocast (with weights of it, transformers' two streams fail)."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device, self.dtype)


class ModelRun(Run):
    """`forward` gives the logits; step("backward") is a training step of the loss, and gives its gradients."""

    def __init__(self, call: Callable[[], tuple[Tensor, Tensor]], model: nn.Module, optimizer: str) -> None:
        """`call` gives loss and logits; the optimizer, one of OPTIMIZERS, is shared by all runs of the model."""
        super().__init__(lambda: call()[1], dict(model.named_parameters()), ())
        self.call, self.model, self.optimizer = call, model, optimizer

    def step(self, direction: str) -> tuple[Tensor, ...]:
        if direction == "forward":
            self.model.eval()
            return super().step(direction)
        gradients = self.gradients()
        if self.optimizer == "none":
            return gradients
        optimizer = _optimizer(self.model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return gradients

    def gradients(self) -> tuple[Tensor, ...]:
        """Gradients of the loss by every parameter."""
        self.model.train()
        self.model.zero_grad(set_to_none=True)  # a step that ran out of memory leaves some
        self.call()[0].backward()
        # A parameter that is not part of this task has no gradient.
        return tuple(x.new_zeros(()).expand(x.shape) if x.grad is None else x.grad for x in self.leaves.values())


@functools.lru_cache(maxsize=2)
def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)


def _sizes(case: ModelCase) -> dict[str, float]:
    sizes = dict(vocab_size=case.vocab, d_model=case.d_model, n_layer=case.layers, n_head=case.heads)
    return sizes | dict(
        d_inner=case.d_inner, dropout=case.dropout, mem_len=case.mem_len, summary_last_dropout=case.dropout
    )


def our_model(case: ModelCase) -> nn.Module:
    """This package's, with random weights, on the CPU."""
    return getattr(xk, TASKS[case.task])(xk.XLNetConfig(**_sizes(case)))


def transformers_model(case: ModelCase) -> nn.Module:
    """transformers', with random weights, on the CPU."""
    try:
        from transformers.models.xlnet import configuration_xlnet, modeling_xlnet
    except ImportError as error:
        raise CannotRun("transformers is not installed") from error
    return getattr(modeling_xlnet, TASKS[case.task])(configuration_xlnet.XLNetConfig(**_sizes(case)))


@functools.lru_cache(maxsize=1)
def _models(case: ModelCase) -> tuple[nn.Module, nn.Module]:
    """transformers' model and ours with the same random weights."""
    torch.manual_seed(0)
    theirs = transformers_model(case)
    for name, parameter in theirs.named_parameters():
        if name.endswith(("r_w_bias", "r_r_bias", "r_s_bias")):  # of some size, so that they count
            nn.init.normal_(parameter, std=0.3)
    ours = our_model(case)
    ours.load_state_dict(theirs.state_dict())
    return theirs.to(case.device), ours.to(case.device)


@functools.lru_cache(maxsize=1)
def _batch(case: ModelCase) -> Batch:
    return build_batch(case.batch, case.length, case.mem_len)


@functools.lru_cache(maxsize=1)
def _mems(case: ModelCase) -> list[Tensor] | None:
    """Memory left by a pass over the text before, as layer inputs."""
    if not case.mem_len:
        return None
    model = _models(case)[1].eval()
    with torch.no_grad():
        return model.transformer(_batch(case).memory_tokens.to(case.device), use_mems=True).mems


def _common(case: ModelCase) -> dict[str, object]:
    """Arguments that both models take."""
    batch, device = _batch(case), case.device
    if case.task == "pre-training":
        labels = batch.tokens.gather(1, batch.target_positions)
    else:
        labels = torch.arange(case.batch) % 2
    arguments = {"input_ids": batch.tokens, "token_type_ids": batch.segment_ids, "labels": labels}
    return {name: x.to(device) for name, x in arguments.items()} | {"use_mems": case.mem_len > 0}


def our_run(
    case: ModelCase,
    compiled: bool = False,
    projected: bool = False,
    model: nn.Module | None = None,
    dtype: torch.dtype | None = None,
) -> ModelRun:
    """The query stream at the targets only, ranks for masks.

    model: in place of the one that all cases share. dtype: of autocast, in place of the case's.
    """
    model, batch, mems = model or _models(case)[1], _batch(case), _mems(case)
    arguments = _common(case)
    if case.task == "pre-training":
        positions = batch.target_positions.to(case.device)
        arguments |= {"mask": batch.mask.to(case.device), "target_positions": positions}
    if projected and mems is None:
        raise CannotRun("there is no memory")
    case = replace(case, dtype=dtype or case.dtype)
    return _run(case, model, arguments | {"mems": mems}, compiled, projected)


def transformers_run(
    case: ModelCase, compiled: bool = False, double: bool = False, model: nn.Module | None = None
) -> ModelRun:
    """Dense perm_mask and one-hot target_mapping, as its data collator makes them; `model` as in `our_run`."""
    model, batch, mems = model or _models(case)[0], _batch(case), _mems(case)
    dtype = torch.float64 if double else torch.float32
    if double:
        model = copy.deepcopy(model).double()
        model.transformer.relative_positional_encoding = functools.partial(_exact_positions, case.d_model)
    arguments = _common(case)
    if case.task == "pre-training":
        seen = batch.mask.to_bool("query")[:, :, case.mem_len :]
        mapping = F.one_hot(batch.target_positions, case.length)
        arguments |= {"perm_mask": (~seen).to(case.device, dtype), "target_mapping": mapping.to(case.device, dtype)}
    mems = None if mems is None else [x.to(dtype) for x in mems]
    return _run(case, model, arguments | {"mems": mems}, compiled)


def _exact_positions(d_model: int, query_len: int, key_len: int, bsz: int, device: torch.device) -> Tensor:
    """In place of transformers' own, which are float32 whatever the model is."""
    positions = xk.relative_positions(key_len, query_len, d_model, dtype=torch.float64, device=device)
    return positions[:, None].expand(-1, bsz, -1)


def _run(case: ModelCase, model: nn.Module, arguments: dict, compiled: bool, projected: bool = False) -> ModelRun:
    if compiled:
        torch.compiler.reset()
    module = torch.compile(model) if compiled else model
    memory: list = []

    def call() -> tuple[Tensor, Tensor]:
        given = arguments
        with case.precision():
            if projected:
                if model.training:
                    raise CannotRun("for inference only")
                # Projected once, with the table of positions that the first call adds; every call sees the same.
                if not memory:
                    first = model.transformer.project_mems(arguments["mems"])
                    memory.append(first)
                given = arguments | {"mems": memory[0]}
            output = module(**given)
        return output.loss.float(), output.logits.float()

    return ModelRun(call, model, case.optimizer)


def reference(case: ModelCase, direction: str) -> dict[str, Tensor]:
    """transformers' model in float64."""
    run = transformers_run(case, double=True)
    if direction == "forward":
        return {"out": run.step(direction)[0]}
    return dict(zip(run.leaves, run.gradients(), strict=True))


def _can_check(case: ModelCase) -> bool:
    """Whether transformers' maps in float64 leave half of the memory free; with dropout there is nothing to compare."""
    needed = MAPS * case.layers * case.batch * case.heads * case.length * (case.mem_len + case.length) * 8
    free = free_memory(case.device)
    return not case.dropout and (free is None or needed <= free / 2)


def measure(options: argparse.Namespace, bench: Bench) -> None:
    """Every task at every length, with and without memory."""
    prepare = {
        OWN: our_run,
        OWN_COMPILED: functools.partial(our_run, compiled=True),
        OWN_PROJECTED: functools.partial(our_run, projected=True),
        THEIRS: transformers_run,
        THEIRS_COMPILED: functools.partial(transformers_run, compiled=True),
        OWN_MEDIUM: lambda case: at_precision(our_run(case), "medium"),
        OWN_BFLOAT16: functools.partial(our_run, dtype=torch.bfloat16),
    }
    for task, length, mem_len in itertools.product(options.tasks, options.lengths, options.mem_lens):
        case = case_of(options, task=task, length=length, batch=options.batch, mem_len=mem_len)
        _optimizer.cache_clear()  # the last case's models
        known = functools.cache(functools.partial(reference, case)) if _can_check(case) else None
        names = [name for name in options.implementations if mem_len or name != OWN_PROJECTED]
        jobs = [Job(name, functools.partial(prepare[name], case), known, dtype=case.dtype) for name in names]
        for name in (OWN_MEDIUM, OWN_BFLOAT16) if options.precisions else ():
            jobs.append(Job(name, functools.partial(prepare[name], case), known, dtype=torch.bfloat16))
        rows = bench.group("model", jobs, case.labels, base=THEIRS)
        _relate_to_compiled(rows)
        bench.save()


def case_of(options: argparse.Namespace, **problem: object) -> ModelCase:
    """The model that `size_options` describe, on a problem of `task`, `length`, `batch` and `mem_len`."""
    names = ("layers", "d_model", "heads", "d_inner", "vocab", "dropout", "optimizer")
    sizes = {name: getattr(options, name) for name in names}
    return ModelCase(**problem, **sizes, dtype=getattr(torch, options.dtype), device=options.device)


def _relate_to_compiled(rows: list[dict]) -> None:
    medians = {(row["implementation"], row["direction"]): row.get("median_ms") for row in rows}
    for row in rows:
        base = medians.get((THEIRS_COMPILED, row["direction"]))
        if base and row.get("median_ms"):
            row["speedup_compiled"] = round(base / row["median_ms"], 3)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    session.common_options(parser, ("float32", "bfloat16", "float16"))
    add = parser.add_argument
    size_options(parser)
    add("--lengths", type=positive, nargs="+", default=[512], help="one run of everything for each")
    add("--batch", type=positive, default=1)
    add("--mem-lens", type=int, nargs="+", default=[0, 384], help="memory positions, one run of everything for each")
    add("--tasks", nargs="+", choices=tuple(TASKS), default=tuple(TASKS))
    add("--direction", choices=("forward", "backward", "both"), default="both", help="backward: training step")
    add("--implementations", nargs="+", metavar="WORD", help="only these, or names with these in them")
    add("--seconds", type=float, default=20.0, help="of samples per implementation and direction")
    add("--precisions", action="store_true", help="bfloat16 products too: medium precision and autocast, on the CPU")
    add("--quick", action="store_true", help="a tiny model and few samples")
    if "--quick" in arguments:
        parser.set_defaults(**QUICK)
    options = parser.parse_args(arguments)
    session.check_common(parser, options, "model")
    check_sizes(parser, options)
    if options.precisions and (options.device, options.dtype) != ("cpu", "float32"):
        parser.error("--precisions compares float32 on the CPU: leave out --dtype and --device")
    if min(options.mem_lens) < 0:
        parser.error("--mem-lens must not be negative")
    words = options.implementations or [""]
    # A whole name means that one alone, not all that begin like it.
    options.implementations = [n for n in NAMES if any(word == n if word in NAMES else word in n for word in words)]
    if not options.implementations:
        parser.error(f"--implementations: none has a name with {words} in it; {', '.join(NAMES)}")
    return options


def size_options(parser: argparse.ArgumentParser) -> None:
    """Options that describe a model: a named size, and what differs from it."""
    add = parser.add_argument
    add("--size", choices=tuple(SIZES), default="base")
    for name in ("layers", "d-model", "heads", "d-inner"):
        add(f"--{name}", type=positive, help="default: that of --size")
    add("--vocab", type=positive, default=32000)
    add("--dropout", type=float, default=0.0, help="with dropout nothing can be checked")
    add("--optimizer", choices=tuple(OPTIMIZERS), default="adamw", help="of training steps")


def check_sizes(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Fills in what --size says, and stops where there is no such model."""
    for name, value in SIZES[options.size].items():
        setattr(options, name, getattr(options, name) or value)
    if options.vocab <= CLS:
        parser.error(f"--vocab must be above {CLS}: the text has that many tokens")
    if options.d_model % (2 * options.heads):
        parser.error("--d-model must be an even multiple of --heads")
    if not 0 <= options.dropout < 1:
        parser.error("--dropout must be in [0, 1)")


def main(arguments: list[str] | None = None) -> int:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    left_out = ("output", "plot", "quick", "direction")
    return session.run(
        "model",
        options,
        {name: value for name, value in vars(options).items() if name not in left_out}
        | {"optimizer": OPTIMIZERS[options.optimizer]},
        functools.partial(measure, options),
        directions=DIRECTIONS if options.direction == "both" else (options.direction,),
        rounds=(3, 5) if options.quick else (5, 50),
        seconds=options.seconds,
    )


if __name__ == "__main__":
    sys.exit(main())

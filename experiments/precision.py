"""Effect of 16 bits on gradients and training, with delta from the rounded output and with its rounding error.

    python experiments/precision.py --plot                     everything
    python experiments/precision.py --sections errors cost     the operator alone
    python experiments/precision.py --quick                    tiny, to see that everything runs

- errors: gradients of the biases, of rel_key, query, key and value against float64 on the same rounded inputs, where
  rows, values, keys, rel_key and output gradients have offsets; and torch's SDPA without positions;
- cost: processor time and bytes with the residual and without, bfloat16;
- training: the model and the batches of examples/pretrain.py, the same data and weights for every kind of arithmetic.
  At a few steps, also the error of the gradient of the position bias (r_r_bias), of both deltas at the same weights: in
  the attention only (against float64 on its inputs and output gradient) and of the whole model (against the model in
  float64). Held-out losses are of the float32 weights, in float32.

The 16-bit kinds are bfloat16: autocast, and a model of bfloat16 weights with float32 master weights. A further kind is
float32 from weights rounded to bfloat16 once, which shows the random difference of two runs.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "examples")]  # for lib and parts

from lib import session  # noqa: E402
from lib.gradients import Recorder, delta_of, measure_cost, measure_errors, relative_error  # noqa: E402
from lib.harness import environment, write_json  # noqa: E402
from lib.plot import plot  # noqa: E402
from lib.precision import DELTAS, OWN, ROUNDED  # noqa: E402
from lib.report import markdown  # noqa: E402

BACKEND = "cpu"
SECTIONS = ("errors", "cost", "training")
QUICK = dict(lengths=[48], heads=1, head_dim=16, rounds=3, steps=4, every=2, probe=3, layers=1, d_model=16)
QUICK |= dict(seq_len=32, mem_len=16, batch_size=2, eval_batches=1, training_heads=2)


@dataclass(frozen=True)
class Kind:
    """Arithmetic of a training run; `masters`: the model has bfloat16 weights, copies of float32 weights."""

    name: str
    dtype: str = "float32"
    masters: bool = False
    perturbed: bool = False
    delta: str = OWN

    @property
    def has_16_bits(self) -> bool:
        return self.masters or self.dtype == "bfloat16"


KINDS = (
    Kind("float32"),
    Kind("float32, weights rounded once", perturbed=True),
    Kind("autocast, delta from the rounded output", "bfloat16", delta=ROUNDED),
    Kind("autocast", "bfloat16"),
    Kind("bfloat16 weights, delta from the rounded output", masters=True, delta=ROUNDED),
    Kind("bfloat16 weights", masters=True),
)


def train(kind: Kind, options: argparse.Namespace, folder: str) -> dict:
    """A training run's row: losses, each the mean of some steps, held-out losses, errors of the position bias."""
    from parts.parallel import processes
    from parts.run import make_run
    from parts.training import update
    from xlnet_kernels.pretraining import batch_loader

    with processes("cpu") as ours:
        run = make_run(pretrain_options(kind, options, folder), None, ours)
    judge = replace(run, options=argparse.Namespace(**vars(run.options) | {"dtype": "float32"}))
    if kind.perturbed:
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.copy_(parameter.bfloat16())
    if kind.masters:
        run = replace(run, model=rounded_copy(run.model), mems=narrow(run.mems, torch.bfloat16))
    row = {"section": "training", "implementation": kind.name, "losses": [], "held_out": [], "errors": []}
    row["parameters"] = sum(parameter.numel() for parameter in run.model.parameters())
    began, losses = time.perf_counter(), []
    for step, batch in enumerate(batch_loader(run.training, 0, options.steps), start=1):
        if kind.has_16_bits and (step % options.probe == 0 or step == 1):
            row["errors"].append({"step": step, **probe(run, batch)})
        with delta_of(kind.delta):
            loss, run.mems = run.loss(batch, run.mems)
            update(judge.model, run.optimizer, run.scheduler, loss, run.options.clip)
        if kind.masters:
            copy_weights(judge.model, run.model)
        losses.append(loss.item())
        if step % options.every == 0 or step == options.steps:
            row["losses"].append([step, round(statistics.fmean(losses), 5)])
            row["held_out"].append([step, round(judge.evaluate(), 5)])
            losses.clear()
    row["seconds"] = round(time.perf_counter() - began, 1)
    return row


def pretrain_options(kind: Kind, options: argparse.Namespace, folder: str) -> argparse.Namespace:
    """Options of examples/pretrain.py for a kind of arithmetic."""
    from pretrain import make_parser

    given = {
        "output": folder,
        "dtype": kind.dtype,
        "device": "cpu",
        "backend": BACKEND,
        "heads": options.training_heads,
    }
    names = ("steps", "layers", "d_model", "seq_len", "mem_len", "batch_size", "eval_batches", "objective")
    given |= {name: getattr(options, name) for name in names}
    return make_parser().parse_args([f"--{name.replace('_', '-')}={value}" for name, value in given.items()])


def rounded_copy(model: nn.Module) -> nn.Module:
    """The model in bfloat16; its gradients go to the parameters of `model`, in float32."""
    low = copy.deepcopy(model).bfloat16()
    for master, parameter in zip(model.parameters(), low.parameters(), strict=True):
        if parameter.requires_grad:

            def hand_over(parameter: Tensor, master: Tensor = master) -> None:
                master.grad, parameter.grad = parameter.grad.float(), None

            parameter.register_post_accumulate_grad_hook(hand_over)
    return low


@torch.no_grad()
def copy_weights(masters: nn.Module, low: nn.Module) -> None:
    for master, parameter in zip(masters.parameters(), low.parameters(), strict=True):
        parameter.copy_(master)


def narrow(mems: list[Tensor] | None, dtype: torch.dtype) -> list[Tensor] | None:
    """Memory in another dtype."""
    return mems and [mem.to(dtype) for mem in mems]


def probe(run, batch) -> dict[str, dict]:
    """Relative errors of r_r_bias with either delta at these weights, all layers of the model in one norm."""

    def gradient(run) -> Tensor:
        biases = [parameter for name, parameter in run.model.named_parameters() if name.endswith("r_r_bias")]
        return torch.stack(torch.autograd.grad(run.loss(batch, run.mems)[0], biases))

    with Recorder() as recorder:
        gradients = {OWN: gradient(run)}
    with delta_of(ROUNDED):
        gradients[ROUNDED] = gradient(run)
    wide = argparse.Namespace(**vars(run.options) | {"dtype": "float32"})
    # A copy of the weights, without the hooks of the 16-bit model.
    model = type(run.model)(run.config, run.options.backend).double()
    model.load_state_dict(run.model.state_dict())
    exact = gradient(replace(run, model=model, options=wide, mems=narrow(run.mems, torch.float64)))
    return {
        "attention": recorder.position_bias_errors(),
        "model": {name: relative_error(gradients[name], exact) for name in DELTAS},
    }


def measure(options: argparse.Namespace, results: dict) -> None:
    """Run all sections; the file is written after every part."""

    def keep(row: dict) -> None:
        results["rows"].append(row)
        write_json(options.output, results)
        print(row["section"], row.get("case") or row.get("direction", ""), row["implementation"], file=sys.stderr)

    shape = (options.lengths, options.heads, options.head_dim, BACKEND)
    if "errors" in options.sections:
        for row in measure_errors(["bfloat16", "float16"], *shape):
            keep(row)
    if "cost" in options.sections:
        for row in measure_cost("bfloat16", *shape, options.rounds):
            keep(row)
    if "training" in options.sections:
        with tempfile.TemporaryDirectory() as folder:
            for kind in KINDS:
                keep(train(kind, options, folder))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sections", choices=SECTIONS, nargs="+", default=list(SECTIONS))
    add("--threads", type=session.positive, default=torch.get_num_threads())
    add("--output", type=Path, default=session.RESULTS / "precision-cpu.json")
    add("--plot", action="store_true", help="also a picture of the training runs, beside the JSON")
    add("--lengths", type=session.positive, nargs="+", default=[512, 1024, 2048], help="of the operator's calls")
    add("--heads", type=session.positive, default=2, help="of the operator's calls")
    add("--head-dim", type=session.positive, default=64)
    add("--rounds", type=session.positive, default=50, help="samples of each time")
    add("--steps", type=session.positive, default=500, help="of each training run")
    add("--every", type=session.positive, default=25, metavar="STEPS", help="between held-out losses")
    add("--probe", type=session.positive, default=100, metavar="STEPS", help="between errors of the position bias")
    add("--objective", choices=("permutation", "autoregressive"), default="autoregressive")
    sizes = {"layers": 2, "d-model": 64, "training-heads": 2, "seq-len": 256, "mem-len": 128, "batch-size": 4}
    for name, default in (sizes | {"eval-batches": 8}).items():
        add(f"--{name}", type=session.positive, default=default)
    add("--quick", action="store_true", help="tiny sizes and few steps")
    if "--quick" in arguments:
        parser.set_defaults(**QUICK)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    torch.set_num_threads(options.threads)
    settings = {name: value for name, value in vars(options).items() if name not in ("output", "plot", "quick")}
    results = {"benchmark": "precision", "environment": environment("cpu"), "settings": settings}
    results |= {"complete": False, "rows": []}
    began = time.perf_counter()
    measure(options, results)
    results |= {"complete": True, "seconds": round(time.perf_counter() - began, 1)}
    write_json(options.output, results)
    print(markdown(results))
    if options.plot:
        plot(results, options.output.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())

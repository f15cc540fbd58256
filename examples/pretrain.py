"""Pre-trains an XLNet on real text: permutation LM, auto-regressive LM or masked LM, on the same model and text.

    python examples/pretrain.py                                 Python's manual as bytes; minutes on two cores
    python examples/pretrain.py --objective masked --text my-folder --tokenizer tokenizer.json --output runs/mine
    python examples/pretrain.py --output runs/mine --resume     goes on as if it had never stopped, bit for bit
    torchrun --nproc-per-node 2 examples/pretrain.py --parallel fsdp2

Writes whole checkpoints (model, tokenizer, generation config, model card) that `from_pretrained` and transformers read,
of which --output itself shows the newest; metrics.jsonl with a line for each step, the same for TensorBoard, and a
picture. Ctrl-C writes a checkpoint and stops. Needs pip install '.[examples]'.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from pathlib import Path

try:
    from rich.console import Console
except ImportError:
    raise SystemExit("pretrain.py needs rich: pip install '.[examples]'") from None

from parts import checkpoint, command
from parts.command import number
from parts.corpus import unigram_entropy
from parts.parallel import check_place, processes
from parts.resume import add_resume_options, parse
from parts.run import FREE, Run, make_run
from parts.training import (
    Metrics,
    add_optimizer_options,
    check_finite,
    make_exact,
    memory_used,
    progress_bar,
    stop_signals,
    update,
)
from xlnet_kernels.pretraining import batch_loader


def make_parser() -> argparse.ArgumentParser:
    parser = command.make_parser(__doc__)
    add = parser.add_argument_group("text").add_argument
    add("--text", metavar="PATH", help="a file or a folder; default the manual that comes with Python")
    add("--tokenizer", metavar="PATH", help="of train_tokenizer.py, or a tokenizer.json; default one token per byte")
    add("--held-out", type=number(float, 0, 1), default=0.1, help="last share of the text, for validation")
    add = parser.add_argument_group("objective").add_argument
    add(
        "--objective",
        choices=("permutation", "autoregressive", "masked"),
        default="permutation",
        help="of pre-training",
    )
    add("--num-predict", type=number(int, 1), help="targets per sequence; default a sixth of --seq-len")
    add("--perm-size", type=number(int, 1), help="tokens that one order permutes; default all")
    add("--pairs", action=argparse.BooleanOptionalAction, default=True, help="[A, SEP, B, SEP, CLS] or running text")
    add("--bi-data", action="store_true", help="half of each batch reads the text backwards")
    add("--seq-len", type=number(int, 2), default=128, help="tokens of a sequence")
    add("--reuse-len", type=number(int, 1), help="text before A, which is remembered; default half of --seq-len")
    add("--mem-len", type=number(int, 0), default=64, help="tokens of memory before each sequence; 0 for none")
    add = parser.add_argument_group("model").add_argument
    add("--layers", type=number(int, 1), default=4, help="layers")
    add("--d-model", type=number(int, 2), default=128, help="width of the hidden states")
    add("--heads", type=number(int, 1), default=4, help="heads of attention")
    add("--d-inner", type=number(int, 1), help="default 4 x --d-model")
    add("--initializer-range", type=number(float, 0), help="of weights; default XLNet's 0.02 x sqrt(1024 / --d-model)")
    batch = "sequences per step, in all processes together"
    add_optimizer_options(parser, steps=1500, lr=2e-3, layer_decay=1.0, batch=batch)
    add = parser.add_argument_group("run").add_argument
    add("--output", type=Path, default=Path("runs/pretrain"), help="folder of checkpoints and metrics")
    add_resume_options(add, "remove the checkpoints that are in --output")
    add("--keep", type=number(int, 1), default=2, metavar="N", help="the last N checkpoints")
    add("--eval-every", type=number(int, 1), default=100, metavar="STEPS", help="evaluate so often")
    add("--eval-batches", type=number(int, 1), default=16, metavar="N", help="the same ones each time")
    add("--stop-at", type=number(int, 1), metavar="STEP", help="stop there, with a checkpoint; --resume goes on")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="bfloat16: autocast")
    add("--compile", action="store_true", help="torch.compile")
    several = "in several processes (torchrun, accelerate): replicas, or shards"
    add("--parallel", choices=("ddp", "fsdp2"), default="ddp", help=several)
    add("--workers", type=number(int, 0), default=0, help="processes that prepare batches")
    command.add_place(parser)
    return parser


def train(run: Run, console: Console) -> bool:
    """Trains to the end, to --stop-at or to a signal, and leaves a checkpoint; False after a signal.

    Raises:
        FloatingPointError: the loss or the gradient is not finite; checkpoints stay as they are.
    """
    options, ours = run.options, run.processes
    end = min(options.steps, options.stop_at or options.steps)
    tokens, stop = options.batch_size * options.seq_len, False
    with ExitStack() as stack:
        stopped = stack.enter_context(stop_signals())
        metrics = stack.enter_context(Metrics(options.output / "metrics.jsonl", run.step, write=ours.first))
        bar = stack.enter_context(progress_bar(console, disable=not ours.first))
        task = bar.add_task("", total=options.steps, completed=run.step, status="")
        for batch in batch_loader(run.training, run.step, end, num_workers=options.workers):
            begin, rate = time.perf_counter(), run.scheduler.get_last_lr()[-1]
            loss, run.mems = run.loss(batch, run.mems)
            norm = update(run.model, run.optimizer, run.scheduler, loss, options.clip)
            loss, stop = ours.mean(loss.item(), stopped())
            run.step += 1
            check_finite(run.step, loss, norm, run.checkpoints.finish)
            speed = tokens / (time.perf_counter() - begin)
            run.losses["loss"] = loss
            metrics.write(step=run.step, loss=loss, lr=rate, gradient=norm, tokens_per_second=round(speed))
            status = f"loss {loss:.3f}  {speed:,.0f} tokens/s  {memory_used(ours.device)}"
            bar.update(task, completed=run.step, status=status)
            last = stop or run.step == end
            if last or run.step % options.eval_every == 0:
                held_out = run.losses["validation_loss"] = run.evaluate()
                metrics.write(step=run.step, validation_loss=held_out)
                if ours.first:
                    status += f"  validation {run.corpus.describe(held_out)}"
                    console.print(f"step {run.step}: {status}", soft_wrap=True)
            if last or run.step % options.save_every == 0:
                run.save()
            if stop:
                break
        run.checkpoints.finish()
    return not stop


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0; 1 where training failed; 2 where options do not fit; 130 where interrupted."""
    console = Console(highlight=False)
    with ExitStack() as stack:
        try:
            options, last = parse(make_parser(), sys.argv[1:] if arguments is None else arguments, free=FREE)
            if options.overwrite and checkpoint.latest(options.output):
                command.protect(options.output, {"--tokenizer": options.tokenizer, "--text": options.text})
            make_exact(options.threads)
            check_place(options.device, options.backend)
            ours = stack.enter_context(processes(options.device))
            run = make_run(options, last, ours)
        except ValueError as error:
            print(f"pretrain.py: error: {error}", file=sys.stderr)
            return 2
        if ours.first:
            if options.overwrite:
                checkpoint.remove(options.output)
            size = sum(parameter.numel() for parameter in run.model.parameters())
            console.print(f"{size:,} parameters, {len(run.corpus.text):,} tokens, step {run.step} of {options.steps}")
            for name, part in (("the text", run.corpus.text), ("its held-out part", run.validation.text)):
                entropy = run.corpus.describe(unigram_entropy(part))
                console.print(f"unigram entropy of {name}: {entropy}", soft_wrap=True)
        try:
            whole = train(run, console)
        except FloatingPointError as error:
            print(f"pretrain.py: {error}; the last checkpoint is as it was", file=sys.stderr)
            return 1
        if ours.first and run.step < options.steps:
            console.print(f"stopped at step {run.step} of {options.steps}; --resume goes on")
        return 0 if whole else 130


if __name__ == "__main__":
    sys.exit(main())

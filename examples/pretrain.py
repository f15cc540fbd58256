"""Pre-train an XLNet on real text: permutation LM, auto-regressive LM or masked LM, on the same model and text.

    python examples/pretrain.py                                 Python's manual as bytes; minutes on two cores
    python examples/pretrain.py --objective masked --text my-folder --tokenizer tokenizer.json --output runs/mine
    python examples/pretrain.py --output runs/mine --resume     continues exactly, bit for bit
    python examples/pretrain.py --output runs/mine --resume --steps 3000     makes more steps
    python examples/pretrain.py --checkpoint runs/mine --text other --output runs/other     trains a model further
    torchrun --nproc-per-node 2 examples/pretrain.py --parallel fsdp2

Writes whole checkpoints (model, tokenizer, generation config, model card) for `from_pretrained` and transformers;
--output itself shows the newest. Also writes metrics.jsonl with a line for each step, the same for TensorBoard, and a
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

from parts import command
from parts.command import number
from parts.corpus import unigram_entropy
from parts.folder import find, latest, locked, remove
from parts.parallel import processes, settle_place
from parts.resume import add_optimizer_options, add_resume_options, parse
from parts.run import FREE, Run, make_run, sizes_of
from parts.training import (
    Metrics,
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
    further = "a model to train further, with its sizes and its tokenizer, on other text; default from scratch"
    add("--checkpoint", type=Path, metavar="FOLDER", help=further)
    add("--tokenizer", metavar="PATH", help="of train_tokenizer.py, or a tokenizer.json; default one token per byte")
    add("--held-out", type=number(float, 0, 1), default=0.1, help="last share of the text, for validation")
    add = parser.add_argument_group("objective").add_argument
    add(
        "--objective",
        choices=("permutation", "autoregressive", "masked"),
        default="permutation",
        help="of pre-training; default permutation, or that of --checkpoint",
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


def begin_from(folder: Path, options: argparse.Namespace, arguments: list[str]) -> argparse.Namespace:
    """The options, parsed again with the sizes and the objective of the initial model.

    Raises:
        ValueError: an option gives another size, or another tokenizer.
    """
    if options.tokenizer:
        raise ValueError("--tokenizer is for models from scratch: a checkpoint has its own")
    parser, sizes = make_parser(), sizes_of(folder)
    parser.set_defaults(**sizes)
    options = parser.parse_args(arguments)
    for name, size in sizes.items():
        if name != "objective" and getattr(options, name) != size:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(options, name)}: the model in {folder} has {size}")
    return options


def train(run: Run, console: Console) -> bool:
    """Train to the end, to --stop-at or to a signal, and write a checkpoint; returns False after a signal.

    Raises:
        FloatingPointError: the loss or the gradient is not finite; checkpoints are unchanged.
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
            last = run.step == end
            # Checkpoint first, because the next Ctrl-C may come during an evaluation, which takes seconds.
            if stop:
                if ours.first:
                    console.print("stopping: writing a checkpoint")
                run.save()
                run.checkpoints.finish()
            if last or run.step % options.eval_every == 0:
                held_out = run.losses["validation_loss"] = run.evaluate()
                metrics.write(step=run.step, validation_loss=held_out)
                if ours.first:
                    shown = f"step {run.step}: loss {loss:.3f}, held out {run.corpus.describe(held_out)}"
                    console.print(shown, soft_wrap=True)
            if stop:
                break
            if last or run.step % options.save_every == 0:
                run.save()
        run.checkpoints.finish()
    return not stop


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit status 0, 1 if training failed, 2 for invalid options, or 130 if interrupted."""
    console = Console(highlight=False)
    with ExitStack() as stack:
        try:
            arguments = sys.argv[1:] if arguments is None else arguments
            options, last = parse(make_parser(), arguments, free=FREE)
            if options.checkpoint and not last:
                options = begin_from(find(options.checkpoint), options, arguments)
            if options.overwrite and latest(options.output):
                inputs = {"--tokenizer": options.tokenizer, "--text": options.text, "--checkpoint": options.checkpoint}
                command.protect(options.output, inputs)
            make_exact(options.threads)
            settle_place(options)
            ours = stack.enter_context(processes(options.device))
            if ours.first:
                stack.enter_context(locked(options.output))
            run = make_run(options, last, ours)
        except (ValueError, OSError) as error:
            print(f"pretrain.py: error: {error}", file=sys.stderr)
            return 2
        if ours.first:
            if options.overwrite:
                remove(options.output)
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
        except OSError as error:
            print(f"pretrain.py: cannot write: {error}; the last checkpoint is as it was", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("pretrain.py: stopped; the last checkpoint is as it was", file=sys.stderr)
            return 130
        if ours.first:
            if run.step < options.steps:
                console.print(f"stopped at step {run.step} of {options.steps}; --resume goes on")
            else:
                console.print(f"step {run.step} of {options.steps}: done; --resume with more --steps goes on")
            console.print(f"model, tokenizer and metrics are in {options.output}", soft_wrap=True)
        return 0 if whole else 130


if __name__ == "__main__":
    sys.exit(main())

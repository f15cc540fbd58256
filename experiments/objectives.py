"""Claims of the papers about objectives, streams and memory, tested with small models.

    python experiments/objectives.py --plot                          everything, about 23 minutes of one thread
    python experiments/objectives.py --experiments trainer --plot    one of them; the file keeps the others' rows
    python experiments/objectives.py --quick                         tiny, to see that everything runs

- pairs: targets depend on each other under permutation and not under masking;
- context: both sides of context help over left-to-right, after fine-tuning;
- memory: memory carries context over segments, with its range;
- streams: two-stream predictions know the position and not the token, a single stream's do not know the position;
- trainer: losses of permutation, masked and autoregressive LM at equal tokens, and the time to reach the loss of
  transformers' XLNet in its own Trainer.

claims/ has a file for each, with its definitions and sources. All models have the tutorial's text, tokenizer and
size, and three seeds. Times are processor time of one thread. Needs pip install '.[bench,examples]'.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "examples")]  # for lib and parts

from lib import session  # noqa: E402
from lib.harness import environment, write_json  # noqa: E402
from lib.plot import plot  # noqa: E402
from lib.report import markdown  # noqa: E402

EXPERIMENTS = ("pairs", "context", "memory", "streams", "trainer")
FIXED = ("output", "plot", "quick", "experiments", "models")  # options that are not settings of an experiment
SIZES = {  # option: default, help
    "topics": (1000, "topics of the manual, at most"),
    "vocab": (500, "ids of the tokenizer"),
    "layers": (2, "layers"),
    "d-model": (128, "width of the hidden states"),
    "heads": (4, "heads of attention"),
    "batch-size": (16, "sequences per step"),
    "seq-len": (128, "tokens of a sequence"),
    "steps": (300, "of pre-training"),
    "num-predict": (40, "targets per sequence"),
    "least": (5, "pairs: how often two words are neighbours in the training text"),
    "occurrences": (96, "pairs: places of each bin of mutual information"),
    "tuning-steps": (150, "context: of fine-tuning"),
    "tuning-length": (160, "context: tokens of a text in fine-tuning"),
    "segment": (32, "memory: tokens of a segment"),
    "segment-batch": (32, "memory: segments per step"),
    "segment-steps": (300, "memory: of training"),
    "windows": (64, "memory: places at which lengths of context are compared"),
    "held-out-tokens": (8192, "memory: of evaluation"),
    "trainer-steps": (150, "trainer: of transformers' Trainer"),
    "trainer-every": (15, "trainer: steps between evaluations"),
    "held-out-rows": (96, "trainer: sequences of evaluation"),
}
QUICK = dict(seeds=[0], topics=12, vocab=300, layers=1, d_model=16, heads=2, batch_size=4, seq_len=32, steps=4)
QUICK |= dict(num_predict=8, occurrences=4, least=2, tuning_steps=2, tuning_length=48, segment=8, segment_batch=4)
QUICK |= dict(segment_steps=4, memories=[0, 2], windows=2, held_out_tokens=200, held_out_rows=8)
QUICK |= dict(trainer_steps=4, trainer_every=2)


def measure(options: argparse.Namespace, results: dict) -> None:
    """Run the chosen experiments; the file is written after every row."""
    from claims.workshop import Workshop

    with tempfile.TemporaryDirectory() as folder:
        workshop = Workshop(options, options.models or Path(folder))
        results["text"] = {"bytes": workshop.bytes}
        for name in options.experiments:
            began = time.process_time()
            for row in importlib.import_module(f"claims.{name}").measure(workshop):
                results["rows"].append(row)
                write_json(options.output, results)
                print(name, row["implementation"], row.get("task", ""), row.get("seed", ""), file=sys.stderr)
            results["cpu_seconds"][name] = round(time.process_time() - began, 1)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--experiments", choices=EXPERIMENTS, nargs="+", default=list(EXPERIMENTS), help="default all")
    add("--output", type=Path, default=session.RESULTS / "objectives-cpu.json", metavar="FILE", help="results, JSON")
    add("--plot", action="store_true", help="also a picture, beside the JSON")
    add("--models", type=Path, metavar="FOLDER", help="keeps trained models there, and takes those that are there")
    add("--quick", action="store_true", help="tiny sizes and few steps")
    add("--backend", default="cpu", help="of the attention")
    add("--threads", type=session.positive, default=1, metavar="N", help="of torch")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="SEED", help="one model of each kind for each")
    for name, (default, words) in SIZES.items():
        add(f"--{name}", type=session.positive, default=default, metavar="N", help=f"{words} (default {default})")
    memories = "lengths of memory that are tried, in segments"
    add("--memories", type=int, nargs="+", default=[0, 1, 2, 3, 4], metavar="SEGMENTS", help=memories)
    if "--quick" in arguments:
        parser.set_defaults(**QUICK)
    return parser.parse_args(arguments)


def begin(options: argparse.Namespace) -> dict:
    """Initial results: the file's rows, without those of the chosen experiments.

    Raises:
        ValueError: the file's rows have other settings.
    """
    settings = {name: value for name, value in vars(options).items() if name not in FIXED}
    results = {"benchmark": "objectives", "environment": environment("cpu"), "settings": settings}
    results |= {"complete": False, "cpu_seconds": {}, "rows": []}
    if set(options.experiments) == set(EXPERIMENTS) or not options.output.exists():
        return results
    kept = json.loads(options.output.read_text())
    if kept["settings"] != settings:
        raise ValueError(f"{options.output} has rows of other settings: name another --output")
    results["rows"] = [row for row in kept["rows"] if row["section"] not in options.experiments]
    results["cpu_seconds"] = {n: x for n, x in kept["cpu_seconds"].items() if n not in options.experiments}
    return results


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit status 0, or 2 if the file has rows of other settings."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    torch.set_num_threads(options.threads)
    try:
        results = begin(options)
    except ValueError as error:
        print(f"objectives.py: error: {error}", file=sys.stderr)
        return 2
    measure(options, results)
    results["complete"] = True
    write_json(options.output, results)
    print(markdown(results))
    if options.plot:
        plot(results, options.output.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())

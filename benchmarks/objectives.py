"""What the papers behind this system claim of its objectives, streams and memory, shown with small models.

    python benchmarks/objectives.py --plot                          everything, about 23 minutes of one thread
    python benchmarks/objectives.py --experiments trainer --plot    one of them; the file keeps the others' rows
    python benchmarks/objectives.py --quick                         tiny, to see that everything runs

- pairs: targets depend on each other under permutation and not under masking;
- context: both sides of context help over left-to-right, after fine-tuning;
- memory: memory carries context over segments, and how far;
- streams: two-stream predictions know the position and not the token, a single stream's do not know the position;
- trainer: losses of permutation, masked and autoregressive LM at equal tokens, and how long they take to reach what
  transformers' XLNet reaches in its own Trainer.

lib/claims/ has a file for each, with its definitions and sources. All models have the tutorial's text, tokenizer and
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

from lib import session
from lib.harness import environment, write_json
from lib.plot import plot
from lib.report import markdown

EXAMPLES = Path(__file__).parents[1] / "examples"
EXPERIMENTS = ("pairs", "context", "memory", "streams", "trainer")
FIXED = ("output", "plot", "quick", "experiments", "models")  # options that are no settings of an experiment
QUICK = dict(seeds=[0], topics=12, vocab=300, layers=1, d_model=16, heads=2, batch_size=4, seq_len=32, steps=4)
QUICK |= dict(num_predict=8, occurrences=4, least=2, tuning_steps=2, tuning_length=48, segment=8, segment_batch=4)
QUICK |= dict(segment_steps=4, memories=[0, 2], windows=2, held_out_tokens=200, held_out_rows=8)
QUICK |= dict(trainer_steps=4, trainer_every=2)


def measure(options: argparse.Namespace, results: dict) -> None:
    """All experiments that are asked for; the file is written after every row."""
    sys.path.append(str(EXAMPLES))
    from lib.claims.workshop import Workshop

    with tempfile.TemporaryDirectory() as folder:
        workshop = Workshop(options, options.models or Path(folder))
        results["text"] = {"bytes": workshop.bytes}
        for name in options.experiments:
            began = time.process_time()
            for row in importlib.import_module(f"lib.claims.{name}").measure(workshop):
                results["rows"].append(row)
                write_json(options.output, results)
                print(name, row["implementation"], row.get("task", ""), row.get("seed", ""), file=sys.stderr)
            results["cpu_seconds"][name] = round(time.process_time() - began, 1)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--experiments", choices=EXPERIMENTS, nargs="+", default=list(EXPERIMENTS))
    add("--output", type=Path, default=session.RESULTS / "objectives-cpu.json")
    add("--plot", action="store_true", help="also a picture, beside the JSON")
    add("--models", type=Path, metavar="FOLDER", help="keeps trained models there, and takes those that are there")
    add("--quick", action="store_true", help="tiny sizes and few steps")
    add("--backend", default="cpu", help="of the attention")
    add("--threads", type=session.positive, default=1)
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    sizes = {"topics": 1000, "vocab": 500, "layers": 2, "d-model": 128, "heads": 4, "batch-size": 16, "seq-len": 128}
    sizes |= {"steps": 300, "num-predict": 40}
    sizes |= {"least": 5, "occurrences": 96}  # pairs
    sizes |= {"tuning-steps": 150, "tuning-length": 160}  # context
    sizes |= {"segment": 32, "segment-batch": 32, "segment-steps": 300, "windows": 64, "held-out-tokens": 8192}
    sizes |= {"trainer-steps": 150, "trainer-every": 15, "held-out-rows": 96}
    for name, default in sizes.items():
        add(f"--{name}", type=session.positive, default=default)
    add("--memories", type=int, nargs="+", default=[0, 1, 2, 3, 4], metavar="SEGMENTS")
    if "--quick" in arguments:
        parser.set_defaults(**QUICK)
    return parser.parse_args(arguments)


def begin(options: argparse.Namespace) -> dict:
    """Results without rows of the experiments that are asked for; of others those that the file has.

    Raises:
        ValueError: the file's rows are of other settings.
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
    """Exit status 0; 2 where the file has rows of other settings."""
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

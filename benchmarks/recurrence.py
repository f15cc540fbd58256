"""Evaluating a language model with memory, against recomputing a sliding window for every token.

    python benchmarks/recurrence.py --plot          the base size over attention lengths of 256 to 3800
    python benchmarks/recurrence.py --lengths 256 --layers 4
    python benchmarks/recurrence.py --quick         a tiny model, to see that everything runs

The table 9 of Dai et al. 2019 (Transformer-XL), on one GPU: up to 1874 times slower without memory. Here all ways are
the same causal model (attn_type "uni", random weights) with the same kernels on the same text, bytes of English:

- memory, segments: the last `length` positions are kept as projected keys and values; one call for `--segment` tokens,
  each sees the memory and what precedes it in its segment, `length` positions at least;
- memory, single tokens: the same, one call for each token, as in generation;
- sliding window: one call on `length` tokens for each token, and only the last one's scores are computed.

Before a length is timed, all of its ways must give the same log-probabilities wherever their contexts are the same: at
the beginning of the text, up to `length` tokens from it. If they do not, it stops.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count, repeat

import torch
from torch import Tensor

import xlnet_kernels as xk
from lib import session
from lib.harness import Run
from lib.measure import TOLERANCE, Bench, Job
from lib.session import positive
from lib.text import CLS, english

SEGMENTS, SINGLE, WINDOW = "memory, segments", "memory, single tokens", "sliding window"
LENGTHS = [256, 800, 1800, 2800, 3800]
CHECKED = 4  # positions at which log-probabilities are compared
QUICK = dict(layers=2, d_model=64, heads=4, d_inner=96, vocab=CLS + 1, segment=8, lengths=[16, 32], seconds=0.01)


class Disagreement(Exception):
    """Two ways that must give the same do not."""


def build_model(options: argparse.Namespace) -> xk.XLNetLMHeadModel:
    """A Transformer-XL with random weights."""
    torch.manual_seed(0)
    config = xk.XLNetConfig(
        vocab_size=options.vocab,
        d_model=options.d_model,
        n_layer=options.layers,
        n_head=options.heads,
        d_inner=options.d_inner,
        attn_type="uni",
        mem_len=0,
    )
    return xk.XLNetLMHeadModel(config).eval().to(options.device, getattr(torch, options.dtype))


@torch.no_grad()
def log_probs(
    model: xk.XLNetLMHeadModel, ids: Tensor, last: int, **options
) -> tuple[Tensor, xk.ProjectedMemory | None]:
    """Log-probabilities behind each of the last `last` tokens, (last, vocabulary), and the memory."""
    output = model.transformer(ids[None], **options)
    return model.lm_loss(output.last_hidden_state[0, -last:]).log_softmax(-1), output.mems


def with_memory(model: xk.XLNetLMHeadModel, text: Tensor, length: int, segments: Iterable[int]) -> Iterator[Tensor]:
    """The text from its beginning on, so many tokens in each call; round and round."""
    memory, begin = model.transformer.project_mems(), 0
    for segment in segments:
        places = torch.arange(begin, begin + segment, device=text.device) % len(text)
        found, memory = log_probs(model, text[places], segment, mems=memory, mem_len=length, use_mems=True)
        yield found
        begin += segment


def with_window(model: xk.XLNetLMHeadModel, text: Tensor, length: int, begin: int) -> Iterator[Tensor]:
    """Token after token from `begin` on, each from the `length` last ones, or as many as there are."""
    for end in count(begin + 1):
        places = torch.arange(max(0, end - length), end, device=text.device) % len(text)
        yield log_probs(model, text[places], 1, use_mems=False)[0]


def compare(
    model: xk.XLNetLMHeadModel, text: Tensor, length: int, segments: Iterable[int], begin: int
) -> dict[str, object]:
    """The largest difference of log-probabilities at some places from `begin` to `length`: both ways see all before."""
    found: list[Tensor] = []
    for rows in with_memory(model, text, length, segments):
        found.extend(rows)
        if len(found) >= length:
            break
    places = torch.linspace(begin, length - 1, CHECKED).long().unique().tolist()
    wanted = torch.cat([next(with_window(model, text, length, place)) for place in places]).double()
    error = (torch.stack([found[place] for place in places]).double() - wanted).abs().max() / wanted.abs().max()
    tolerance = TOLERANCE[found[0].dtype]["forward"]
    # "not above" would let a NaN through
    passed = bool(error <= tolerance)
    return {"passed": passed, "tolerance": tolerance, "errors": {"log_probs": float(f"{error.item():.3g}")}}


def measure(options: argparse.Namespace, bench: Bench) -> None:
    """Every attention length: first the comparison, then the times."""
    model = build_model(options)
    text = torch.tensor(list(english()), device=options.device)
    segments = {SEGMENTS: options.segment, SINGLE: 1}
    for length in options.lengths:
        bench.on_step(f"recurrence L {length}: comparing log-probabilities", 0, 0)
        checks = {
            SEGMENTS: compare(model, text, length, repeat(options.segment), 0),
            SINGLE: compare(model, text, length, chain([length - CHECKED], repeat(1)), length - CHECKED),
        }
        for name, check in checks.items():
            if not check["passed"]:
                raise Disagreement(f"{name}, L {length}: log-probabilities are not the sliding window's: {check}")
        streams = {
            # One call fills the memory: what is timed goes on from there.
            name: lambda size=size, length=length: with_memory(model, text, length, chain([length], repeat(size)))
            for name, size in segments.items()
        }
        streams[WINDOW] = lambda length=length: with_window(model, text, length, length)
        jobs = [Job(name, functools.partial(_run, stream)) for name, stream in streams.items()]
        rows = bench.group("recurrence", jobs, {"length": length, "batch": 1, "dtype": options.dtype})
        for row in rows:
            row["tokens_per_call"] = segments.get(row["implementation"], 1)
            if row["implementation"] in checks:
                row["check"] = checks[row["implementation"]]
        _relate(rows)
        bench.save()


def _run(stream: Callable[[], Iterator[Tensor]]) -> Run:
    """Each call is the next step of the stream, the first step aside."""
    steps = stream()
    next(steps)
    return Run(lambda: next(steps), {}, ())


def _relate(rows: list[dict]) -> None:
    """Tokens per second, and how many times the window's."""
    for row in rows:
        if "median_ms" in row:
            row["tokens_per_s"] = round(1e3 * row["tokens_per_call"] / row["median_ms"], 3)
    speeds = {row["implementation"]: row["tokens_per_s"] for row in rows if "tokens_per_s" in row}
    for row in rows:
        if "tokens_per_s" in row and WINDOW in speeds:
            row["speedup"] = round(row["tokens_per_s"] / speeds[WINDOW], 2)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    session.common_options(parser, ("float32", "bfloat16", "float16"))
    add = parser.add_argument
    for name, default in (("layers", 12), ("d-model", 768), ("heads", 12), ("d-inner", 3072), ("vocab", CLS + 1)):
        add(f"--{name}", type=positive, default=default)
    add("--lengths", type=positive, nargs="+", default=LENGTHS, help="attention lengths; default 256 to 3800")
    add("--segment", type=positive, default=128, help="tokens that are evaluated in one call with memory")
    add("--seconds", type=float, default=10.0, help="of samples per way and length")
    add("--quick", action="store_true", help="a tiny model and few samples")
    if "--quick" in arguments:
        parser.set_defaults(**QUICK)
    options = parser.parse_args(arguments)
    session.check_common(parser, options, "recurrence")
    options.lengths = sorted(set(options.lengths))
    if not CHECKED < options.lengths[0] <= options.lengths[-1] <= len(english()):
        parser.error(f"--lengths must lie between {CHECKED + 1} and the text's {len(english())} tokens")
    if options.vocab <= CLS:
        parser.error(f"--vocab must be above {CLS}: the text has that many tokens")
    if options.d_model % (2 * options.heads):
        parser.error("--d-model must be an even multiple of --heads")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Exit status as in `session.run`, 1 where the ways do not agree."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        return session.run(
            "recurrence",
            options,
            {name: value for name, value in vars(options).items() if name not in ("output", "plot", "quick")},
            functools.partial(measure, options),
            directions=("forward",),
            rounds=(3, 5) if options.quick else (5, 100),
            seconds=options.seconds,
        )
    except Disagreement as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

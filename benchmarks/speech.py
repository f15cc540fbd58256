"""The attention of a speech encoder over audio of some length: accelerated, and as transformers has it.

    python benchmarks/speech.py --plot      Parakeet's layer (1024 wide, 8 heads) over 10 s, 60 s and 10 min of audio
    python benchmarks/speech.py --device cuda --dtype bfloat16
    python benchmarks/speech.py --quick     a tiny layer, to see that everything runs
    python benchmarks/speech.py --toolkit nemo espnet speechbrain fairseq2 --audio 10 60
    python benchmarks/speech.py --layers 24 --toolkit parakeet --audio 10 60 600 --once     whole encoders

Parakeet makes 12.5 frames of a second (8 x subsampling of 10 ms steps). A call is its layer with the mask of its
encoder for audio without padding: whole, with the projections of frames and positions, which all implementations share;
and the attention alone, the same layer without projections. Outputs and gradients are checked before they are timed:
against transformers' layer in float64; beyond 1000 frames the outputs of some of them against plain torch in float64.
There only the attention's forward pass is measured: training is on shorter clips, and projections weigh little.

Accelerated with linears=True: projections too take the faster of torch's libraries of products. Without gradients the
projected positions are kept from call to call, as they are in use while audio is of one length or gets shorter.

With --toolkit, a call is one whole encoder layer of that toolkit, feed-forward and convolution included, made by the
toolkit itself: accelerated, and in each of its own ways. With --layers N it is the library's whole encoder of N layers:
Parakeet of transformers and of NeMo from mel features on, NeMo's with its window for long audio (nemo-local) from
frames on, the Conformers of ESPnet, SpeechBrain and fairseq2. All are checked against the library's own code in
float64; where its maps would not fit in memory, and for SpeechBrain, which has none, against the accelerated one in
float64 (on the reference, where that fits). Right is a gradient that misses it by twice as much as the library's own
code does in the same dtype, or by the usual tolerance of the largest gradient of the same weight in any layer: in some
that of keys and bias_u nearly cancels, and all lose digits. A toolkit that is not installed is skipped with the reason.
With --once every implementation is called once: for audio of many minutes. With --window LEFT RIGHT a frame sees so
many before and after it. The accelerated encoder alone is measured then. Its first 64 frames are checked against itself
in float64, over as many frames as they can depend on. With --from-full each row also has the distance of these hidden
states from those of full attention: the root mean square of differences, relative to that of full attention.

transformers compiled is torch.compile of its sdpa, measured on GPUs and where it is asked for (--implementations).
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import sys
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lib import session, toolkits
from lib.harness import CannotRun, Run, free_memory
from lib.measure import DIRECTIONS, Bench, Job, compare
from lib.session import positive
from xlnet_kernels.integrations.transformers import accelerate

OWN, COMPILED = "xlnet_kernels", "transformers compiled"
THEIRS = ("transformers sdpa", "transformers eager", COMPILED)
NAMES = (OWN, *THEIRS)
FRAMES_PER_SECOND = 12.5
PARTS = {"attention": "speech", "layer": "speech-layer"}  # and their sections of the report
TOOLKIT, ENCODER = "speech-toolkit", "speech-encoder"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "relative_k_proj")
CHECKED = 64  # frames of long audio whose outputs are checked
CONVOLUTION = 16  # frames ahead that a layer's convolution reads, at most
QUICK = dict(d_model=32, heads=4, audio=[2.0, 4.0], train_frames=30, seconds=0.01)


@dataclass(frozen=True)
class SpeechCase:
    """One layer, or its attention alone, on one length of audio."""

    part: str
    audio: float  # seconds
    batch: int
    d_model: int
    heads: int
    dtype: torch.dtype
    device: str
    train_frames: int
    window: tuple[int, int] | None = None

    @property
    def length(self) -> int:
        return round(self.audio * FRAMES_PER_SECOND)

    @property
    def long(self) -> bool:
        return self.length > self.train_frames

    @property
    def labels(self) -> dict[str, object]:
        """Labels of a row for its problem."""
        audio = f"{self.audio:g} s" if self.audio < 120 else f"{self.audio / 60:g} min"
        case = f"{audio}: {self.length} x {self.batch}"
        dtype = str(self.dtype).removeprefix("torch.")
        return {"length": self.length, "batch": self.batch, "case": case, "dtype": dtype}

    def needs(self) -> dict[str, int]:
        """Bytes of transformers' maps: scores by distance and their shifted copy, scores by key, probabilities."""
        maps = self.batch * self.heads * self.length**2 * self.dtype.itemsize
        return {"forward": 6 * maps, "backward": 12 * maps}


@functools.lru_cache(maxsize=1)
def _problem(case: SpeechCase) -> tuple[nn.Module, Tensor, Tensor, Tensor, Tensor]:
    """transformers' layer with random weights, frames, positions, the encoder's mask, and a gradient of the output."""
    try:
        from transformers import ParakeetEncoderConfig
        from transformers.models.parakeet import modeling_parakeet
    except ImportError as error:
        raise CannotRun("this transformers has no Parakeet") from error

    torch.manual_seed(0)
    config = ParakeetEncoderConfig(hidden_size=case.d_model, num_attention_heads=case.heads, attention_dropout=0.0)
    config._attn_implementation = "sdpa"
    layer = modeling_parakeet.ParakeetEncoderAttention(config, 0)
    for bias in (layer.bias_u, layer.bias_v):  # of some size, so that they count
        nn.init.normal_(bias, std=0.3)
    if case.part == "attention":
        for name in PROJECTIONS:
            setattr(layer, name, nn.Identity())
    x, grad_out = torch.randn(2, case.batch, case.length, case.d_model)
    positions = modeling_parakeet.ParakeetEncoderRelPositionalEncoding(config)(x)
    mask = torch.ones(case.batch, 1, case.length, case.length, dtype=torch.bool)
    x, positions, grad_out = (tensor.to(case.device, case.dtype) for tensor in (x, positions, grad_out))
    return layer.to(case.device, case.dtype), x, positions, mask.to(case.device), grad_out


def _run(case: SpeechCase, layer: nn.Module, dtype: torch.dtype, compiled: bool = False) -> Run:
    _, x, positions, mask, grad_out = _problem(case)
    x, positions, grad_out = (tensor.to(dtype) for tensor in (x, positions, grad_out))
    x = x.clone().requires_grad_()
    if compiled:
        torch.compiler.reset()
    module = torch.compile(layer) if compiled else layer
    rows = _checked(case) if case.long else slice(None)
    # Scores may be shifted by a constant in each row, so what the keys' bias has for a gradient is rounding alone.
    parameters = {name: value for name, value in layer.named_parameters() if name != "k_proj.bias"}
    return Run(
        lambda: module(x, positions, mask)[0],
        {"input": x} | parameters,
        grad_out,
        lambda name, tensor: tensor[:, rows] if name == "out" else tensor,
    )


def our_run(case: SpeechCase) -> Run:
    return _run(case, accelerate(copy.deepcopy(_problem(case)[0]), linears=True), case.dtype)


def transformers_run(case: SpeechCase, attention: str, compiled: bool = False) -> Run:
    layer = copy.deepcopy(_problem(case)[0])
    layer.config._attn_implementation = attention
    return _run(case, layer, case.dtype, compiled)


def reference(case: SpeechCase, direction: str) -> dict[str, Tensor]:
    """transformers' layer in float64, or a part of the output."""
    layer = copy.deepcopy(_problem(case)[0]).double()
    if case.long:
        return {"out": _some_frames(case, layer)}
    run = _run(case, layer, torch.float64)
    outputs = run.step(direction)
    return {"out": outputs[0]} if direction == "forward" else dict(zip(run.leaves, outputs, strict=True))


def _checked(case: SpeechCase) -> Tensor:
    return torch.linspace(0, case.length - 1, CHECKED, device=case.device).long()


@torch.no_grad()
def _some_frames(case: SpeechCase, layer: nn.Module) -> Tensor:
    """The layer's output for the frames of `_checked` in plain torch (Dai et al. 2019, section 3.3)."""
    _, x, positions, _, _ = _problem(case)
    x, rows = x.double(), _checked(case)

    def heads(linear: nn.Module, tensor: Tensor) -> Tensor:
        return linear(tensor).unflatten(-1, (case.heads, -1)).transpose(-3, -2)

    query, key, value = heads(layer.q_proj, x[:, rows]), heads(layer.k_proj, x), heads(layer.v_proj, x)
    distance = rows[:, None] - torch.arange(case.length, device=x.device)
    by_row = (query + layer.bias_v[:, None]) @ heads(layer.relative_k_proj, positions[0].double()).mT
    score = (query + layer.bias_u[:, None]) @ key.mT
    score = score + by_row.gather(-1, (case.length - 1 - distance).expand_as(score))
    out = (score * layer.scaling).softmax(-1) @ value
    return layer.o_proj(out.transpose(1, 2).flatten(2))


def measure(options: argparse.Namespace, bench: Bench) -> None:
    """Every length of audio, attention and layer."""
    prepare = {
        OWN: our_run,
        "transformers sdpa": functools.partial(transformers_run, attention="sdpa"),
        "transformers eager": functools.partial(transformers_run, attention="eager"),
        COMPILED: functools.partial(transformers_run, attention="sdpa", compiled=True),
    }
    sizes = {name: getattr(options, name) for name in ("batch", "d_model", "heads", "device", "train_frames")}
    for audio, part in itertools.product(options.audio, options.parts):
        case = SpeechCase(part, audio, dtype=getattr(torch, options.dtype), **sizes)
        if case.long and part == "layer":
            continue
        known = functools.cache(functools.partial(reference, case))
        jobs = [
            Job(
                name,
                functools.partial(prepare[name], case),
                known,
                needs={} if name == OWN else case.needs(),
                dtype=case.dtype,
            )
            for name in options.implementations
        ]
        directions = ("forward",) if case.long else DIRECTIONS
        rows = replace(bench, directions=directions).group(PARTS[part], jobs, case.labels)
        _relate(rows)
        bench.save()
        _problem.cache_clear()


def toolkit_run(
    case: SpeechCase, layer: toolkits.Layer, way: str, dtype: torch.dtype, backend: str | None = None,
    frames: int | None = None,
) -> Run:  # fmt: skip
    """The toolkit's layer or encoder in one of its ways, or OWN: accelerated. `frames`: of the first frames alone."""
    module = copy.deepcopy(layer.module).to(case.device, dtype)
    if way == OWN:
        accelerate(module, backend, linears=True, window=case.window)
    else:
        layer.ways[way](module)
    torch.manual_seed(1)
    x = torch.randn(case.batch, layer.step * case.length, layer.width or case.d_model)
    grad_out = torch.randn(case.batch, case.length, case.d_model)
    if frames is not None:
        x, grad_out = x[:, : layer.step * frames], grad_out[:, :frames]
    x, grad_out = (tensor.to(case.device, case.dtype).to(dtype) for tensor in (x, grad_out))
    x.requires_grad_()
    # Scores may be shifted by a constant in each row, so what the keys' bias has for a gradient is rounding alone.
    keys = ("linear_k.bias", "k_proj.bias")
    parameters = {name: value for name, value in module.named_parameters() if not name.endswith(keys)}
    rows = slice(CHECKED if case.window is not None and case.long else None)
    return Run(
        lambda: layer.call(module, x),
        {"input": x} | parameters,
        grad_out,
        lambda name, tensor: tensor[:, rows] if name == "out" else tensor,
    )


@dataclass
class Exact:
    """Exact values of a toolkit's layer or encoder, and the errors of its own code."""

    case: SpeechCase
    layer: toolkits.Layer
    layers: int = 1

    def __post_init__(self) -> None:
        self.values, self.missed = functools.cache(self.values), functools.cache(self.missed)  # type: ignore[method-assign]

    def values(self, direction: str) -> dict[str, Tensor]:
        """In float64, of the toolkit's own code where its maps fit in memory; under a window accelerated."""
        fits = self.case.window is None and self._fits(torch.float64, direction)
        way = next(iter(self.layer.ways)) if fits and self.layer.has_float64 else OWN
        frames = None
        if self.case.window is not None and self.case.long:
            frames = min(self.case.length, CHECKED + self.layers * (self.case.window[1] + CONVOLUTION) + CHECKED)
        run = toolkit_run(self.case, self.layer, way, torch.float64, "reference" if fits else None, frames)
        outputs = run.step(direction)
        if frames is not None:
            outputs = [outputs[0][:, :CHECKED], *outputs[1:]]
        return {"out": outputs[0]} if direction == "forward" else dict(zip(run.leaves, outputs, strict=True))

    def missed(self, direction: str) -> dict[str, float]:
        """By the toolkit's own code in the dtype that is measured; nothing where its maps do not fit."""
        if self.case.window is not None or not self._fits(self.case.dtype, direction):
            return {}
        run = toolkit_run(self.case, self.layer, next(iter(self.layer.ways)), self.case.dtype)
        outputs = run.step(direction)
        return compare(run, direction, outputs, self.values(direction), self.case.dtype)["errors"]  # type: ignore[return-value]

    def _fits(self, dtype: torch.dtype, direction: str) -> bool:
        free = free_memory(self.case.device) if self.layer.has_maps else None
        return free is None or replace(self.case, dtype=dtype).needs()[direction] <= 0.8 * free


def measure_toolkits(options: argparse.Namespace, bench: Bench) -> None:
    """The encoder, or its layer, of every toolkit on every length of audio."""
    section = TOOLKIT if options.layers is None else ENCODER
    names = ("batch", "d_model", "heads", "device", "train_frames", "window")
    sizes = {name: getattr(options, name) for name in names}
    for toolkit, audio in itertools.product(options.toolkit, options.audio):
        case = SpeechCase("layer", audio, dtype=getattr(torch, options.dtype), **sizes)
        kind = toolkit if options.layers is None else f"{toolkit}, {options.layers} layers"
        kind += "" if case.window is None else f", window {case.window[0]}, {case.window[1]}"
        labels = case.labels | {"case": f"{kind}, {case.labels['case']}"}
        measured = replace(bench, directions=("forward",) if case.long else DIRECTIONS)
        try:
            layer = toolkits.build(toolkit, case.length, case.d_model, case.heads, options.layers)
        except CannotRun as error:
            measured.skip(section, toolkit, labels, str(error))
            continue
        exact = Exact(case, layer, options.layers or 1)
        jobs = [
            Job(
                way,
                functools.partial(toolkit_run, case, layer, way, case.dtype),
                exact.values,
                exact.missed,
                needs={} if way == OWN or not layer.has_maps else case.needs(),
                dtype=case.dtype,
            )
            for way in ((OWN, *layer.ways) if case.window is None else (OWN,))
        ]
        rows = measured.group(section, jobs, labels)
        _relate(rows, tuple(layer.ways))
        if options.from_full:
            rows[0]["distance_from_full"] = distance_from_full(case, layer)
        bench.save()


@torch.no_grad()
def distance_from_full(case: SpeechCase, layer: toolkits.Layer) -> float:
    """RMS of hidden states under the window minus those of full attention, relative to the RMS of the latter."""
    under_window, full = (
        toolkit_run(each, layer, OWN, case.dtype).step("forward")[0].double()
        for each in (case, replace(case, window=None))
    )
    return round(((under_window - full).norm() / full.norm()).item(), 4)


def _relate(rows: list[dict], theirs: tuple[str, ...] = THEIRS) -> None:
    """How many times faster than the fastest of their implementations."""
    for direction in DIRECTIONS:
        here = [row for row in rows if row["direction"] == direction and "median_ms" in row]
        best = min((row["median_ms"] for row in here if row["implementation"] in theirs), default=None)
        for row in here:
            if best is not None:
                row["speedup"] = round(best / row["median_ms"], 3)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    session.common_options(parser, ("float32", "bfloat16", "float16"))
    add = parser.add_argument
    add("--audio", type=float, nargs="+", default=[10.0, 60.0, 600.0], metavar="SECONDS", help="default 10 60 600")
    add("--parts", nargs="+", choices=tuple(PARTS), default=tuple(PARTS))
    names = tuple(dict.fromkeys(toolkits.NAMES + toolkits.ENCODERS))
    add("--toolkit", nargs="+", choices=names, help="whole encoder layers of these instead, or encoders")
    add(
        "--layers",
        type=positive,
        help=f"whole encoders of so many layers: {', '.join(toolkits.ENCODERS)} (default all)",
    )
    add("--window", type=int, nargs=2, metavar=("LEFT", "RIGHT"), help="of accelerate, with --toolkit or --layers")
    add("--from-full", action="store_true", help="with --window: also the distance from full attention")
    add("--once", action="store_true", help="one call of each, which is checked and timed")
    add("--batch", type=positive, default=1)
    add("--d-model", type=positive, default=1024)
    add("--heads", type=positive, default=8)
    add("--train-frames", type=positive, default=1000, help="beyond so many frames less is measured")
    add("--implementations", nargs="+", metavar="WORD", help=f"names with these in them: {', '.join(NAMES)}")
    add("--seconds", type=float, default=2.5, help="of samples per implementation, length and direction")
    add("--quick", action="store_true", help="a tiny layer and few samples")
    if "--quick" in arguments:
        parser.set_defaults(**QUICK)
    options = parser.parse_args(arguments)
    session.check_common(parser, options, "speech")
    if options.layers is not None:
        options.toolkit = options.toolkit or list(toolkits.ENCODERS)
    options.window = options.window and tuple(options.window)
    if options.window is not None and not options.toolkit:
        parser.error("--window needs --toolkit or --layers")
    if options.from_full and options.window is None:
        parser.error("--from-full needs --window")
    if min(options.audio) * FRAMES_PER_SECOND < 1:
        parser.error(f"--audio must be at least one frame, {1 / FRAMES_PER_SECOND} s")
    if options.d_model % (2 * options.heads):
        parser.error("--d-model must be an even multiple of --heads")
    words = options.implementations or ([""] if options.device == "cuda" else [OWN, "sdpa", "eager"])
    options.implementations = [name for name in NAMES if any(word in name for word in words)]
    if not options.implementations:
        parser.error(f"--implementations: none has a name with {words} in it; {', '.join(NAMES)}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    return session.run(
        "speech",
        options,
        {name: value for name, value in vars(options).items() if name not in ("output", "plot", "quick")},
        functools.partial(measure_toolkits if options.toolkit else measure, options),
        directions=DIRECTIONS,
        rounds=(3, 5) if options.quick else (3, 50),
        seconds=options.seconds,
        once=options.once,
    )


if __name__ == "__main__":
    sys.exit(main())

"""ONNX files of accelerated Parakeet encoders in onnxruntime, beside the same encoders in torch.

    python benchmarks/onnx_files.py              4 layers, 1024 wide: full attention and a window of 128 frames
    python benchmarks/onnx_files.py --quick      a tiny encoder, to see that everything runs

Needs `pip install '.[onnx]'`. One file is exported for full attention and one with --window, each from 400 mel
frames with free batch and length. A file then runs at lengths that the exporter has not seen: 5,000 frames of the
encoder with both, 20,000 with the window. Each implementation is called once. The first 64 frames of its output are
checked in float64 against the library's own code, or under a window against the accelerated encoder. Rows have the
bytes of the file with its weights.
"""

from __future__ import annotations

import argparse
import copy
import functools
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import xlnet_kernels as xk
from lib import session, toolkits
from lib.harness import CannotRun, Run, free_memory
from lib.measure import Bench, Job
from lib.session import positive

OWN, FILE, LIBRARY = "xlnet_kernels", "xlnet_kernels in onnxruntime", "transformers sdpa"
CHECKED = 64  # frames whose outputs are checked
REACH = 16  # frames ahead that a layer's convolution reads, at most
TRACED = 400  # mel frames


class Encoder(nn.Module):
    """An encoder with a tensor for output, which is what the exporter takes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, mel: Tensor) -> Tensor:
        return self.module(mel).last_hidden_state


@dataclass(frozen=True)
class Problem:
    """An encoder over mel features of one sequence: `window` (left, right), or None for full attention."""

    layer: toolkits.Layer
    layers: int
    length: int
    window: tuple[int, int] | None

    def mel(self) -> Tensor:
        """(1, step * L, bins), the same at each call."""
        return torch.randn(
            1, self.layer.step * self.length, self.layer.width, generator=torch.Generator().manual_seed(1)
        )

    def encoder(self, accelerated: bool = True) -> Encoder:
        module = copy.deepcopy(self.layer.module)
        return Encoder(xk.accelerate(module, window=self.window) if accelerated else module).eval()

    def fits(self) -> bool:
        """Whether the maps of the library's own code fit in memory, in float64."""
        heads = self.layer.module.config.num_attention_heads
        return 6 * 8 * heads * self.length**2 <= 0.8 * (free_memory("cpu") or 0)

    def reference(self, direction: str) -> dict[str, Tensor]:
        """The first frames in float64, under a window from as many frames as they can depend on."""
        mel, encoder = self.mel().double(), self.encoder(accelerated=self.window is not None or not self.fits())
        if self.window is not None:
            mel = mel[:, : self.layer.step * (2 * CHECKED + self.layers * (self.window[1] + REACH))]
        with torch.no_grad():
            return {"out": encoder.double()(mel)[:, :CHECKED]}

    def run_torch(self, accelerated: bool) -> Run:
        encoder, mel = self.encoder(accelerated), self.mel()
        return Run(lambda: encoder(mel), {}, mel, _first_frames)

    def run_file(self, path: Path) -> Run:
        session, mel = _open(path), self.mel().numpy()
        return Run(lambda: torch.from_numpy(session.run(None, {"mel": mel})[0]), {}, self.mel(), _first_frames)


def _first_frames(name: str, tensor: Tensor) -> Tensor:
    return tensor[:, :CHECKED]


@functools.lru_cache(maxsize=1)
def _open(path: Path):
    import onnxruntime

    return onnxruntime.InferenceSession(path)


def export(problem: Problem, folder: Path) -> Path:
    """The file of a problem's encoder with free batch and length; CannotRun without the exporter's packages."""
    try:
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise CannotRun(f"{error}: pip install '.[onnx]'") from error
    path = folder / ("full.onnx" if problem.window is None else "window.onnx")
    free = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    mel = torch.randn(2, TRACED, problem.layer.width)
    torch.onnx.export(problem.encoder(), (mel,), path, input_names=["mel"], dynamo=True, dynamic_shapes=(free,))
    return path


def measure(options: argparse.Namespace, bench: Bench) -> None:
    """Both files, each at its lengths."""
    layer = toolkits.build("parakeet", max(options.lengths), options.width, options.heads, options.layers)
    for window, lengths in ((None, options.lengths[:1]), (options.window, options.lengths)):
        kind = "full" if window is None else f"window {window[0]}, {window[1]}"
        with tempfile.TemporaryDirectory() as folder:
            for length in lengths:
                problem = Problem(layer, options.layers, length, window)
                labels = {"length": length, "batch": 1, "dtype": "float32"}
                labels["case"] = f"parakeet, {options.layers} layers, {kind}: {length} x 1"
                try:
                    path = next(Path(folder).glob("*.onnx"), None) or export(problem, Path(folder))
                except CannotRun as error:
                    bench.skip("speech-encoder", FILE, labels, str(error))
                    return
                known = functools.cache(problem.reference)
                size = sum(file.stat().st_size for file in Path(folder).iterdir())
                runs = {
                    OWN: functools.partial(problem.run_torch, True),
                    FILE: functools.partial(problem.run_file, path),
                }
                if window is None and problem.fits():
                    runs[LIBRARY] = functools.partial(problem.run_torch, False)
                jobs = [Job(name, make, known) for name, make in runs.items()]
                jobs[1].labels = {"bytes": size}
                bench.group("speech-encoder", jobs, labels, base=LIBRARY)
                _open.cache_clear()
                bench.save()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    session.common_options(parser, ("float32",))
    add = parser.add_argument
    add("--lengths", type=positive, nargs="+", default=[5000, 20000], help="frames; full attention at the first alone")
    add("--window", type=positive, nargs=2, default=[128, 128], metavar=("LEFT", "RIGHT"))
    add("--layers", type=positive, default=4)
    add("--width", type=positive, default=1024)
    add("--heads", type=positive, default=8)
    add("--quick", action="store_true", help="a tiny encoder over few frames")
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--quick" in arguments:
        parser.set_defaults(lengths=[70, 150], window=[4, 4], layers=1, width=32, heads=4)
    options = parser.parse_args(arguments)
    if options.device != "cpu":
        parser.error("--device: files run on CPUs here")
    session.check_common(parser, options, "onnx")
    options.window = tuple(options.window)
    settings = {name: getattr(options, name) for name in ("lengths", "window", "layers", "width", "heads", "dtype")}
    return session.run(
        "speech",
        options,
        settings,
        functools.partial(measure, options),
        directions=("forward",),
        rounds=(1, 1),
        seconds=0.0,
        once=True,
    )


if __name__ == "__main__":
    sys.exit(main())

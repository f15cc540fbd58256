"""Text, tokenizer and small models shared by the experiments: those of docs/tutorial.md."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from parts import sample
from parts.inference import Reader, load_reader
from parts.parallel import processes
from parts.run import Run, make_run
from parts.tokenizer import load_tokenizer, train_tokenizer
from parts.training import update
from pretrain import make_parser
from xlnet_kernels.pretraining import batch_loader

OBJECTIVES = ("permutation", "masked", "autoregressive")
SHARED = ("layers", "d_model", "heads", "batch_size", "seq_len", "steps", "num_predict")  # options of pretrain.py


class Clock:
    """Clock of processor seconds since its creation, except while stopped."""

    def __init__(self) -> None:
        self._began, self._stopped = time.process_time(), 0.0

    def seconds(self) -> float:
        return time.process_time() - self._began - self._stopped

    @contextmanager
    def stopped(self) -> Iterator[None]:
        began = time.process_time()
        yield
        self._stopped += time.process_time() - began


class Workshop:
    """Maker of models with one text, tokenizer and size; models for several experiments are kept in `folder`.

    Attributes:
        options: of objectives.py.
        folder: has texts/, tokenizer/, and a folder for each model.
    """

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        texts = dict(list(sample.texts().items())[: options.topics])
        (folder / "texts").mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / "texts" / f"{name}.txt").write_text(text, encoding="utf-8")
        if not (folder / "tokenizer").exists():
            lines = (line for text in texts.values() for line in text.splitlines(keepends=True))
            train_tokenizer("bpe", lines, options.vocab, show_progress=False).save(folder / "tokenizer")
        self.tokenizer = load_tokenizer(folder / "tokenizer")
        self.bytes = sum(len(text.encode()) for text in texts.values())

    def new_run(self, objective: str, seed: int, **given: Any) -> Run:
        """New run of examples/pretrain.py, without memory and pairs unless `given`."""
        settings = {name: getattr(self.options, name) for name in SHARED} | {"mem_len": 0} | given
        settings |= {"objective": objective, "seed": seed, "device": "cpu", "backend": self.options.backend}
        settings |= {"text": self.folder / "texts", "tokenizer": self.folder / "tokenizer"}
        settings |= {"output": self.folder / "run"}
        arguments = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        with processes("cpu") as ours:
            return make_run(make_parser().parse_args(["--no-pairs", *arguments]), None, ours)

    def pretrained(self, objective: str, seed: int) -> tuple[Path, dict]:
        """The folder of a model trained by an objective, and facts about its training."""
        folder = self.folder / f"{objective}-{seed}"
        if not (folder / "facts.json").exists():
            run = self.new_run(objective, seed)
            facts = train(run) | {"held_out": round(run.evaluate(), 4)}
            run.model.save_pretrained(folder)
            run.describe(folder)
            (folder / "facts.json").write_text(json.dumps(facts))
        return folder, json.loads((folder / "facts.json").read_text())

    def reader(self, objective: str, seed: int) -> Reader:
        """A `Reader` of a pre-trained model."""
        place = {"device": "cpu", "backend": self.options.backend, "threads": None}
        return load_reader(argparse.Namespace(checkpoint=self.pretrained(objective, seed)[0], **place))


def train(run: Run, on_step: Callable[[int, Clock], None] = lambda step, clock: None) -> dict:
    """Train all steps of a run.

    Returns:
        Number of parameters, number of tokens, processor seconds.
    """
    clock, options = Clock(), run.options
    for step, batch in enumerate(batch_loader(run.training, 0, options.steps), start=1):
        loss, run.mems = run.loss(batch, run.mems)
        update(run.model, run.optimizer, run.scheduler, loss, options.clip)
        on_step(step, clock)
    return {
        "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
        "tokens": options.steps * options.batch_size * options.seq_len,
        "cpu_seconds": round(clock.seconds(), 2),
    }

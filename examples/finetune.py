"""Fine-tunes an XLNet to say which document a snippet comes from: the content stream alone, with a classification head.

    python examples/finetune.py --checkpoint runs/pretrain      from what pretrain.py wrote, with its text and tokenizer
    python examples/finetune.py                                 from scratch
    python examples/finetune.py --text my-folder --classes 4

The classes are the longest documents of the text. Every so many blocks of them one is held out; there the accuracy is
compared with that of always naming the most frequent class. Writes the model, which `from_pretrained` reads. Ctrl-C
writes it and stops. Needs pip install '.[examples]'.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

try:
    from rich.console import Console
except ImportError:
    raise SystemExit("finetune.py needs rich: pip install '.[examples]'") from None

import xlnet_kernels as xk
from parts.checkpoint import find, read_settings
from parts.corpus import prepare
from parts.parallel import check_place
from parts.tokenizer import load_tokenizer
from parts.training import (
    add_optimizer_options,
    make_exact,
    make_optimizer,
    memory_used,
    number,
    progress_bar,
    stop_signals,
    update,
)
from xlnet_kernels.pretraining import TokenFile, Vocabulary

BLOCK = 8  # snippets of running text


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument_group("task").add_argument
    add("--checkpoint", type=Path, metavar="FOLDER", help="a model, or --output of pretrain.py; default from scratch")
    add("--text", metavar="PATH", help="a file or a folder; default that of the checkpoint, or Python's manual")
    add("--tokenizer", metavar="FILE", help="a tokenizer.json; default that of the checkpoint, or bytes")
    add("--classes", type=number(int, 2), default=8, help="so many of the longest documents")
    add("--seq-len", type=number(int, 3), default=128)
    add("--held-out", type=number(float, 0, 1), default=0.2, help="share of the blocks, for testing")
    add_optimizer_options(parser, steps=400, lr=1e-3, layer_decay=0.9)
    add = parser.add_argument_group("run").add_argument
    add("--output", type=Path, default=Path("runs/finetune"), help="folder of the model")
    add("--eval-every", type=number(int, 1), default=50, metavar="STEPS")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--backend", choices=tuple(xk.backends()), help="of the attention; default the best there is")
    add("--threads", type=number(int, 1), help="CPU threads")
    return parser


@dataclass(frozen=True)
class Snippets:
    """Pieces of documents, each the input [A, SEP, CLS] of a classifier.

    Attributes:
        training, testing: blocks of text, (label, tokens).
    """

    training: list[tuple[int, np.ndarray]]
    testing: list[tuple[int, np.ndarray]]
    vocabulary: Vocabulary
    seq_len: int

    @classmethod
    def of(cls, text: TokenFile, vocabulary: Vocabulary, classes: int, seq_len: int, held_out: float) -> Snippets:
        """Of the longest documents, cut into blocks, a share of which is held out.

        Raises:
            ValueError: there are fewer documents, or they are too short.
        """
        bounds = list(zip(text.bounds[:-1].tolist(), text.bounds[1:].tolist(), strict=True))
        longest = sorted(bounds, key=lambda part: part[0] - part[1])[:classes]
        if len(longest) < classes:
            raise ValueError(f"--classes {classes}: the text has {len(longest)} documents; give a folder of files")
        size, parts = seq_len - 2, ([], [])
        for label, (begin, end) in enumerate(longest):
            blocks = [text.read(i, min(i + BLOCK * size, end)) for i in range(begin, end - size + 1, BLOCK * size)]
            if not 0 < int(len(blocks) * held_out) < len(blocks):
                raise ValueError(
                    f"document {label + 1} by length has {len(blocks)} blocks of {BLOCK} snippets: too few for "
                    f"--held-out {held_out}; take fewer --classes or a smaller --seq-len"
                )
            for k, block in enumerate(blocks):
                parts[int((k + 1) * held_out) > int(k * held_out)].append((label, block))
        return cls(*parts, vocabulary, seq_len)

    def random(self, rng: np.random.Generator, count: int) -> tuple[Tensor, Tensor]:
        """Snippets (count, seq_len) and labels (count,) from anywhere in the training blocks."""
        size = self.seq_len - 2
        places = np.array([len(block) - size + 1 for _, block in self.training])
        chosen = rng.choice(len(places), count, p=places / places.sum())
        found = zip((self.training[k] for k in chosen), rng.integers(places[chosen]), strict=True)
        return self._batch([(label, block[i : i + size]) for (label, block), i in found])

    def held_out(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """Batches of at most `count` of all snippets of the testing blocks, side by side."""
        size = self.seq_len - 2
        cut = [(k, d[i : i + size]) for k, d in self.testing for i in range(0, len(d) - size + 1, size)]
        return [self._batch(cut[i : i + count]) for i in range(0, len(cut), count)]

    def _batch(self, cut: list[tuple[int, np.ndarray]]) -> tuple[Tensor, Tensor]:
        end = [self.vocabulary.sep, self.vocabulary.cls]
        rows = np.stack([np.concatenate([tokens, end]) for _, tokens in cut])
        return torch.from_numpy(rows), torch.tensor([label for label, _ in cut])


def token_types(input_ids: Tensor) -> Tensor:
    """Segment 0, and 2 for the CLS at the end, as in pre-training."""
    types = torch.zeros_like(input_ids)
    types[:, -1] = 2
    return types


@torch.no_grad()
def accuracy(model: xk.XLNetForSequenceClassification, batches: list[tuple[Tensor, Tensor]]) -> float:
    """The share of snippets whose class has the highest score."""
    model.eval()
    device = next(model.parameters()).device
    right = total = 0
    for input_ids, labels in batches:
        input_ids = input_ids.to(device)
        found = model(input_ids, token_type_ids=token_types(input_ids)).logits.argmax(-1).cpu()
        right, total = right + int((found == labels).sum()), total + len(labels)
    model.train()
    return right / total


def make_model(options: argparse.Namespace, vocabulary: Vocabulary) -> xk.XLNetForSequenceClassification:
    """The checkpoint's encoder with a new head, or a small model from scratch.

    Raises:
        ValueError: the checkpoint is damaged, or another vocabulary's.
    """
    head = {"num_labels": options.classes, "dropout": options.dropout, "use_mems_eval": False, "use_mems_train": False}
    torch.manual_seed(options.seed)
    if not options.checkpoint:
        sizes = dict(d_model=128, n_layer=4, n_head=4, d_inner=512, ff_activation="gelu_new")
        config = xk.XLNetConfig(vocab_size=vocabulary.size, pad_token_id=vocabulary.pad, **sizes, **head)
        return xk.XLNetForSequenceClassification(config, options.backend)
    folder = find(options.checkpoint)
    entries = xk.XLNetConfig.from_file(folder).to_dict() | head | {"bi_data": False}  # text is read forwards
    config = xk.XLNetConfig.from_dict({k: v for k, v in entries.items() if k not in ("id2label", "label2id")})
    if config.vocab_size != vocabulary.size:
        raise ValueError(f"{folder} has a vocabulary of {config.vocab_size}, --tokenizer one of {vocabulary.size}")
    return xk.XLNetForSequenceClassification.from_pretrained(
        folder, config=config, backend=options.backend, new_head=True
    ).train()


def train(
    model: xk.XLNetForSequenceClassification, snippets: Snippets, options: argparse.Namespace, console: Console
) -> tuple[float, bool]:
    """Trains and writes the model; returns its accuracy, and whether training came to its end."""
    optimizer, scheduler = make_optimizer(model, options)
    rng, testing = np.random.default_rng(options.seed), snippets.held_out(4 * options.batch_size)
    device = torch.device(options.device)
    with ExitStack() as stack:
        stopped = stack.enter_context(stop_signals())
        bar = stack.enter_context(progress_bar(console))
        task = bar.add_task("", total=options.steps, status="")
        for step in range(1, options.steps + 1):
            input_ids, labels = (x.to(device) for x in snippets.random(rng, options.batch_size))
            loss = model(input_ids, token_type_ids=token_types(input_ids), labels=labels).loss
            update(model, optimizer, scheduler, loss, options.clip)
            bar.update(task, completed=step, status=f"loss {loss.item():.3f}  {memory_used(device)}")
            last = stopped() or step == options.steps
            if last or step % options.eval_every == 0:
                found = accuracy(model, testing)
                console.print(f"step {step}: loss {loss.item():.3f}, accuracy {found:.1%}")
            if last:
                break
    model.save_pretrained(options.output)
    return found, step == options.steps


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0; 1 where the majority is not beaten; 2 where options do not fit; 130 where interrupted."""
    options, console = make_parser().parse_args(arguments), Console(highlight=False)
    try:
        check_place(options.device, options.backend)
        text, tokenizer = options.text, options.tokenizer
        if options.checkpoint and (find(options.checkpoint) / "settings.json").exists():
            before = read_settings(find(options.checkpoint))["options"]
            text, tokenizer = text or before["text"], tokenizer or find(options.checkpoint)
        make_exact(options.threads)
        corpus = prepare(options.output / "tokens", text, load_tokenizer(tokenizer))
        snippets = Snippets.of(corpus.text, corpus.vocabulary, options.classes, options.seq_len, options.held_out)
        model = make_model(options, corpus.vocabulary).to(options.device)
    except (ValueError, OSError) as error:
        print(f"finetune.py: error: {error}", file=sys.stderr)
        return 2
    counts = torch.cat([labels for _, labels in snippets.held_out(64)]).bincount(minlength=options.classes)
    majority = counts.max().item() / counts.sum().item()
    console.print(f"{counts.sum()} held-out snippets of {options.classes} documents, majority {majority:.1%}")
    found, whole = train(model, snippets, options, console)
    console.print(f"accuracy {found:.1%}, majority {majority:.1%}")
    if not whole:
        return 130
    return 0 if found > majority else 1


if __name__ == "__main__":
    sys.exit(main())

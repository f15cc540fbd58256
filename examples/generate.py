"""Generate text with a language model: continue a prompt, or fill gaps in a text in any order.

    python examples/generate.py --checkpoint runs/pretrain --prompt "The value of" --count 3 --seed 1
    python examples/generate.py --checkpoint runs/pretrain --prompt "An object" --stop "." --temperature 0
    python examples/generate.py --checkpoint runs/pretrain --fill "The [6] statement is used to [8]." --order confident

In --fill, [N] is a gap of N tokens. Tokens appear as they are generated; text i of --count has the random numbers of
seed + i. Default settings come from the checkpoint's generation_config.json. Needs pip install '.[examples]'.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

try:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text
except ImportError:
    raise SystemExit("generate.py needs rich: pip install '.[examples]'") from None

from transformers import GenerationConfig

from parts import command
from parts.command import number
from parts.inference import Reader, load_reader

GAP = re.compile(r"\[(\d+)\]")


def make_parser() -> argparse.ArgumentParser:
    parser = command.make_parser(__doc__)
    add = parser.add_argument_group("text").add_argument
    add("--checkpoint", type=Path, default=Path("runs/pretrain"), metavar="FOLDER", help="a model, or a run's folder")
    add("--prompt", metavar="TEXT", help="text to continue")
    add("--fill", metavar="TEXT", help="text with gaps, such as [3] for three tokens")
    add(
        "--order", choices=("left-to-right", "random", "confident"), default="left-to-right", help="in which gaps close"
    )
    add("--max-new-tokens", type=number(int, 1), default=60, metavar="N", help="longest continuation")
    add("--stop", action="append", metavar="TEXT", help="end a continuation behind this; may be given several times")
    add("--count", type=number(int, 1), default=1, metavar="N", help="texts to write")
    add = parser.add_argument_group("sampling").add_argument
    add("--seed", type=number(int, 0), default=0, help="same seed, same text")
    add("--temperature", type=number(float, 0), help="0 takes the best; default that of the checkpoint")
    add("--top-k", type=number(int, 1), metavar="N", help="only the N best tokens; default that of the checkpoint")
    add("--top-p", type=number(float, 0), help="only the best of this probability; default that of the checkpoint")
    add = parser.add_argument_group("run").add_argument
    add("--output", type=Path, metavar="FILE", help="also write JSON lines here")
    add("--overwrite", action="store_true", help="replace --output")
    command.add_place(parser)
    return parser


def sampling(options: argparse.Namespace, reader: Reader) -> dict:
    """temperature, top_k and top_p, from the command line or the checkpoint."""
    try:
        kept = GenerationConfig.from_pretrained(str(reader.folder), local_files_only=True)
    except OSError:  # public checkpoints have none
        kept = GenerationConfig()
    found = {"temperature": kept.temperature, "top_k": kept.top_k or None, "top_p": kept.top_p}
    found |= {name: getattr(options, name) for name in found if getattr(options, name) is not None}
    return found | {"temperature": 1.0 if found["temperature"] is None else found["temperature"], "seed": options.seed}


def proceed(reader: Reader, options: argparse.Namespace, show) -> list[str]:
    """Continuations of --prompt, prompts included; `show` gets the texts after every token."""
    prompt = reader.tokenizer.encode(options.prompt.encode()).tolist()
    if not prompt:
        raise ValueError("--prompt is empty")
    decode, stops = reader.tokenizer.decode, options.stop or []

    def cut(text: str) -> str:
        """The text up to and including the first stop word after the prompt."""
        ends = [
            text.find(word, len(options.prompt)) + len(word) for word in stops if word in text[len(options.prompt) :]
        ]
        return text[: min(ends)] if ends else text

    def watch(texts: list[Tensor]) -> Sequence[bool]:
        found = [decode(text) for text in texts]
        show([cut(text) for text in found])
        return [any(word in text[len(options.prompt) :] for word in stops) for text in found]

    texts = reader.model.generate(
        [prompt] * options.count, options.max_new_tokens, watch=watch, **sampling(options, reader)
    )
    return [cut(decode(text)) for text in texts]


def fill(reader: Reader, options: argparse.Namespace, show) -> list[str]:
    """The text of --fill without gaps; `show` gets the texts after every step, "_" for missing tokens."""
    if reader.objective != "permutation":
        raise ValueError(f"--fill needs a permutation LM, {reader.folder} is an {reader.objective} one")
    parts, ids, missing = GAP.split(options.fill), [], []
    for index, part in enumerate(parts):  # text and numbers alternate
        found = [0] * int(part) if index % 2 else reader.tokenizer.encode(part.encode()).tolist()
        ids += found
        missing += [bool(index % 2)] * len(found)
    if not any(missing):
        raise ValueError("--fill has no gap, such as [3]")
    gaps = torch.tensor([missing] * options.count, device=reader.device)

    def shown(tokens: Tensor, left: Tensor) -> list[str]:
        texts = []
        for row, open_ in zip(tokens.tolist(), left.tolist(), strict=True):
            text, run = "", []
            for token, is_open in [*zip(row, open_, strict=True), (0, True)]:
                if is_open:
                    text, run = text + reader.tokenizer.decode(run) + "_", []
                else:
                    run.append(token)
            texts.append(text[:-1])
        return texts

    def watch(tokens: Tensor, left: Tensor) -> None:
        show(shown(tokens, left))

    tokens = torch.tensor([ids] * options.count, device=reader.device)
    tokens = reader.model.fill(tokens, gaps, options.order, watch=watch, **sampling(options, reader))
    return shown(tokens, torch.zeros_like(gaps))


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit status 0, or 2 for invalid options."""
    options, console = make_parser().parse_args(arguments), Console(highlight=False)

    def work() -> None:
        if (options.prompt is None) == (options.fill is None):
            raise ValueError("give either --prompt or --fill")
        reader = load_reader(options)
        if options.output:
            inputs = {"--checkpoint": options.checkpoint, "the checkpoint": reader.folder}
            command.check_output(options.output, options.overwrite, inputs, folder=False)
        write = proceed if options.fill is None else fill
        with Live(console=console, refresh_per_second=8, transient=True) as live:
            texts = write(reader, options, lambda found: live.update(Text("\n\n".join(found))))
        for index, text in enumerate(texts):
            console.print(f"--- seed {options.seed + index}", style="dim")
            console.print(Text(text), soft_wrap=True)
        if options.output:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps({"seed": options.seed + i, "text": text}) for i, text in enumerate(texts)]
            options.output.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    return command.refuse("generate.py", work)


if __name__ == "__main__":
    sys.exit(main())

"""Score text with a model: the joint log-probability of marked words, given all other words.

    python examples/score.py --checkpoint runs/pretrain "The [[with]] statement" "The [[while]] statement"
    python examples/score.py --checkpoint runs/pretrain --order right-to-left "[[New York]] is a city"

Words between [[ and ]] are the targets; in a text without marks all tokens are. A permutation LM predicts them one
after the other, in --order, each given the earlier ones; a masked LM each independently; an auto-regressive LM from the
tokens to the left only. Needs pip install '.[examples]'.
"""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import torch

try:
    from rich.console import Console
except ImportError:
    raise SystemExit("score.py needs rich: pip install '.[examples]'") from None

from parts import command
from parts.inference import OBJECTIVES, Reader, load_reader
from xlnet_kernels.pretraining import joint_log_prob

MARKED = re.compile(r"\[\[(.*?)\]\]", re.DOTALL)


@torch.no_grad()
def score(reader: Reader, text: str, order: str) -> dict:
    """The targets' tokens with their log-probabilities (natural logarithms), and the sum."""
    parts, ids, targets = MARKED.split(text), [], []
    for index, part in enumerate(parts):  # context and targets alternate
        found = reader.tokenizer.encode(part.encode()).tolist()
        if index % 2 or len(parts) == 1:
            targets += range(len(ids), len(ids) + len(found))
        ids += found
    if reader.objective == "autoregressive":
        targets = [at for at in targets if at > 0]  # the first token has no context
    if not targets:
        raise ValueError(f"there is nothing to score in {text!r}")
    if order != "left-to-right" and reader.objective != "permutation":
        raise ValueError(f"--order is for permutation LMs, {reader.folder} is of the {reader.objective} objective")
    targets = targets[::-1] if order == "right-to-left" else targets
    device, objective = reader.device, OBJECTIVES[reader.objective]()
    tokens, places = torch.tensor([ids], device=device), torch.tensor([targets], device=device)
    each, total = joint_log_prob(reader.model, objective, reader.tokenizer.vocabulary, tokens, places)
    pairs = [(reader.tokenizer.decode([ids[at]]), value) for at, value in zip(targets, each[0].tolist(), strict=True)]
    return {"text": text, "log_prob": total.item(), "tokens": pairs}


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit status 0, or 2 for invalid options."""
    parser = command.make_parser(__doc__)
    add = parser.add_argument
    add("texts", nargs="*", metavar="TEXT", help="with [[targets]]")
    add("--file", type=Path, metavar="FILE", help="more texts, one in each line")
    add("--checkpoint", type=Path, default=Path("runs/pretrain"), metavar="FOLDER", help="a model, or a run's folder")
    add("--order", choices=("left-to-right", "right-to-left"), default="left-to-right", help="in which targets come")
    add("--output", type=Path, metavar="FILE", help="also write JSON lines here")
    add("--overwrite", action="store_true", help="replace --output")
    command.add_place(parser)
    options, console = parser.parse_args(arguments), Console(highlight=False, markup=False)

    def work() -> None:
        texts = list(options.texts)
        if options.file:
            texts += [line for line in options.file.read_text(encoding="utf-8").splitlines() if line.strip()]
        if not texts:
            raise ValueError("give a text or --file")
        reader = load_reader(options)
        if options.output:
            inputs = {"--checkpoint": options.checkpoint, "the checkpoint": reader.folder, "--file": options.file}
            command.check_output(options.output, options.overwrite, inputs, folder=False)
        found = [score(reader, text, options.order) for text in texts]
        for result in found:
            count = len(result["tokens"])
            each = "  ".join(f"{token!r} {value:.2f}" for token, value in result["tokens"])
            mean = math.exp(-result["log_prob"] / count)
            summary = f"{result['log_prob']:.3f} nats, {count} tokens, perplexity {mean:.2f}"
            console.print(f"{summary}: {result['text']}\n    {each}", soft_wrap=True)
        if options.output:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text("".join(json.dumps(result) + "\n" for result in found), encoding="utf-8")

    return command.refuse("score.py", work)


if __name__ == "__main__":
    sys.exit(main())

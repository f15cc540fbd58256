"""Claim: memory carries context over segments (Dai et al. 2019, sections 3.2 and 4.4, appendix C).

Left-to-right models of the same text, tokens and parameters read segments of 32 tokens, each with a memory of 0 to 4
earlier segments, in training and in evaluation. Losses of the held-out text are shown by position in the segment,
because without memory the first tokens of a segment have no context.

The range of a model is the paper's relative effective context length (RECL), of a group of models. With l_i(c, t) the
loss of model i at token t from a context of c tokens, and b(c, t) = min over i of l_i(c, t) the best of the group,

    f_i(c, c') = mean over t in T of min(b(c, t), l_i(c', t))
    g_i(c, c') = (exp f_i(c, c) - exp f_i(c, c')) / exp f_i(c, c)

where T is the share r of tokens with the largest b(c, t). From the shortest c on, c grows by a step as long as
g_i(c, c + step) is at least 0.01; the last c is the RECL. It is defined for a group, because gains of a model that is
bad with little context would count for more. A context of c tokens is given as a sequence without memory, with the
position encodings and weights of memory and segment together. Sixteen tokens are scored in each sequence, from contexts
of c to c + 15 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from rich.progress import Progress
from torch import nn

from evaluate import evaluate
from parts.inference import Reader
from xlnet_kernels.pretraining import TokenFile

from .workshop import Workshop, train

THRESHOLD = 0.01  # of the relative gain
SHARES = (1.0, 0.5, 0.1)  # r
SCORED = 16
TOGETHER = 16  # sequences in a call


def measure(workshop: Workshop) -> Iterator[dict]:
    """A row for each length of memory and seed."""
    options = workshop.options
    length = options.segment
    longest = max(options.memories) * length
    contexts = list(range(length, (max(options.memories) * 2) * length + 1, length))
    for seed in options.seeds:
        rows, losses = [], {}
        for segments in options.memories:
            sizes = {"seq_len": length, "batch_size": options.segment_batch, "steps": options.segment_steps}
            run = workshop.new_run("autoregressive", seed, mem_len=segments * length, num_predict=1, **sizes)
            facts = train(run)
            model = run.model.eval()
            reader = Reader(workshop.folder, model, workshop.tokenizer)
            text = run.validation.text.part(0, min(options.held_out_tokens, len(run.validation.text)))
            found = {m * length for m in options.memories} if segments == max(options.memories) else {longest}
            held_out = {
                mem_len: evaluate(reader, text, "causal", length, mem_len, 0, Progress(disable=True))
                for mem_len in sorted(found | {segments * length})
            }
            own = held_out[segments * length]
            losses[segments] = context_losses(model, run.validation.text, contexts, options.windows)
            rows.append(
                {"section": "memory", "implementation": f"memory of {segments}", "segments": segments, "seed": seed}
                | facts
                | {"held_out": round(own.mean, 4)}
                | {"by_position": [round(float(x), 4) for x in own.nats / np.maximum(own.count, 1)]}
                | {"by_memory": {str(m): round(tally.mean, 4) for m, tally in held_out.items()}}
                | {"by_context": {str(c): round(float(x.mean()), 4) for c, x in losses[segments].items()}}
            )
        for share in SHARES:
            for row in rows:
                row.setdefault("recl", {})[str(share)] = relative_context(losses, row["segments"], share)
        yield from rows


@torch.no_grad()
def context_losses(model: nn.Module, text: TokenFile, contexts: list[int], windows: int) -> dict[int, np.ndarray]:
    """The losses of the same tokens (windows * SCORED) for each length of context.

    Raises:
        ValueError: no document is long enough.
    """
    size = max(contexts) + SCORED
    starts = [
        place
        for begin, end in zip(text.bounds[:-1].tolist(), text.bounds[1:].tolist(), strict=True)
        for place in range(begin, end - size + 1, SCORED)
    ]
    if not starts:
        raise ValueError(f"no held-out document has {size} tokens")
    chosen = np.unique(np.linspace(0, len(starts) - 1, windows).round().astype(int))
    ids = torch.from_numpy(np.stack([text.read(starts[i], starts[i] + size) for i in chosen]))
    rows, found = torch.arange(-SCORED, 0)[None], {}
    for context in contexts:
        losses = []
        for part in ids[:, -SCORED - context :].split(TOGETHER):
            logits = model(part[:, :-1], output_rows=rows, use_mems=False).logits
            labels = part[:, -SCORED:]
            losses.append(nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none"))
        found[context] = torch.cat(losses).double().numpy()
    return found


def relative_context(losses: dict[int, dict[int, np.ndarray]], model: int, share: float) -> int:
    """The RECL of one model from the losses by context; the longest context if it never ends.

    >>> short, long = np.array([3.0, 3.0]), np.array([2.0, 3.0])
    >>> losses = {0: {8: short, 16: short, 24: short}, 1: {8: short, 16: long, 24: long}}
    >>> [relative_context(losses, model, 1.0) for model in (0, 1)]
    [8, 16]
    """
    contexts = list(losses[model])
    for context, longer in zip(contexts, contexts[1:], strict=False):
        best = np.min([of_one[context] for of_one in losses.values()], axis=0)
        hard = np.argsort(-best, kind="stable")[: max(1, round(share * len(best)))]
        before, after = (np.exp(np.minimum(best, losses[model][c])[hard].mean()) for c in (context, longer))
        if (before - after) / before < THRESHOLD:
            return context
    return contexts[-1]

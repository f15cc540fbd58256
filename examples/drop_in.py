"""TwoStreamAttention in another model than XLNet: a network that fills gaps in sequences.

    python examples/drop_in.py

Each sequence repeats eight symbols twice, and a quarter of the places are gaps. A gap is filled from the same place of
the other half, eight places earlier or later. The content stream runs over all places, the query stream over the gaps
only, at a quarter of its cost. Takes some seconds on a CPU.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parts.command import number, refuse
from xlnet_kernels import RankMask, TwoStreamAttention

SYMBOLS, HALF, GAPS = 16, 8, 4


class Layer(nn.Module):
    """Layer with TwoStreamAttention in place of nn.MultiheadAttention, residual and LayerNorm."""

    def __init__(self, d_model: int, n_head: int, d_inner: int) -> None:
        super().__init__()
        self.attn = TwoStreamAttention(d_model, n_head)
        self.feed_forward = nn.Sequential(nn.Linear(d_model, d_inner), nn.GELU(), nn.Linear(d_inner, d_model))
        self.norm = nn.LayerNorm(d_model)

    def forward(self, h: Tensor, g: Tensor, mask: RankMask, gaps: Tensor) -> tuple[Tensor, Tensor]:
        h, g = self.attn(h, g, mask=mask, target_positions=gaps)
        return self.norm(h + self.feed_forward(h)), self.norm(g + self.feed_forward(g))


class GapFiller(nn.Module):
    """Network with scores of symbols for each gap, all at once."""

    def __init__(self, d_model: int = 64, n_layer: int = 2, n_head: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, d_model)
        self.question = nn.Parameter(torch.zeros(d_model))  # initial state of a gap
        self.layers = nn.ModuleList(Layer(d_model, n_head, 2 * d_model) for _ in range(n_layer))
        self.scores = nn.Linear(d_model, SYMBOLS)

    def forward(self, ids: Tensor, gaps: Tensor) -> Tensor:
        """Scores (B, N, SYMBOLS) from ids (B, L), arbitrary in the gaps, and the gaps' places (B, N)."""
        h = self.embedding(ids)
        g = self.question.expand(*gaps.shape, -1)
        hidden = torch.zeros_like(ids, dtype=torch.bool).scatter(1, gaps, True)
        mask = RankMask.padding(hidden)  # hides the gaps' ids from all rows
        for layer in self.layers:
            h, g = layer(h, g, mask, gaps)
        return self.scores(g)


def make_batch(batch: int) -> tuple[Tensor, Tensor]:
    """Sequences, and the places of their gaps, never both places of a symbol."""
    ids = torch.randint(SYMBOLS, (batch, HALF)).repeat(1, 2)
    places = torch.rand(batch, HALF).argsort(1)[:, :GAPS]
    return ids, places + HALF * torch.randint(2, places.shape)


def main(arguments: list[str] | None = None) -> float:
    """Train, and return the accuracy on new sequences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=number(int, 1), default=200)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = GapFiller()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, options.steps + 1):
        ids, gaps = make_batch(32)
        loss = F.cross_entropy(model(ids, gaps).flatten(0, 1), ids.gather(1, gaps).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    ids, gaps = make_batch(256)
    with torch.no_grad():
        accuracy = (model(ids, gaps).argmax(-1) == ids.gather(1, gaps)).double().mean().item()
    print(f"filled {accuracy:.1%} of the gaps, by chance {1 / SYMBOLS:.1%}")
    return accuracy


if __name__ == "__main__":
    sys.exit(refuse("drop_in.py", main))

"""Transformer-XL decoder with the operator: causal, and each segment sees the keys and values of earlier segments.

    python examples/transformer_xl.py

The task needs memory: symbols repeat after 24, and are read in segments of 16. With memory the loss goes to zero;
without, it stays near log 8 = 2.08. Takes some seconds on a CPU.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import xlnet_kernels as xk
from parts.command import number, refuse

SYMBOLS, PERIOD, SEGMENT, MEMORY = 8, 24, 16, 32


class DecoderLayer(nn.Module):
    """Layer of relative attention and feed-forward, each after a norm (Dai et al. 2019, section 3.3)."""

    def __init__(self, d_model: int, n_head: int, d_inner: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.norm_attn, self.norm_feed_forward = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.query, self.key, self.value, self.position, self.out = (
            nn.Linear(d_model, d_model, bias=False) for _ in range(5)
        )
        self.content_bias = nn.Parameter(torch.zeros(n_head, d_model // n_head))  # u
        self.position_bias = nn.Parameter(torch.zeros(n_head, d_model // n_head))  # v
        self.feed_forward = nn.Sequential(nn.Linear(d_model, d_inner), nn.ReLU(), nn.Linear(d_inner, d_model))

    def forward(self, h: Tensor, mems: Tensor | None, positions: Tensor) -> Tensor:
        """Apply the layer to h (B, L, d_model), with mems (B, M, d_model) or None.

        positions (M + L + 1, d_model) are for distances M + L .. 0.
        """
        x = self.norm_attn(h)
        memory = None
        if mems is not None:
            mems = self.norm_attn(mems)
            memory = (self.heads(self.key(mems)), self.heads(self.value(mems)))
        out = xk.rel_attention(
            self.heads(self.query(x)),
            self.heads(self.key(x)),
            self.heads(self.value(x)),
            self.heads(self.position(positions)),  # rows end at distance 0, so keys ahead are invisible without a mask
            content_bias=self.content_bias,
            position_bias=self.position_bias,
            memory=memory,
        )
        h = h + self.out(out.transpose(1, 2).flatten(2))
        return h + self.feed_forward(self.norm_feed_forward(h))

    def heads(self, x: Tensor) -> Tensor:
        """Heads (..., H, L, D) of (..., L, d_model)."""
        return x.unflatten(-1, (self.n_head, -1)).transpose(-3, -2)


class TransformerXL(nn.Module):
    """Language model that also returns the memory for the next segment: the inputs of its layers."""

    def __init__(self, d_model: int = 64, n_layer: int = 2, n_head: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, d_model)
        self.layers = nn.ModuleList(DecoderLayer(d_model, n_head, 2 * d_model) for _ in range(n_layer))
        self.scores = nn.Linear(d_model, SYMBOLS)

    def forward(self, ids: Tensor, mems: list[Tensor] | None = None, mem_len: int = 0) -> tuple[Tensor, list[Tensor]]:
        h = self.embedding(ids)
        keys = h.shape[1] + (0 if mems is None else mems[0].shape[1])
        positions = xk.relative_positions(keys, h.shape[1], h.shape[2], attn_type="uni", dtype=h.dtype, device=h.device)
        kept = []
        for index, layer in enumerate(self.layers):
            before = None if mems is None else mems[index]
            seen = h if before is None else torch.cat([before, h], 1)
            kept.append(seen[:, max(0, seen.shape[1] - mem_len) :].detach())
            h = layer(h, before, positions)
        return self.scores(h), kept


def train(steps: int, mem_len: int) -> float:
    """Train, and return the loss per symbol of the last tenth of the segments."""
    torch.manual_seed(0)
    model = TransformerXL()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    mems, losses, begin = None, [], 0
    for _ in range(steps):
        if begin == 0 or begin > 8 * PERIOD:  # new text, without memory
            text, begin, mems = torch.randint(SYMBOLS, (16, PERIOD)), PERIOD, None
        places = torch.arange(begin, begin + SEGMENT + 1) % PERIOD
        scores, kept = model(text[:, places[:-1]], mems, mem_len)
        loss = F.cross_entropy(scores.flatten(0, 1), text[:, places[1:]].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if begin > 2 * PERIOD:  # memory holds a whole period from this position on
            losses.append(loss.item())
        mems, begin = kept if mem_len else None, begin + SEGMENT
    losses = losses[-max(1, len(losses) // 10) :]
    return sum(losses) / len(losses)


def main(arguments: list[str] | None = None) -> tuple[float, float]:
    """Train, and return the losses with memory and without."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=number(int, 3), default=250)  # the third is the first with full memory
    options = parser.parse_args(arguments)
    losses = tuple(train(options.steps, mem_len) for mem_len in (MEMORY, 0))
    print(f"loss with {MEMORY} symbols of memory {losses[0]:.3f}, without {losses[1]:.3f}")
    return losses


if __name__ == "__main__":
    sys.exit(refuse("transformer_xl.py", main))

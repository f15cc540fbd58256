"""Conformer block in plain torch around RelPositionAttention, with ESPnet's and NeMo's parameter names.

    python examples/conformer.py

The task needs relative positions: predict the symbol of the frame twelve frames ago. A convolution of seven frames does
not reach that far. Takes some seconds on a CPU.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import xlnet_kernels as xk
from parts.command import number, refuse
from xlnet_kernels.integrations.conformer import RelPositionAttention, conformer_positions


class ConformerBlock(nn.Module):
    """Conformer block of feed-forward halves, attention and convolution (Gulati et al. 2020, section 2.4)."""

    def __init__(self, d_model: int, n_head: int, d_inner: int, kernel_size: int, dropout: float = 0.0) -> None:
        super().__init__()

        def feed_forward() -> nn.Module:
            wide = nn.Linear(d_model, d_inner)
            return nn.Sequential(
                nn.LayerNorm(d_model), wide, nn.SiLU(), nn.Dropout(dropout), nn.Linear(d_inner, d_model)
            )

        self.feed_forward1, self.feed_forward2 = feed_forward(), feed_forward()
        self.norm_attn, self.norm_conv, self.norm_out = (nn.LayerNorm(d_model) for _ in range(3))
        self.attn = RelPositionAttention(n_head, d_model, dropout)
        self.widen = nn.Linear(d_model, 2 * d_model)
        self.depthwise = nn.Conv1d(d_model, d_model, kernel_size, padding=kernel_size // 2, groups=d_model)
        self.norm_depthwise = nn.BatchNorm1d(d_model)
        self.narrow = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, pos_emb: Tensor, padding: Tensor | None = None) -> Tensor:
        """Apply the block to x (B, L, d_model).

        pos_emb (2 L - 1, d_model); padding (B, L) bool, True where there is no frame.
        """
        mask = None if padding is None else xk.RankMask.padding(padding)
        x = x + 0.5 * self.dropout(self.feed_forward1(x))
        x = x + self.dropout(self.attn(self.norm_attn(x), pos_emb, mask))
        x = x + self.dropout(self.convolve(self.norm_conv(x), padding))
        x = x + 0.5 * self.dropout(self.feed_forward2(x))
        return self.norm_out(x)

    def convolve(self, x: Tensor, padding: Tensor | None) -> Tensor:
        x = F.glu(self.widen(x), -1)
        if padding is not None:
            x = x.masked_fill(padding[:, :, None], 0.0)
        return self.narrow(F.silu(self.norm_depthwise(self.depthwise(x.mT))).mT)


class Tagger(nn.Module):
    """Tagger of frames with scores of symbols."""

    def __init__(self, symbols: int, d_model: int = 64) -> None:
        super().__init__()
        self.frames = nn.Linear(symbols, d_model)
        self.block = ConformerBlock(d_model, 4, 2 * d_model, kernel_size=7)
        self.scores = nn.Linear(d_model, symbols)

    def forward(self, frames: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.frames(frames)
        positions = conformer_positions(x.shape[1], x.shape[2], dtype=x.dtype, device=x.device)  # once for all blocks
        return self.scores(self.block(x, positions, padding))


def make_batch(batch: int, length: int, symbols: int, delay: int) -> tuple[Tensor, Tensor, Tensor]:
    """Noisy frames, the padding mask, and labels, -100 without a label."""
    ids = torch.randint(symbols, (batch, length))
    frames = F.one_hot(ids, symbols) + 0.1 * torch.randn(batch, length, symbols)
    padding = torch.arange(length) >= torch.randint(length // 2, length + 1, (batch, 1))
    labels = ids.roll(delay, 1).masked_fill(padding, -100)
    labels[:, :delay] = -100
    return frames, padding, labels


def main(arguments: list[str] | None = None) -> float:
    """Train, and return the accuracy on new sequences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=number(int, 1), default=150)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    symbols, delay = 8, 12
    model = Tagger(symbols)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, options.steps + 1):
        frames, padding, labels = make_batch(16, 50, symbols, delay)
        loss = F.cross_entropy(model(frames, padding).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    frames, padding, labels = make_batch(64, 50, symbols, delay)
    with torch.no_grad():
        right = model.eval()(frames, padding).argmax(-1) == labels
    accuracy = (right.sum() / (labels >= 0).sum()).item()
    print(f"accuracy {accuracy:.1%}, by chance {1 / symbols:.1%}")
    return accuracy


if __name__ == "__main__":
    sys.exit(refuse("conformer.py", main))

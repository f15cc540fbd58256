"""Masks of other libraries: what is found out about one is forgotten when it changes."""

from __future__ import annotations

import pytest
import torch

from xlnet_kernels.integrations import _relative
from xlnet_kernels.integrations._masks import layer_mask, visible_ranks


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_mask_may_be_edited_in_place(mode):
    def seen(mask):
        return visible_ranks(mask, False).to_bool()[:, -1]

    with mode():
        mask = torch.ones(2, 1, 5, dtype=torch.bool)
        assert visible_ranks(mask, False) is None and layer_mask(mask[:, None]).visible is None
        mask[1, 0, 3:] = False
        assert torch.equal(seen(mask), mask[:, 0])
        mask[0, 0, 2:] = False
        assert torch.equal(seen(mask), mask[:, 0])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_positions_may_be_edited_in_place(mode):
    with mode():
        positions = torch.ones(2, 5, 4)
        assert _relative.shared(positions).dim() == 2
        positions[1] = 2
        assert _relative.shared(positions) is positions

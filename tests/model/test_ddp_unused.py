"""Parameters that a step leaves out. Two real processes: integrations/test_torch.py."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

from xlnet_kernels.ddp_unused import with_unused


@pytest.fixture(params=[1, 2])
def processes(request):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


def test_zeros_are_for_plain_parameters_of_a_process_group(processes):
    plain, frozen = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3), requires_grad=False)
    mesh = init_device_mesh("cpu", (processes,))
    sharded = nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Replicate()], run_check=False))
    x = torch.ones(2, requires_grad=True)
    found = with_unused(x, plain, frozen, sharded)
    assert type(found) is torch.Tensor and torch.equal(found, x)
    found.sum().backward()
    assert frozen.grad is sharded.grad is None
    assert torch.equal(plain.grad, torch.zeros(3))  # of one process, too, where DDP waits for it as well
    with torch.no_grad():
        assert with_unused(x, plain) is x

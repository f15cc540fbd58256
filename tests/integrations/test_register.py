"""Classes of the user's own: register, the base class of stand-ins, and what is refused."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

import xlnet_kernels as xk
from tests.integrations import own_modules
from tests.integrations.conventions import DIM, HEADS, WIDTH
from tests.integrations.toolkit_cases import HIDDEN, LENGTH, assert_same, positions
from xlnet_kernels.integrations import RelativeAttention, accelerated, register
from xlnet_kernels.integrations._libraries import REGISTERED

pytestmark = pytest.mark.usefixtures("one_thread")

STAND_INS = {
    own_modules.CosyVoice: own_modules.FusedCosyVoice,
    own_modules.FireRed: own_modules.FusedFireRed,
    own_modules.Icefall: own_modules.FusedIcefall,
    own_modules.Squeezeformer: own_modules.FusedSqueezeformer,
    own_modules.GtrxlAttention: own_modules.FusedGtrxl,
}


@pytest.fixture(autouse=True)
def registered():
    before = dict(REGISTERED)
    for cls, stand_in in STAND_INS.items():
        register(cls, stand_in)
    yield
    REGISTERED.clear()
    REGISTERED.update(before)


def chunks(length: int, chunk: int) -> torch.Tensor:
    """(L, L), True where a frame is of the same chunk or of one before."""
    own = torch.arange(length) // chunk
    return own[:, None] >= own


def call_cosyvoice(module, x, kind):
    mask = {"full": torch.zeros(0, 0, 0), "padded": ~HIDDEN[:, None], "chunks": chunks(LENGTH, 4).expand(2, -1, -1)}
    return module(x, x, x, mask[kind].clone(), positions(2 * LENGTH - 1))[0]


def call_fire_red(module, x, kind):
    return module(x, x.sin(), x.cos(), positions(2 * LENGTH - 1), None if kind == "full" else ~HIDDEN[:, None])[0]


def call_icefall(module, x, kind):
    x = x.transpose(0, 1)
    hidden = None if kind == "full" else HIDDEN
    return module(x, x, x, positions(2 * LENGTH - 1), hidden, need_weights=False)[0].transpose(0, 1)


def call_squeezeformer(module, x, kind):
    return module(x, x, x, None if kind == "full" else ~HIDDEN[:, None], positions(2 * LENGTH - 1))


def call_gtrxl(module, x, kind):
    memory = [] if kind == "full" else [5]
    memory = [torch.randn(*memory, 2, WIDTH, dtype=x.dtype) if memory else x[0, :0, None].expand(0, 2, WIDTH)] * 2
    rows = positions(len(memory[0]) + LENGTH).transpose(0, 1)
    return module(x.transpose(0, 1), memory, rows)[0]


CASES = {
    "cosyvoice": (own_modules.CosyVoice, call_cosyvoice, ("full", "padded", "chunks")),
    "fire red": (own_modules.FireRed, call_fire_red, ("full", "padded")),
    "icefall": (own_modules.Icefall, call_icefall, ("full", "padded")),
    "squeezeformer": (own_modules.Squeezeformer, call_squeezeformer, ("full", "padded")),
    "gtrxl": (own_modules.Gtrxl, call_gtrxl, ("full", "memory")),
}


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    module = CASES[name][0]().double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def run(name: str, module: nn.Module, kind: str) -> dict:
    torch.manual_seed(1)
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    out = CASES[name][1](module, x, kind)
    named = {"input": x} | dict(module.named_parameters())
    gradients = torch.autograd.grad((out * torch.randn_like(out)).sum(), list(named.values()))
    return {"out": out} | dict(zip(named, gradients, strict=True))


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, case in CASES.items() for kind in case[2]])
def test_outputs_and_gradients_are_the_same(name, kind, calls):
    module = make(name)
    classes, wanted = [type(part) for part in module.modules()], run(name, module, kind)
    attributes = [vars(part).keys() for part in module.modules()]
    count = 2 if name == "gtrxl" else 1
    xk.accelerate(module)
    assert sum(accelerated(module).values()) == count
    assert_same(run(name, module, kind), wanted)
    assert len(calls) == count
    if kind != "full":  # vectors, not a map
        assert all(isinstance(call["mask"], xk.RankMask) for call in calls)
    xk.restore(module)
    assert [type(part) for part in module.modules()] == classes
    assert [vars(part).keys() for part in module.modules()] == attributes
    assert torch.equal(run(name, module, kind)["out"], wanted["out"]) and len(calls) == count


def test_a_stream_in_chunks_with_a_cache(calls):
    """Each chunk sees the cache and itself; both give the same outputs and the same caches."""
    module = make("cosyvoice").eval()
    plain, x = copy.deepcopy(module), torch.randn(1, 12, WIDTH, dtype=torch.float64)
    xk.accelerate(module)
    caches = [torch.zeros(0, 0, 0, 0)] * 2
    for start in range(0, 12, 4):
        part, rows = x[:, start : start + 4], positions(2 * (start + 4) - 1)
        found = [
            one(part, part, part, torch.zeros(0, 0, 0), rows, cache)
            for one, cache in zip((module, plain), caches, strict=True)
        ]
        caches = [cache for _, cache in found]
        assert_same({"out": found[0][0], "cache": caches[0]}, {"out": found[1][0], "cache": caches[1]})
    assert len(calls) == 3


def test_the_scale_is_on_the_query_alone(calls):
    run("icefall", xk.accelerate(make("icefall")), "full")
    assert calls[0]["scale"] == 1.0


def test_calls_that_a_stand_in_leaves_to_the_class(calls):
    module = make("icefall")
    x, rows = torch.randn(5, 2, WIDTH, dtype=torch.float64), positions(9)
    wanted = module(x, x, x, rows)
    found = xk.accelerate(module)(x, x, x, rows)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1]) and not calls


def test_dropout_is_for_training(calls):
    module = xk.accelerate(own_modules.Icefall(dropout=0.25).double())
    other = xk.accelerate(own_modules.CosyVoice(0.5).double())
    for mode in (True, False):
        run("icefall", module.train(mode), "full")
        run("cosyvoice", other.train(mode), "full")
    assert [call["dropout_p"] for call in calls] == [0.25, 0.5, 0, 0]


class Ascending(nn.Module):
    """A learned table for the distances -(K - 1) .. K - 1, without a projection, and a mask that is added."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.head_dim = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), DIM
        self.table = nn.Parameter(torch.randn(HEADS, 2 * LENGTH - 1, DIM))

    def forward(self, x, mask=None):
        q, k, v = (own_modules.heads(part) for part in self.qkv(x).chunk(3, -1))
        scores = (q @ k.mT + own_modules.by_distance(q, self.table.flip(1), LENGTH, LENGTH - 1)) / DIM**0.5
        return self.out(own_modules.whole((scores if mask is None else scores + mask).softmax(-1) @ v))


class FusedAscending(RelativeAttention):
    projection_names = None, None, None, "out", None
    bias_names, head_dim_name = None, "head_dim"
    mask_convention, table_order = "added", "ascending"

    def forward(self, x, mask=None):
        query, key, value = (self.split_heads(part) for part in self.qkv(x).chunk(3, -1))
        return self.relative_attention(query, key, value, self.table, mask)


@pytest.mark.parametrize("rank", [None, 2, 3, 4])
def test_an_ascending_table_and_masks_that_are_added(rank, calls):
    register(Ascending, FusedAscending)
    module, x = Ascending().double(), torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(2)
    mask = torch.zeros(LENGTH, LENGTH, dtype=torch.float64).masked_fill(hidden, torch.finfo(torch.float64).min)
    mask = None if rank is None else mask[(None,) * (rank - 2)]
    wanted = module(x, mask)
    assert_same({"out": xk.accelerate(module)(x, mask)}, {"out": wanted})
    assert isinstance(calls[0]["mask"], xk.RankMask if rank else type(None))
    if rank == 4:
        with pytest.raises(ValueError, match="mask must be 0 or the lowest number of its dtype everywhere, got"):
            module(x, mask + 1)


def test_masks_of_every_head(calls):
    for name, hides in (("cosyvoice", False), ("gtrxl", True)):
        module = xk.accelerate(make(name))
        part = module.layers[0]["attention"] if hides else module
        visible = torch.rand(2, HEADS, LENGTH, LENGTH) < 0.5
        q = torch.randn(2, HEADS, LENGTH, DIM, dtype=torch.float64)
        biases = dict(content_bias=torch.zeros(HEADS, DIM).to(q), position_bias=None) if hides else {}
        part.relative_attention(q, q, q, positions(2 * LENGTH - 1), ~visible if hides else visible.long(), **biases)
        assert torch.equal(calls[-1]["mask"], visible)


@pytest.mark.parametrize("name", CASES)
def test_a_module_compiles(name):
    """In one graph, with its masks."""
    module, kind = make(name), CASES[name][2][-1]
    wanted = run(name, module, kind)["out"]
    compiled = torch.compile(xk.accelerate(module), fullgraph=True, backend="eager")
    assert_same({"out": run(name, compiled, kind)["out"]}, {"out": wanted})


def test_copies_and_pickles():
    module = xk.accelerate(make("squeezeformer"))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert accelerated(other) == {"Squeezeformer": 1}
        assert_same(run("squeezeformer", other, "padded"), run("squeezeformer", module, "padded"))


def test_a_pickle_without_its_stand_in_says_so(tmp_path):
    path = tmp_path / "model.pickle"
    path.write_bytes(pickle.dumps(xk.accelerate(make("squeezeformer"))))
    code = "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))"
    result = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert "own_modules.Squeezeformer has no stand-in in this process" in result.stderr.splitlines()[-1]


def test_subclasses_and_second_registrations():
    class Mine(own_modules.CosyVoice):
        pass

    class Other(own_modules.FusedCosyVoice):
        pass

    assert accelerated(xk.accelerate(Mine())) == {"Mine": 1}
    register(own_modules.CosyVoice, Other)
    assert isinstance(xk.accelerate(own_modules.CosyVoice()), Other)


class Wrong(own_modules.FusedSqueezeformer):
    def forward(self, query, key, value, pos_emb, mask=None): ...


class Made(own_modules.FusedSqueezeformer):
    def __init__(self):
        pass


class Bare(RelativeAttention):
    pass


REFUSED = {
    "a name": ("Attention", Bare, "cls must be a class that derives from torch.nn.Module, got 'Attention'"),
    "an instance": (nn.Linear(1, 1), Bare, "cls must be a class that derives from torch.nn.Module, got Linear"),
    "no module": (int, Bare, "cls must be a class that derives from torch.nn.Module, got int, which is not"),
    "torch's": (nn.MultiheadAttention, Bare, "cls must have relative positions, got torch's MultiheadAttention, which"),
    "no forward": (type("Empty", (nn.Module,), {}), Bare, "cls must have a forward, got Empty, which has none"),
    "a function": (
        own_modules.Squeezeformer,
        lambda x: x,
        "stand_in must be a class that derives from RelativeAttention or from Squeezeformer, got <function",
    ),
    "another module": (
        own_modules.Squeezeformer,
        nn.Linear,
        "RelativeAttention or from Squeezeformer, got Linear: accelerate changes the class of a module",
    ),
    "itself": (own_modules.Squeezeformer, own_modules.Squeezeformer, "Squeezeformer, got Squeezeformer: accelerate"),
    "a constructor": (own_modules.Squeezeformer, Made, "stand_in must have no __init__, which never runs, got Made"),
    "no computation": (
        own_modules.Squeezeformer,
        Bare,
        r"a forward with the arguments of Squeezeformer's, \(query, key, value, mask, pos_emb\), got no forward",
    ),
    "other arguments": (
        own_modules.Squeezeformer,
        Wrong,
        r"Squeezeformer's, \(query, key, value, mask, pos_emb\), got \(query, key, value, pos_emb, mask\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_registered(case):
    cls, stand_in, text = REFUSED[case]
    before = dict(REGISTERED)
    with pytest.raises(ValueError, match=text) as error:
        register(cls, stand_in)
    assert "\n" not in str(error.value) and before == REGISTERED


def test_what_a_stand_in_names_and_an_instance_has_not():
    class NoPositions(nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("linear_q", "linear_k", "linear_v", "linear_out"):
                setattr(self, name, nn.Linear(8, 8))

        def forward(self, query, key, value, mask=None, pos_emb=None): ...

    register(NoPositions, own_modules.FusedCosyVoice)
    with pytest.raises(
        ValueError, match="names linear_pos for positions, which it has not, and without it no relative positions"
    ):
        xk.accelerate(NoPositions())

    class Misspelt(own_modules.FusedFireRed):
        mask_convention = "shown"

    register(own_modules.FireRed, Misspelt)
    with pytest.raises(ValueError, match="mask_convention of FireRed's stand-in must be one of .*, got 'shown'"):
        xk.accelerate(own_modules.FireRed())
    with pytest.raises(ValueError, match="cannot be accelerated without do_rel_shift"):
        xk.accelerate(own_modules.Squeezeformer(do_rel_shift=False))


def test_what_a_call_is_told():
    module = xk.accelerate(make("squeezeformer"))
    x = torch.randn(1, LENGTH, WIDTH, dtype=torch.float64)
    with pytest.raises(ValueError, match="positions of 13 keys must have 25 rows, or 13 that end at distance 0, got 9"):
        module(x, x, x, None, positions(9))
    register(Ascending, type("NoWidth", (FusedAscending,), {"head_dim_name": None}))
    with pytest.raises(ValueError, match="head_dim_name of Ascending's stand-in must be given where it names no u"):
        xk.accelerate(Ascending().double())(x)

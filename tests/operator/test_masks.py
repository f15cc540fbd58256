"""RankMask against the L x K matrices it stands for."""

from __future__ import annotations

import pytest
import torch

from xlnet_kernels import RankMask, rel_attention

B, L, M = 3, 9, 4


def random_order() -> torch.Tensor:
    return torch.stack([torch.randperm(L) for _ in range(B)])


def segment(mask: RankMask, stream: str) -> torch.Tensor:
    """The part of the dense mask without memory."""
    return mask.to_bool(stream)[:, :, M:]


def test_order_is_visible_backwards_only():
    order = random_order()
    mask = RankMask.from_order(order, mem_len=M)
    earlier = order[:, None, :] < order[:, :, None]
    assert torch.equal(segment(mask, "query"), earlier)
    assert torch.equal(segment(mask, "content"), earlier | torch.eye(L, dtype=torch.bool))
    assert mask.to_bool("query")[:, :, :M].all()


def test_order_with_targets_is_the_rule_of_the_original_code():
    # perm_mask[i,j] = (self_rev[i] <= rev[j]) & masked[j], rev = -1 for plain context, self_rev = rev + 1 unless target
    order, targets = random_order(), torch.rand(B, L) < 0.4
    rev = torch.where(targets, order, -1)
    self_rev = torch.where(targets, rev, rev + 1)
    perm_mask = (self_rev[:, :, None] <= rev[:, None, :]) & targets[:, None, :]
    mask = RankMask.from_order(order, targets, mem_len=M)
    assert torch.equal(segment(mask, "query"), ~perm_mask)


def test_order_as_steps_or_as_the_sequence_of_visits():
    sequence, targets = random_order(), torch.rand(B, L) < 0.4
    wanted = RankMask.from_order(steps=sequence.argsort(1), targets=targets, mem_len=M)
    found = RankMask.from_order(sequence=sequence, targets=targets, mem_len=M)
    assert torch.equal(found.to_bool(), wanted.to_bool())


def test_padding_from_an_attention_mask():
    padding = torch.arange(L) >= torch.tensor([[L], [5], [1]])
    wanted = RankMask.padding(padding, M).to_bool()
    for attention_mask in (~padding, (~padding).long()):
        assert torch.equal(RankMask.padding(attention_mask=attention_mask, mem_len=M).to_bool(), wanted)
    with pytest.warns(UserWarning, match=r"all of a sequence is padding.*RankMask.padding\(attention_mask=...\)"):
        RankMask.padding(~padding)


def test_padding_is_seen_by_no_one_but_itself():
    order, padding = random_order(), torch.rand(B, L) < 0.3
    for mask in (
        RankMask.from_order(order, padding=padding, mem_len=M),
        RankMask.padding(padding, mem_len=M),
        RankMask.causal(B, L, M, padding=padding),
    ):
        assert not (segment(mask, "query") & padding[:, None, :]).any()
        assert segment(mask, "content").diagonal(dim1=1, dim2=2).all()
    assert torch.equal(RankMask.padding(padding).to_bool(), (~padding)[:, None, :].expand(-1, L, -1))


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_causal_window_counts_keys_self_included(window):
    mask = RankMask.causal(B, L, M, window=window)
    distance = (torch.arange(L)[:, None] + M) - torch.arange(M + L)
    wanted = (distance >= 0) & (distance < (window or M + L))
    assert torch.equal(mask.to_bool(), wanted.expand(B, -1, -1))
    assert torch.equal(mask.to_bool("query"), (wanted & (distance > 0)).expand(B, -1, -1))


def hidden(padding: torch.Tensor | None, mem_len: int = M) -> torch.Tensor:
    """(B, 1, M + L), True for keys that are hidden from all rows."""
    padding = torch.zeros(B, L, dtype=torch.bool) if padding is None else padding
    return torch.nn.functional.pad(padding, (mem_len, 0))[:, None]


PADDING = torch.arange(L) >= torch.tensor([[L], [L - 3], [2]])
POSITION, KEY = torch.arange(L)[:, None], torch.arange(-M, L)
OWN = POSITION == KEY


@pytest.mark.parametrize("padding", [None, PADDING], ids=["", "padding"])
@pytest.mark.parametrize("left", [None, 0, 2, 100])
@pytest.mark.parametrize("right", [None, 0, 1, 100])
def test_local_is_its_dense_mask(left, right, padding):
    mask = RankMask.local(B, L, left, right, M, padding)
    seen = torch.ones(L, M + L).bool() if left is None else POSITION - KEY <= left
    seen = seen if right is None else seen & (KEY - POSITION <= right)
    wanted = seen & ~hidden(padding)
    assert torch.equal(mask.to_bool(), wanted | OWN if right == 0 else wanted)  # as `causal`
    if right == 0:
        assert torch.equal(mask.to_bool("query"), wanted & ~OWN)


@pytest.mark.parametrize("right", [None, 0, 2])
def test_global_positions_see_and_are_seen(right):
    places = torch.tensor([[0, 4], [2, 2], [8, 1]])
    flags = torch.zeros(B, L, dtype=torch.bool).scatter(1, places, True)
    mask = RankMask.local(B, L, None, right, M, PADDING, places)
    seen = KEY <= POSITION + (L if right is None else right)
    wanted = (seen | flags[:, :, None] | torch.nn.functional.pad(flags, (M, 0))[:, None]) & ~hidden(PADDING)
    assert torch.equal(mask.to_bool(), wanted)
    with pytest.raises(ValueError, match="global_positions need left=None.*docs/how-to/masks.md"):
        RankMask.local(B, L, 3, right, M, global_positions=places)


@pytest.mark.parametrize("padding", [None, PADDING], ids=["", "padding"])
@pytest.mark.parametrize("left_chunks", [None, 0, 1, 5])
@pytest.mark.parametrize("chunk", [1, 2, 4, 20])
def test_chunked_is_its_dense_mask(chunk, left_chunks, padding):
    behind = POSITION // chunk - KEY // chunk  # chunks; // rounds down, so memory is in the chunks before 0
    wanted = (behind >= 0) & (behind <= (L + M if left_chunks is None else left_chunks)) & ~hidden(padding)
    assert torch.equal(RankMask.chunked(B, L, chunk, left_chunks, M, padding).to_bool(), wanted)


@pytest.mark.parametrize("padding", [None, PADDING], ids=["", "padding"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ids", ["in one piece", "mixed", "beyond int32"])
def test_packed_is_its_dense_mask(ids, causal, padding):
    documents = torch.randint(3, (B, L))
    documents = {"in one piece": documents.sort(1)[0], "mixed": documents, "beyond int32": documents + 2**40}[ids]
    mask = RankMask.packed(documents, causal, padding)
    wanted = (documents[:, :, None] == documents[:, None]) & ~hidden(padding, 0)
    if causal:
        wanted &= POSITION >= torch.arange(L)
        assert torch.equal(mask.to_bool("query"), wanted & ~torch.eye(L, dtype=torch.bool))
        wanted |= torch.eye(L, dtype=torch.bool)
    assert torch.equal(mask.to_bool(), wanted)


@pytest.mark.parametrize("kind", ["local", "chunked", "packed", "packed causal"])
def test_attention_with_ranks_is_attention_with_the_dense_mask(kind, backend):
    """At a length of several tiles, most of which no row sees."""
    length, mem_len = 150, 0 if "packed" in kind else 20
    ids = torch.arange(length).expand(2, -1) // torch.tensor([[40], [25]])
    mask = {
        "local": lambda: RankMask.local(2, length, 9, 5, mem_len),
        "chunked": lambda: RankMask.chunked(2, length, 16, 1, mem_len),
        "packed": lambda: RankMask.packed(ids),
        "packed causal": lambda: RankMask.packed(ids, causal=True),
    }[kind]()
    leaves = [
        torch.randn(2, 2, length, 8, dtype=torch.float64 if backend != "triton" else torch.float32) for _ in "qkv"
    ]
    leaves.append(torch.randn(2, mem_len + 2 * length, 8).to(leaves[0]))
    leaves += [torch.randn(2, 2, mem_len, 8).to(leaves[0]) for _ in "kv"]

    def call(seen):
        given = [x.clone().requires_grad_() for x in leaves]
        out = rel_attention(*given[:4], mask=seen, memory=tuple(given[4:]), backend=backend)
        return out, *torch.autograd.grad((out * torch.linspace(-1, 1, 8).to(out)).sum(), given)

    dense = mask.to_bool(mem_len=mem_len)[:, None]
    tolerance = 1e-10 if leaves[0].dtype == torch.float64 else 1e-3
    for found, wanted in zip(call(mask), call(dense), strict=True):
        torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", ["causal", "padding", "local"])
def test_padding_in_memory_is_hidden_where_it_is_named(name):
    """Its keys and values reach no output. The `padding` of a mask is of its segment only."""
    length, memory = 4, 3
    no_token, in_memory = torch.tensor([[False, False, False, True]]), torch.tensor([[True, False, False]])
    mask = {
        "causal": RankMask.causal(1, length, memory, padding=no_token),
        "padding": RankMask.padding(no_token, memory),
        "local": RankMask.local(1, length, 9, 1, memory, padding=no_token),
    }[name]
    hidden = mask.hide_memory(in_memory)
    expected = mask.to_bool()
    assert expected[:, :, 0].any()
    expected[:, :, 0] = False
    assert torch.equal(hidden.to_bool(), expected) and hidden.one_stream == mask.one_stream

    q, k, v = torch.randn(3, 1, 2, length, 8)
    mems = torch.randn(2, 1, 2, memory, 8)
    rel_key = torch.randn(2, memory + 2 * length, 8)
    found = rel_attention(q, k, v, rel_key, memory=(mems[0], mems[1]), mask=hidden)
    mems[:, :, :, 0] = torch.nan
    assert torch.equal(found, rel_attention(q, k, v, rel_key, memory=(mems[0], mems[1]), mask=hidden))


def test_padding_of_a_memory_longer_than_the_keys_is_refused():
    with pytest.raises(ValueError, match="padding of the memory must have at most the mask's 3 keys, got 4"):
        RankMask.causal(1, 2, 1).hide_memory(torch.zeros(1, 4, dtype=torch.bool))


def test_full_shows_everything():
    assert RankMask.full(B, L, M).to_bool().all()
    assert RankMask.full(B, L, M).to_bool().shape == (B, L, M + L)


def test_rows_are_rows_of_the_dense_mask():
    # unsorted, with duplicates, and every vector of the mask gathered with them
    ranks = torch.randint(6, (B, L)), torch.randint(6, (B, M + L)), torch.randint(3, (B, L))
    mask = RankMask(*ranks, sees_self=torch.rand(B, L) < 0.5)
    positions = torch.randint(L, (B, 5))
    wanted = mask.to_bool().gather(1, positions[:, :, None].expand(-1, -1, M + L))
    assert torch.equal(mask.rows(positions).to_bool(None, positions, M), wanted)
    assert torch.equal(mask.rows(positions.int()).to_bool(None, positions, M), wanted)


def test_one_mask_serves_every_batch():
    mask = RankMask.causal(1, L, M)
    assert torch.equal(mask.expand(B).to_bool(), RankMask.causal(B, L, M).to_bool())
    assert mask.rows(torch.zeros(B, 2, dtype=torch.long)).query_rank.shape == (B, 2)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_any_integer_ranks_are_kept_as_int32(dtype):
    mask = RankMask(torch.ones(1, L, dtype=dtype), torch.zeros(1, L, dtype=dtype))
    assert mask.query_rank.dtype == mask.key_rank.dtype == torch.int32 and mask.to_bool().all()


def test_ranks_beyond_int32_are_clamped_not_wrapped():
    mask = RankMask(torch.tensor([[2**40]]), torch.tensor([[-(2**40), 2**40]]))
    assert mask.to_bool().tolist() == [[[True, False]]]


@pytest.mark.parametrize(
    "arguments, text",
    [
        ((torch.zeros(L), torch.zeros(1, L)), "query_rank must be a 2-dimensional"),
        ((torch.zeros(1, L), torch.zeros(1, L)), "query_rank must hold integers"),
        ((torch.zeros(1, L).int(), None), "key_rank must be a 2-dimensional tensor .* NoneType"),
        ((torch.zeros(2, L).int(), torch.zeros(3, L).int()), "key_rank must have query_rank's batch size 2, got 3"),
        ((torch.zeros(1, L).int(), torch.zeros(1, L).int(), torch.zeros(1, 2).int()), r"query_floor must .* \(1, 2\)"),
        (
            (torch.zeros(1, L).int(), torch.zeros(1, L).int(), None, torch.zeros(1, L)),
            "sees_self must be a bool tensor",
        ),
        ((torch.zeros(1, L).int(), torch.zeros(1, L).int(), None, 1), "sees_self must be a bool"),
    ],
)
def test_bad_vectors_are_named(arguments, text):
    with pytest.raises(ValueError, match=text):
        RankMask(*arguments)


def test_bad_arguments_of_the_constructors_are_named():
    order = random_order()
    with pytest.raises(ValueError, match="targets must be a bool tensor"):
        RankMask.from_order(order, torch.ones(B, L))
    with pytest.raises(ValueError, match="padding must be a bool tensor"):
        RankMask.from_order(order, padding=torch.ones(B, L + 1, dtype=torch.bool))
    with pytest.raises(ValueError, match="padding must be a 2-dimensional"):
        RankMask.padding(torch.zeros(L, dtype=torch.bool))
    with pytest.raises(ValueError, match="stream must be"):
        RankMask.full(1, L).to_bool("both")


@pytest.mark.parametrize("sees_self", [True, torch.tensor([[True, False, False, True]] * 2)], ids=["bool", "tensor"])
@pytest.mark.parametrize("floor", [None, torch.tensor([[0, 1, 0, 2]] * 2)], ids=["", "floor"])
def test_rows_are_those_asked_for(sees_self, floor):
    rank = torch.tensor([[3, 0, 2, 1], [1, 2, 3, 0]])  # of keys and queries alike: one tensor for both
    mask = RankMask(rank, rank, floor, sees_self)
    positions = torch.arange(4).expand(2, -1)
    wanted = mask.to_bool(None, positions, 0)[:, 1:]
    for rows in (mask.rows_from(1), mask.rows(positions[:, 1:])):
        assert torch.equal(rows.to_bool(None, positions[:, 1:], 0), wanted)

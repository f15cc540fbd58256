"""Arguments of other libraries' kinds: taken where they mean one thing, refused with the way out where they do not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import xlnet_kernels as xk

B, H, L, D = 2, 2, 5, 8


def tensors():
    return [torch.randn(B, H, L, D) for _ in range(3)] + [torch.randn(H, 2 * L, D)]


@pytest.mark.parametrize("given", [
    dict(scale=np.float32(0.5)), dict(scale=np.float64(0.5)), dict(scale=np.int64(2)), dict(max_distance=np.int64(L)),
    dict(max_distance=np.uint8(L)), dict(deterministic=np.bool_(True)), dict(dropout_p=np.float32(0.5)),
    dict(scale=np.array(0.5)),
])  # fmt: skip
def test_numbers_of_numpy_are_numbers(given):
    given_tensors, plain = tensors(), {name: value.item() for name, value in given.items()}
    found = []
    for options in (given, plain):
        torch.manual_seed(3)
        found.append(xk.rel_attention(*given_tensors, **options))
    assert torch.equal(*found)


def test_sizes_of_numpy_are_sizes():
    size = np.int64
    assert torch.equal(xk.RankMask.causal(size(1), size(3), size(1), window=size(2)).to_bool(),
                       xk.RankMask.causal(1, 3, 1, window=2).to_bool())  # fmt: skip
    xk.integrations.conformer.RelPositionAttention(size(2), size(8), np.float32(0.5))
    assert type(xk.pretraining.PermutationLM(num_predict=size(3)).num_predict) is int
    attn = xk.TwoStreamAttention(size(8), size(2), dropout=np.float32(0.5))
    assert (attn.d_model, attn.n_head, attn.d_head) == (8, 2, 4) and type(attn.n_head) is int
    with pytest.raises(ValueError, match="scale must be a finite number, got nan"):
        xk.rel_attention(*tensors(), scale=np.float32("nan"))


def nested(shape):
    return torch.nested.nested_tensor([torch.randn(*shape[1:]) for _ in range(shape[0])], layout=torch.jagged)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("which", [0, 1, 2])
def test_nested_tensors_are_told_the_way_out(which):
    given = tensors()
    given[which] = nested((B, H, L, D))
    name = ("query", "key", "value")[which]
    with pytest.raises(ValueError, match=f"{name} is a nested tensor: .*RankMask.packed, or pad .*RankMask.padding"):
        xk.rel_attention(*given)
    with pytest.raises(ValueError, match="h is a nested tensor: .*RankMask.packed"):
        xk.TwoStreamAttention(D, H)(nested((B, L, D)))


def test_distances_before_heads_are_told_to_transpose():
    q, k, v, table = tensors()
    with pytest.raises(ValueError, match=r"rel_key must be \(H, P, D\); of \(P, H, D\) give rel_key.transpose\(-3, -2"):
        xk.rel_attention(q, k, v, table.transpose(0, 1))
    with pytest.raises(ValueError, match=r"give rel_key.transpose\(-3, -2"):
        xk.rel_attention(q, k, v, table.transpose(0, 1).expand(B, -1, -1, -1))


def test_query_key_value_are_not_for_the_module():
    q, k, v = torch.randn(3, B, L, D)
    with pytest.raises(ValueError, match="makes query, key and value itself.*rel_attention takes query, key and value"):
        xk.TwoStreamAttention(D, H)(q, k, v)


@pytest.mark.parametrize("dtype", [torch.uint64, torch.uint32, torch.uint16, torch.bool])
def test_ids_that_would_collide_are_refused(dtype):
    ids, embed = torch.zeros(B, L, dtype=torch.int64), torch.randn(2, H, D)
    for given in ((ids.to(dtype), ids), (ids, ids.to(dtype))):
        with pytest.raises(ValueError, match=f"must hold integers, got {dtype}"):
            xk.Segments(*given, embed)
    model = xk.XLNetModel(xk.XLNetConfig(vocab_size=8, d_model=8, n_layer=1, n_head=2, d_inner=8))
    with pytest.raises(ValueError, match=f"token_type_ids must hold integers, got {dtype}"):
        model(ids, token_type_ids=ids.to(dtype))


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("which", ["query", "key", "rel_key", "mask", "h"])
def test_sparse_tensors_are_told_the_way_out(which, layout):
    given = dict(zip(("query", "key", "value", "rel_key"), tensors(), strict=True)) | {"mask": torch.ones(L, L).bool()}
    with pytest.raises(ValueError, match=f"{which} must be a dense tensor, got {layout}: give {which}.to_dense"):
        if which == "h":
            xk.TwoStreamAttention(8, 2)(torch.randn(B, L, 8).to_sparse(layout=layout))
        given[which] = given[which].to_sparse(layout=layout)
        xk.rel_attention(**given)


def large(*shape):
    return torch.zeros(shape or (50, 50))


@pytest.mark.parametrize(("call", "text"), [
    (lambda: xk.RankMask.causal(large(), 5), "batch must be an integer of at least 0, got Tensor of shape (50, 50)"),
    (lambda: xk.RankMask.causal(2, 5).to_bool(large()), "got Tensor of shape (50, 50)"),
    (lambda: xk.TwoStreamAttention(large().numpy(), 2), "d_model must be a positive integer, got ndarray of shape"),
    (lambda: xk.TwoStreamAttention(8, 2, dropout=large()), "dropout must be in [0, 1), got Tensor of shape (50, 50)"),
    (lambda: xk.relative_positions(large(), 5, 8), "key_len must be an integer, got Tensor of shape (50, 50)"),
    (lambda: xk.relative_positions(5.0, 5, 8), "key_len must be an integer, got 5.0"),
    (lambda: xk.relative_positions(5, 5, "8"), "d_model must be an integer, got '8'"),
    (lambda: xk.relative_positions(5, 5, 8, attn_type="x" * 9999), 'attn_type must be "bi" or "uni", got \'xxx'),
    (lambda: xk.integrations.conformer.conformer_positions(3.5, 8), "length must be an integer, got 3.5"),
    (lambda: xk.integrations.conformer.RelPositionAttention(large(), 8), "n_head must be a positive integer, got Ten"),
    (lambda: xk.pretraining.PermutationLM(num_predict=[0] * 9999), "num_predict must be a positive integer, got [0, "),
    (lambda: xk.RankMask.causal(2, 5).expand(3), "RankMask: batch must be 2, the mask's own, got 3"),
    (lambda: xk.RankMask.causal(2, 5).rows(torch.tensor([[9], [0]])), "positions must lie in [0, 5), got values"),
    (lambda: xk.RankMask.causal(2, 5).rows(torch.tensor([1])), "positions must be a 2-dimensional tensor"),
    (lambda: xk.merge([large(2)], [large().bool()]), "lses[0] must be floating and of shape (), got torch.bool"),
    (lambda: xk.tensor_parallel_plan(None), "model must be a torch.nn.Module, got NoneType"),
])  # fmt: skip
def test_values_are_quoted_in_a_line(call, text):
    with pytest.raises(ValueError) as raised:
        call()
    assert text in str(raised.value) and len(str(raised.value)) < 250

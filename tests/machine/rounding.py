"""How far rounding takes a right kernel's results: from the size of what is summed, not from that of the sums.

A gradient may be zero in exact arithmetic (of a row that sees one key, dP = delta) and is then what is left of numbers
that are not. No share of its own size bounds that, nor does the error that another rounded computation happens to make:
that of a segment bias, a single number times a vector, is small by luck once in a while.

So each rounding is a random number here, independent of the others, with the deviation that its format gives it. Their
variances go through the linear maps that the numbers go through, every factor squared:

    variance of a sum of n a * b = (a's rounding^2 + b's + n * 2^-46) * sum of a^2 b^2 + shrinking^2 * (sum of a * b)^2

2^-23 is what a truncated float32 sum loses in a step. Cut operands and sums are too small, all of them, so that these
errors add up: the last summand. What delta is off by moves a whole row of dS by -P times it, and goes through as one.
"""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor

from tests.cases import Problem, _normal
from xlnet_kernels.backends import reference, self_check
from xlnet_kernels.call import Call, mem_len, positions_by_row, replace, with_memory
from xlnet_kernels.dropout import keep_mask

STEP = 2.0**-23
# A normal number is further off once in 4e11; 2,000 problems have about 1e9 numbers.
DEVIATIONS = 7
# A number rounded to a multiple of s is off by s / sqrt(12) (deviation), one that is cut by s / sqrt(3), about zero. It
# is at least 2^bits times s, bits being those of the fraction; TF32 has 10.
CUT_TO_TF32 = 2.0**-10 / 3**0.5
# Three products of TF32 stand for one of float32: operands lose what is left after twice 11 bits, at most 2^-22, and
# the product of both rests, another 2^-22, is left out.
SPLIT = 2.0**-22


@dataclass(frozen=True)
class Format:
    """Relative errors.

    given: of an operand of the caller's; computed: of one that the kernel makes (P, dS, a query row with its bias);
    kept: of the output that delta is taken from; shrinking: of a sum whose operands are cut; result: at most, of what
    is returned. The others are deviations. normal: the smallest number that has all of its bits as an operand.
    """

    given: float
    computed: float
    kept: float
    shrinking: float
    result: float
    normal: float

    @classmethod
    def of(cls, dtype: torch.dtype, tf32: bool) -> Format:
        if dtype == torch.float32:
            operand = CUT_TO_TF32 if tf32 else SPLIT
            return cls(operand, operand, STEP, 2 * operand if tf32 else STEP, STEP / 2, 0.0)
        rounding = torch.finfo(dtype).eps / 2
        normal = torch.finfo(dtype).smallest_normal
        return cls(0.0, rounding / 3**0.5, rounding**2 + STEP, STEP, rounding, normal)  # out_residual: twice the bits


def assert_right(problem: Problem, backend: str, with_lse: bool, tf32: bool = False) -> None:
    """No number that `backend` computes is further off than rounding may take it.

    tf32: products of float32 numbers may be of their first 11 bits.
    """
    exact, allowed = allowances(problem, with_lse, tf32)
    found = problem.results(backend, with_lse=with_lse)
    assert found.keys() == exact.keys()
    for name, value in exact.items():
        want = torch.promote_types(problem.dtype, torch.float32) if name == "lse" else problem.dtype
        assert (found[name].shape, found[name].dtype) == (value.shape, want), name
        result, finite = found[name].double(), value.isfinite()
        assert torch.equal(result[~finite], value[~finite]), f"{name}: other numbers are infinite or NaN"
        off = (result - value).abs()
        wrong = ~(off <= allowed[name]) & finite
        if wrong.any():
            worst = (off / allowed[name])[wrong].argmax()
            words = f"error {off[wrong][worst]:.3g}, allowed {allowed[name][wrong][worst]:.3g}"
            raise AssertionError(f"{name}: {words}; {wrong.sum()} of {wrong.numel()} numbers")


def allowances(problem: Problem, with_lse: bool, tf32: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Results in float64 and what each number may be off by, by name as in Problem.results."""
    exact, call = _exact(problem, with_lse)
    how = Format.of(problem.dtype, tf32)
    grad_out = _normal(exact["out"].shape, 0).to(problem.dtype).double()
    grad_lse = _normal(exact["lse"].shape, 1) if with_lse else torch.zeros_like(exact["lse"])
    with torch.no_grad():
        deviations = Deviations(call, grad_out, grad_lse, how).all(exact)
    subnormal = torch.finfo(problem.dtype).smallest_normal * torch.finfo(problem.dtype).eps
    # The reference's own roundings: what is 0 in exact arithmetic, it may have as a sum of numbers that are not
    terms = exact["out"].shape[0] * (exact["out"].shape[2] + call.key.shape[2])
    own = terms * 2.0**-52 * max(self_check.largest(value) for value in exact.values())
    found = {}
    for name, value in exact.items():
        result = STEP / 2 if name == "lse" else how.result
        found[name] = DEVIATIONS * deviations[name] + result * value.abs() + subnormal + own
    return exact, found


def _exact(problem: Problem, with_lse: bool) -> tuple[dict[str, Tensor], Call]:
    """Results in float64, and what the reference is called with for them."""
    called: list[Call] = []
    compute = reference.rel_attention

    def keep(call: Call):
        called.append(call)
        return compute(call)

    with mock.patch.object(reference, "rel_attention", keep):
        wide = problem.to(torch.float64)
        exact = wide.results("reference", with_lse=with_lse, grad_dtype=problem.dtype)
    return exact, called[0]


class Biased:
    """Query rows with a bias. Kernels add it before the product (and round) or after it: errors are of both parts."""

    def __init__(self, query: Tensor, bias: Tensor | None, how: Format) -> None:
        bias = torch.zeros(()) if bias is None else bias.detach()[:, None]
        self.rows = query + bias
        self.parts = query.square() + bias.square()
        self.rounding = how.computed**2 if bias.ndim else how.given**2


class Deviations:
    """Errors of all results of one call of the reference, in float64."""

    def __init__(self, call: Call, grad_out: Tensor, grad_lse: Tensor, how: Format) -> None:
        call = Call._make(x.detach() if isinstance(x, Tensor) else x for x in call)
        self.how, self.grad_out, self.grad_lse = how, grad_out, grad_lse[..., None]
        self.query, self.rel_key, self.mem_len, self.scale = call.query, call.rel_key, mem_len(call), abs(call.scale)
        self.key, self.value = (with_memory(*x) for x in ((call.memory_key, call.key), (call.memory_value, call.value)))
        batch, heads, self.length, self.width = self.query.shape
        self.keys = self.key.shape[2]
        self.rows = batch * self.length  # that a gradient may be summed over
        self.P, self.lse, _ = reference.attention_map(replace(call, dropout_state=None))
        self.kept = torch.ones((), dtype=self.key.dtype)
        if call.dropout_state is not None:
            p = call.dropout_p
            self.kept = keep_mask(call.dropout_state, batch, heads, self.length, self.keys, p) / (1 - p)
        positions = positions_by_row(call.query_positions, call.query_order)
        positions = torch.arange(self.length)[None] if positions is None else positions
        row = call.max_distance - (positions + self.mem_len)[:, :, None] + torch.arange(self.keys)
        self.row = row.clamp(0, self.rel_key.shape[-2] - 1)[:, None].expand(batch, heads, -1, -1)
        self.content = Biased(self.query, call.content_bias, how)
        self.position = Biased(self.query, call.position_bias, how)
        self.segments = call.segment_embed
        if call.segment_embed is not None:
            self.segment, self.embed = Biased(self.query, call.segment_bias, how), call.segment_embed
            different = call.query_ids[:, None, :, None] != call.key_ids[:, None, None, :]
            self.different = different.to(self.key.dtype)

    def product(self, squares: Tensor, factor: Tensor, total: Tensor, rounding: float, terms: int) -> Tensor:
        """The variance of a @ factor, of a's squares, operands' `rounding` and what it comes to."""
        steps = terms * STEP**2
        return (rounding + steps) * (squares @ factor.square()) + (self.how.shrinking**2 + steps) * total.square()

    def operand(self, x: Tensor) -> Tensor:
        """The squares of P or dS, for their roundings as operands: below the smallest normal number, that of it."""
        return torch.where(x == 0, 0.0, x.abs().clamp_min(self.how.normal)).square()

    def by_row(self, of_pairs: Tensor) -> Tensor:
        """Sums of (B, H, L, M + K) by the row of rel_key that a pair uses: (B, H, L, P)."""
        shape = *of_pairs.shape[:3], self.rel_key.shape[-2]
        return torch.zeros(shape, dtype=of_pairs.dtype).scatter_add(-1, self.row, of_pairs)

    def scores(self) -> tuple[Tensor, Tensor]:
        """The variance of P before it is normalised, relative, (B, H, L, M + K), and that of the log-sum-exp."""
        terms = [(self.content, self.key, self.P), (self.position, self.rel_key, self.by_row(self.P))]
        pairs = [self.of_products(rows, factor) for rows, factor, _ in terms]
        found = pairs[0] + pairs[1].gather(-1, self.row)
        if self.segments is not None:
            embed, other = self.embed.transpose(0, 1), (self.P * self.different).sum(-1)
            terms.append((self.segment, embed, torch.stack([self.P.sum(-1) - other, other], -1)))
            of_same, of_other = self.of_products(self.segment, embed).unbind(-1)
            found = found + of_same[..., None] + of_other[..., None] * self.different
        lse = self.lse.nan_to_num(neginf=0)[..., None]
        score = torch.where(self.P > 0, self.P.clamp_min(1e-300).log() + lse, 0.0)
        # float32 has the score and the largest one, and exp2 is good to two units in the last place
        of_float = STEP**2 * (2 + 2 * score.square() + lse.square())
        of_lse = sum(self.of_weighted_products(*term) for term in terms) * self.scale**2
        return found * self.scale**2 + of_float, of_lse + (self.P.square() * of_float).sum(-1, keepdim=True)

    def of_products(self, rows: Biased, factor: Tensor) -> Tensor:
        """The variance of rows @ factor.mT."""
        rounding = rows.rounding + self.how.given**2
        return self.product(rows.parts, factor.mT, rows.rows @ factor.mT, rounding, self.width)

    def of_weighted_products(self, rows: Biased, factor: Tensor, weights: Tensor) -> Tensor:
        """The variance of a row's sum of weights * (rows @ factor.mT): what a row is rounded by, all have in common."""
        own, total = weights.square() @ factor.square(), weights @ factor
        steps = self.width * STEP**2
        found = rows.parts * ((self.how.given**2 + steps) * own + rows.rounding * total.square())
        shrunk = (rows.rows * total).sum(-1, keepdim=True).square()
        return found.sum(-1, keepdim=True) + (self.how.shrinking**2 + steps) * shrunk

    def gradients_of_scores(self, of_score: Tensor) -> None:
        """Sets dS, the variance of each (of_dS), and that of delta, which comes on top of it."""
        how, P, kept, grad_out = self.how, self.P, self.kept, self.grad_out
        Z, dP, steps = P * kept, (grad_out @ self.value.mT) * kept, self.width * STEP**2
        out = Z @ self.value
        delta = (grad_out * out).sum(-1, keepdim=True) - self.grad_lse
        self.dS = P * (dP - delta)
        of_dP = self.product(grad_out.square(), self.value.mT, dP, 2 * how.given**2, self.width) * kept.square()
        self.of_dS = P.square() * (of_dP + STEP**2 * delta.square()) + self.dS.square() * of_score
        of_out = (how.given**2 + self.keys * STEP**2) * (Z.square() @ self.value.square())
        of_out = of_out + how.shrinking**2 * out.square() + (how.kept**2 + steps) * out.square()
        each = (
            how.computed**2 * self.operand(P) * dP.square() + self.dS.square() * of_score
        )  # P as an operand, and its score
        self.of_delta = each.sum(-1, keepdim=True) + (of_out * grad_out.square()).sum(-1, keepdim=True)
        self.of_delta = self.of_delta + STEP**2 * delta.square()

    def sums_of_rows(self, factor: Tensor, by=lambda of_pairs: of_pairs) -> Tensor:
        """The deviation of by(dS) @ factor: a part of dQ."""
        dS, operands = by(self.dS), self.how.computed**2 + self.how.given**2
        found = (
            self.product(self.operand(dS), factor, dS @ factor, operands, self.keys) + by(self.of_dS) @ factor.square()
        )
        return (found + self.of_delta * (by(self.P) @ factor).square()).sqrt() * self.scale

    def sums_of_columns(self, of_pairs: Tensor, pairs: Tensor, parts: Tensor, rows: Tensor) -> Tensor:
        """The deviation of pairs.mT @ rows: dK, dV or dR."""
        steps = self.rows * STEP**2
        found = of_pairs.mT @ parts + (2 * self.how.computed**2 + steps) * (self.operand(pairs).mT @ parts)
        return (found + (self.how.shrinking**2 + steps) * (pairs.mT @ rows).square()).sqrt()

    def sum_over_rows(self, of_rows: Tensor, total: Tensor) -> Tensor:
        """The deviation of a bias's gradient: of dQ's parts, summed."""
        return (of_rows.square().sum((0, 2)) + (self.how.shrinking**2 + self.rows * STEP**2) * total.square()).sqrt()

    def sums_of_segments(self) -> Tensor:
        """The variance of e, a row's sum of dS over keys of other segments, and of what it is multiplied with."""
        how, seen = self.how, self.different
        e = (self.dS * seen).sum(-1, keepdim=True)
        found = (self.of_dS * seen).sum(-1, keepdim=True) + self.of_delta * (self.P * seen).sum(-1, keepdim=True) ** 2
        steps = self.keys * STEP**2
        found = found + (how.computed**2 + steps) * (self.operand(self.dS) * seen).sum(-1, keepdim=True)
        later = 2 * how.given**2 + how.computed**2 + how.shrinking**2 + (self.keys + self.rows) * STEP**2
        return found + later * (e.square() + self.grad_lse.square())

    def all(self, exact: dict[str, Tensor]) -> dict[str, Tensor]:
        """By name."""
        how, P, Z, grad_out = self.how, self.P, self.P * self.kept, self.grad_out
        of_score, of_lse = self.scores()
        lse = self.lse.nan_to_num(neginf=0)
        found = {"lse": (of_lse[..., 0] + STEP**2 * (1 + lse.square())).sqrt()}
        of_score = of_score + of_lse
        of_out = self.product(self.operand(Z), self.value, exact["out"], how.computed**2 + how.given**2, self.keys)
        found["out"] = ((Z.square() * of_score) @ self.value.square() + of_out).sqrt()
        self.gradients_of_scores(of_score)

        content, position = self.sums_of_rows(self.key), self.sums_of_rows(self.rel_key, self.by_row)
        found["grad query"] = content + position
        # Without TF32 Triton's is that of query, summed, less that of content_bias, whose products do not cut the keys.
        of_position = torch.hypot(position, content) if how.given == SPLIT else position
        for name, part in (("grad content_bias", content), ("grad position_bias", of_position)):
            if name in exact:
                found[name] = self.sum_over_rows(part, exact[name])
        if self.segments is not None:
            of_e = self.sums_of_segments()
            # e times embed[1] - embed[0], or each on its own
            segment = of_e.sqrt() * self.embed.abs().sum(0)[:, None] * self.scale
            found["grad query"] = found["grad query"] + segment
            if "grad segment_bias" in exact:
                found["grad segment_bias"] = self.sum_over_rows(segment, exact["grad segment_bias"])
            embed = (of_e * self.segment.parts).sum((0, 2)).sqrt() * self.scale
            found["grad segment_embed"] = embed.expand(2, -1, -1)

        each, m = self.of_dS + self.of_delta * P.square(), self.mem_len
        key = self.sums_of_columns(each, self.dS, self.content.parts, self.content.rows) * self.scale
        value = self.sums_of_columns(Z.square() * of_score, Z, grad_out.square(), grad_out)
        band, of_band = self.by_row(self.dS), self.by_row(each)
        rel_key = self.sums_of_columns(of_band, band, self.position.parts, self.position.rows) * self.scale
        found["grad rel_key"] = rel_key if self.rel_key.ndim == 4 else rel_key.square().sum(0).sqrt()
        found |= {"grad key": key[:, :, m:], "grad value": value[:, :, m:]}
        return found | {"grad memory_key": key[:, :, :m], "grad memory_value": value[:, :, :m]}

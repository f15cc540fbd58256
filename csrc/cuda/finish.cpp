#include "finish.h"

namespace xlnet_kernels::cuda {
namespace {

// (H, D): the sum over batch and rows of weights (B, H, rows) times rows (B, H, rows, D)
Tensor weighted_sum(const Tensor& weights, const Tensor& rows) {
  return at::matmul(weights.unsqueeze(2), rows.to(at::kFloat)).squeeze(2).sum(0);
}

// What the slots of a sum add up to, scaled
Tensor scaled(const Tensor& slots, double scale) {
  return slots.size(0) == 1 ? slots[0] * scale : slots.sum(0).mul_(scale);
}

void add_segment_gradients(const Inputs& in, const Sums& sums, Tensor& rows, InputGradients& grad) {
  const Tensor different = scaled(sums.different, in.scale);
  // softmax's gradients add up to zero, but for what comes through the log-sum-exp
  const Tensor same = sums.grad_lse.defined() ? sums.grad_lse * in.scale - different : -different;
  const Tensor embed = in.segment_embed->to(at::kFloat);
  const auto spread = [&](const Tensor& weights, int kind) { return weights.unsqueeze(-1) * embed[kind].unsqueeze(1); };
  const Tensor segment_rows = spread(same, 0) + spread(different, 1);
  rows = rows + segment_rows;
  grad.segment_bias = segment_rows.sum(at::IntArrayRef{0, 2});
  // zero times what a fully masked row holds may be NaN
  const Tensor query = in.query.to(at::kFloat).masked_fill(sums.fully_masked.unsqueeze(-1), 0);
  grad.segment_embed = at::stack({weighted_sum(same, query), weighted_sum(different, query)});
  if (in.segment_bias) {
    const Tensor totals = at::stack({same.sum(at::IntArrayRef{0, 2}), different.sum(at::IntArrayRef{0, 2})});
    grad.segment_embed = grad.segment_embed + totals.unsqueeze(-1) * in.segment_bias->to(at::kFloat);
  }
}

}  // namespace

void finish(const Inputs& in, const Needs& needs, const Sums& sums, InputGradients& grad) {
  const int64_t mem_len = in.memory_key ? in.memory_key->size(2) : 0;
  const auto columns = [&](const Tensor& t) { return t.narrow(-1, 0, in.query.size(-1)); };
  Tensor rows = columns(scaled(sums.query, in.scale));
  if (needs.rel_key) {
    Tensor sum = columns(scaled(sums.rel_key, in.scale));
    if (sums.rel.defined())
      sum = sum.addcmul(scaled(sums.rel, in.scale).unsqueeze(-1), in.position_bias->to(at::kFloat).unsqueeze(1));
    grad.rel_key = sum.to(in.rel_key.dtype()).contiguous();
  }
  if (needs.content_bias || needs.position_bias) {
    grad.content_bias = weighted_sum(sums.key.narrow(-1, mem_len, in.key.size(2)), in.key);
    if (mem_len) grad.content_bias = grad.content_bias + weighted_sum(sums.key.narrow(-1, 0, mem_len), *in.memory_key);
    grad.content_bias = grad.content_bias * in.scale;
    // rows' gradient is that of the content term and that of the position term
    grad.position_bias = rows.sum(at::IntArrayRef{0, 2}) - grad.content_bias;
  }
  if (in.segment_embed) add_segment_gradients(in, sums, rows, grad);
  grad.query = empty_rows_first(in.query, in.query.scalar_type()).copy_(rows);
}

}  // namespace xlnet_kernels::cuda

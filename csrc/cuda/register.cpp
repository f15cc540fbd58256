// The operator on CUDA tensors: tensors -> argument structs -> kernels.

// First, because it chooses the device of torch's interface
#include <torch_device.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "../stable/operator.h"
#include "kernels.h"

namespace xlnet_kernels::cuda {
namespace {

// Kernels read 16 bytes at a time: rows dense, every row's start aligned, width a multiple of 16 bytes; and from row to
// row is a step that fits into 32 bits.
Tensor aligned(const Tensor& t) {
  const int64_t size = t.element_size(), chunk = 16 / size, width = t.size(-1);
  const auto strides = t.strides();
  const bool fits = width % chunk == 0 && t.stride(-1) == 1 && reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0 &&
                    t.stride(-2) <= INT32_MAX &&
                    std::all_of(strides.begin(), strides.end() - 1, [&](int64_t s) { return s % chunk == 0; });
  if (fits) return t;
  return padded(t, (chunk - width % chunk) % chunk);
}
OptionalTensor aligned(const OptionalTensor& t) { return t ? OptionalTensor(aligned(*t)) : t; }
Inputs aligned(Inputs inputs) {
#define ALIGN(type, name) inputs.name = aligned(inputs.name);
  DIFFERENTIABLE_INPUTS(ALIGN, )
#undef ALIGN
  return inputs;
}

// Device memory for a call's workspace, all in one piece: `add` says what is wanted, `allocate` sets the pointers.
class Arena {
 public:
  Zeros zeros{};  // set by `allocate`

  template <typename Element>
  void add(Element** to, int64_t count) {
    wanted.push_back({to, count * int64_t(sizeof(Element))});
    size += padded(wanted.back().bytes);
  }
  template <typename Element>
  void add(Zeroed<Element>* to, int64_t count) {
    wanted.insert(wanted.begin(), {&to->data, count * int64_t(sizeof(Element))});
    size += padded(wanted.front().bytes);
    zero_bytes += padded(wanted.front().bytes);
  }
  Tensor allocate(const Tensor& like) {
    const Tensor memory = empty(Sizes{size}, UINT8, like);
    char* next = static_cast<char*>(memory.data_ptr());
    zeros = {next, zero_bytes / 16};
    announce_array(next, zero_bytes);
    next += ALIGNMENT;
    for (const auto& [to, bytes] : wanted) {
      std::memcpy(to, &next, sizeof next);
      announce_array(next, bytes);
      next += padded(bytes);
    }
    return memory;
  }

 private:
  static constexpr int64_t ALIGNMENT = 256;
  static int64_t padded(int64_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }
  struct Wanted {
    void* to;  // a pointer of any type
    int64_t bytes;
  };
  std::vector<Wanted> wanted;                        // those that begin with zeros first
  int64_t zero_bytes = ALIGNMENT, size = ALIGNMENT;  // no array begins where that of all zeros does
};

// The operator's inputs as the kernels take them; the tensors live as long as this.
struct DeviceCall {
  const Inputs inputs;  // aligned
  std::vector<Tensor> kept;
  Call call{};

  explicit DeviceCall(const Inputs& given) : inputs(aligned(given)) {
    PreparedCall prepared = prepare(inputs);
    call.p = prepared.p;
    kept = std::move(prepared.kept);
    call.tf32 = inputs.query.scalar_type() == FLOAT32 && inputs.float32_precision == TF32;
    call.shared_rel_key = inputs.rel_key.dim() == 3;
    call.rel_bias_rows = call.p.rel_len + 2 * REL_MARGIN;
    call.mask_heads = call.p.mask.stride[1] ? int(call.p.heads) : 1;
    call.key_words = int((call.p.mem_len + call.p.key_len + BOUNDS_TILE - 1) / BOUNDS_TILE * (BOUNDS_TILE / 32));
    call.splits = 1;
  }

  Tensor keep(Tensor t) {
    kept.push_back(t);
    return t;
  }
  // Heads of rel_key, in all batches unless they share it.
  int64_t rel_heads() const { return (call.shared_rel_key ? 1 : call.p.batch) * call.p.heads; }
  // Allocates what `arena` has, and what both passes need.
  void allocate(Arena& arena) {
    const RelAttention& p = call.p;
    Workspace& w = call.workspace;
    const int64_t keys = p.mem_len + p.key_len;
    arena.add(&w.rel_bias, rel_heads() * call.rel_bias_rows);
    const int64_t key_tiles = p.batch * ((keys + BOUNDS_TILE - 1) / BOUNDS_TILE);
    if (p.segments.key_ids) arena.add(&w.key_segments, key_tiles);
    if (p.rank_mask.query_rank) {
      arena.add(&w.key_bounds, key_tiles);
      arena.add(&w.rank_pairs, key_tiles * BOUNDS_TILE / 2);
      arena.add(&w.row_bounds, p.batch * ((p.length + BOUNDS_TILE - 1) / BOUNDS_TILE));
    }
    if (may_have_unread_keys(p)) arena.add(&w.unread_keys, p.batch * call.mask_heads * call.key_words);
    keep(arena.allocate(inputs.query));
    w.rel_bias += REL_MARGIN;
  }
};

void check_ran(const std::string& error) { CHECK(error.empty(), error); }

// `padded`'s first columns, (B, H, rows, D), laid out as projections want them
Tensor narrowed(const Tensor& padded, const Tensor& like) {
  if (padded.size(-1) == like.size(-1) && padded.scalar_type() == like.scalar_type()) return padded;
  Tensor result = empty_rows_first(like, like.scalar_type());
  copy_columns(result, padded);
  return result;
}

bool is_empty(const Inputs& in) {
  return in.query.numel() == 0 || in.key.size(2) + (in.memory_key ? in.memory_key->size(2) : 0) == 0;
}

// Few rows and many keys: how many blocks share them, and memory for what each finds
void add_splits(Call& call, Arena& arena) {
  call.splits = forward_splits(call, processors(), tiles_worth_a_block());
  if (call.splits == 1) return;
  const int64_t rows = call.splits * call.p.batch * call.p.heads * call.p.length;
  arena.add(&call.workspace.split_out, rows * call.p.head_dim);
  arena.add(&call.workspace.split_rows, SPLIT_VALUES * rows);
}

Outputs rel_attention(const Inputs& inputs, bool needs_backward) {
  const Tensor& query = inputs.query;
  const DeviceGuard guard(query.device().index);
  if (is_empty(inputs)) {
    Outputs outputs(query, needs_backward);
    for (const Tensor* zeros : {&outputs.out, &outputs.out_residual, &outputs.row_max, &outputs.row_sum})
      zeros->zero_();
    outputs.lse.fill_(-INFINITY);
    return outputs;
  }
  DeviceCall device(inputs);
  Arena arena;
  add_splits(device.call, arena);
  const RelAttention& p = device.call.p;
  if (p.content_bias) arena.add(&device.call.workspace.key_bias, p.batch * p.heads * (p.mem_len + p.key_len));
  device.allocate(arena);
  Outputs outputs(device.inputs.query, needs_backward);
  outputs.give_to(device.call.p);
  check_ran(cuda::forward(device.call, current_stream()));
  outputs.out = narrowed(outputs.out, query);
  if (outputs.out_residual.numel() > 0) outputs.out_residual = narrowed(outputs.out_residual, query);
  return outputs;
}

// Where nothing is attended to
InputGradients zero_gradients(const Inputs& inputs) {
  const auto zeros = [](const OptionalTensor& t) { return t ? empty_like(*t).zero_() : Tensor(); };
  const auto rows = [](const OptionalTensor& t) {
    return t ? empty_rows_first(*t, t->scalar_type()).zero_() : Tensor();
  };
  return {rows(inputs.query),        rows(inputs.key),           rows(inputs.value),
          zeros(inputs.rel_key),     zeros(inputs.content_bias), zeros(inputs.position_bias),
          rows(inputs.memory_key),   rows(inputs.memory_value),  zeros(inputs.segment_embed),
          zeros(inputs.segment_bias)};
}

// Gives backward forward's outputs and their gradients
void give_outputs(const OutputGradients& from, DeviceCall& device, Gradients& g) {
  RelAttention& p = device.call.p;
  p.out = strided(device.keep(aligned(from.out)));
  if (from.out_residual.numel() > 0) p.out_residual = strided(device.keep(aligned(from.out_residual)));
  p.row_max = device.keep(from.row_max.contiguous()).data_ptr();
  p.row_sum = device.keep(from.row_sum.contiguous()).data_ptr();
  g.out = strided(device.keep(aligned(from.grad_out.to(device.inputs.query.scalar_type()))));
  if (from.grad_lse) g.lse = device.keep(from.grad_lse->to(FLOAT32).contiguous()).data_ptr<float>();
}

void add_sums(const DeviceCall& device, const Needs& needs, Arena& arena, Gradients& g) {
  const RelAttention& p = device.call.p;
  const bool deterministic = device.inputs.deterministic;
  Sums& sums = g.sums;
  sums.rel_batches = device.call.shared_rel_key && !deterministic ? 1 : p.batch;
  const int64_t all_heads = p.batch * p.heads, rows = all_heads * p.length,
                rel_rows = sums.rel_batches * p.heads * p.rel_len;
  arena.add(&sums.query, rows * p.head_dim);
  if (p.segments.embed) arena.add(&sums.different, rows);
  const bool of_content = needs.content_bias && p.content_bias, of_position = needs.position_bias && p.position_bias;
  const bool of_segments = p.segments.embed && (needs.segment_embed || needs.segment_bias);
  if (needs.rel_key || of_position) {
    arena.add(&sums.rel_key, rel_rows * p.head_dim);
    if (p.position_bias) arena.add(&sums.rel, rel_rows);
  }
  if (deterministic) arena.add(&sums.progress, 1 + all_heads * most_backward_tiles(p));
  if (of_content || of_position || of_segments) arena.add(&sums.finished, p.heads);
  const int64_t keys = p.mem_len + p.key_len;
  const auto parts = [](int64_t count) { return (count + POSTPROCESS_ROWS - 1) / POSTPROCESS_ROWS; };
  arena.add(&sums.key, all_heads * keys);
  if (of_content) arena.add(&sums.key_parts, all_heads * parts(keys) * p.head_dim);
  if (of_segments) arena.add(&sums.query_parts, all_heads * parts(p.length) * QUERY_PARTS * p.head_dim);
  if (of_position) arena.add(&sums.rel_parts, device.rel_heads() * parts(p.rel_len) * p.head_dim);
  arena.add(&g.row_values, ROW_VALUES * rows);
}

// Gradients of keys and values, of the padded width
struct KeyGradients {
  Tensor key, value;

  KeyGradients(const Tensor& like_key, const Tensor& like_value)
      : key(empty_rows_first(like_key, like_key.scalar_type())),
        value(empty_rows_first(like_value, like_value.scalar_type())) {}
};

InputGradients gradients(const Inputs& in, const OutputGradients& from, const Needs& needs) {
  from.check(in);
  DeviceCall device(in);
  Gradients g{};
  give_outputs(from, device, g);
  Arena arena;
  add_sums(device, needs, arena, g);
  arena.add(&device.call.workspace.unread_rel_rows, device.rel_heads() * ((device.call.p.rel_len + 31) / 32));
  device.allocate(arena);
  g.sums.zeros = arena.zeros;

  const Inputs& aligned_in = device.inputs;
  const KeyGradients segment(aligned_in.key, aligned_in.value);
  std::optional<KeyGradients> memory;
  g.key = strided(segment.key);
  g.value = strided(segment.value);
  if (in.memory_key) {
    memory.emplace(*aligned_in.memory_key, *aligned_in.memory_value);
    g.memory_key = strided(memory->key);
    g.memory_value = strided(memory->value);
  }
  InputGradients grad;
  g.width = in.query.size(-1);
  if (needs.query) g.query = strided(grad.query = empty_rows_first(in.query, in.query.scalar_type()));
  if (needs.rel_key) g.rel_key = strided(grad.rel_key = empty_like(in.rel_key));
  const auto small = [](bool need, const OptionalTensor& input, Tensor& gradient) -> void* {
    if (!need || !input) return nullptr;
    gradient = empty_like(*input);
    return gradient.data_ptr();
  };
  g.content_bias = small(needs.content_bias, in.content_bias, grad.content_bias);
  g.position_bias = small(needs.position_bias, in.position_bias, grad.position_bias);
  g.segment_embed = small(needs.segment_embed, in.segment_embed, grad.segment_embed);
  g.segment_bias = small(needs.segment_bias, in.segment_bias, grad.segment_bias);
  check_ran(cuda::backward(device.call, g, current_stream()));

  grad.key = narrowed(segment.key, in.key);
  grad.value = narrowed(segment.value, in.value);
  if (memory) {
    grad.memory_key = narrowed(memory->key, *in.memory_key);
    grad.memory_value = narrowed(memory->value, *in.memory_value);
  }
  return grad;
}

InputGradients rel_attention_backward(const Inputs& inputs, const OutputGradients& outputs, const Needs& needs) {
  const DeviceGuard guard(inputs.query.device().index);
  return is_empty(inputs) ? zero_gradients(inputs) : gradients(inputs, outputs, needs);
}

}  // namespace

Entry entry() { return {direct::forward<rel_attention>, direct::backward<rel_attention_backward>}; }

}  // namespace xlnet_kernels::cuda

STABLE_TORCH_LIBRARY_IMPL(XLNET_KERNELS_NAMESPACE, XLNET_KERNELS_DISPATCH_KEY, library) {
  using namespace xlnet_kernels;
  add_operators<cuda::rel_attention, cuda::rel_attention_backward>(library, XLNET_KERNELS_OPERATOR);
}

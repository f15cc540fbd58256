// The operator's arguments, in the order of the schema in xlnet_kernels/ops.py: what has a gradient, the other tensors,
// numbers. No torch here: each file that includes it has its own types Tensor and OptionalTensor.
#pragma once

#include <cstddef>
#include <cstdint>

// The operators' namespace in torch.ops, as in xlnet_kernels/_ops.py. A build that is loaded beside others has its own.
#ifndef XLNET_KERNELS_NAMESPACE
#define XLNET_KERNELS_NAMESPACE xlnet_kernels
#endif
#define XLNET_KERNELS_QUOTE_(...) #__VA_ARGS__
#define XLNET_KERNELS_QUOTE(...) XLNET_KERNELS_QUOTE_(__VA_ARGS__)

#define DIFFERENTIABLE_INPUTS(_, SEPARATOR)                                  \
  _(Tensor, query) SEPARATOR _(Tensor, key)                                  \
  SEPARATOR _(Tensor, value)                                                 \
  SEPARATOR _(Tensor, rel_key)                                               \
  SEPARATOR                                                                  \
  _(OptionalTensor, content_bias) SEPARATOR _(OptionalTensor, position_bias) \
  SEPARATOR                                                                  \
  _(OptionalTensor, memory_key) SEPARATOR _(OptionalTensor, memory_value)    \
  SEPARATOR                                                                  \
  _(OptionalTensor, segment_embed) SEPARATOR _(OptionalTensor, segment_bias)
#define OTHER_INPUTS(_, SEPARATOR)                                      \
  _(OptionalTensor, query_ids) SEPARATOR _(OptionalTensor, key_ids)     \
  SEPARATOR                                                             \
  _(OptionalTensor, query_rank) SEPARATOR _(OptionalTensor, key_rank)   \
  SEPARATOR                                                             \
  _(OptionalTensor, query_floor) SEPARATOR _(OptionalTensor, sees_self) \
  SEPARATOR                                                             \
  _(OptionalTensor, mask) SEPARATOR _(OptionalTensor, query_positions)  \
  SEPARATOR                                                             \
  _(OptionalTensor, query_order) SEPARATOR _(OptionalTensor, dropout_state)
#define NUMBERS(_, SEPARATOR)                           \
  _(int64_t, max_distance) SEPARATOR                    \
  _(double, dropout_p) SEPARATOR _(double, scale)       \
  SEPARATOR                                             \
  _(bool, deterministic) SEPARATOR _(int64_t, float32_precision)

#define COMMA ,
#define FIELD(type, name) type name;
#define ONE(type, name) +1

namespace xlnet_kernels {

constexpr size_t DIFFERENTIABLE = DIFFERENTIABLE_INPUTS(ONE, ), TENSORS = DIFFERENTIABLE OTHER_INPUTS(ONE, );

struct Numbers {
  NUMBERS(FIELD, )
};

// How far products of float32 may be rounded, as torch's fp32_precision has it
enum Float32Precision : int64_t { IEEE, TF32, BF16 };

// Which gradients are asked for, as autograd says it
struct Needs {
#define NEED(type, name) bool name;
  DIFFERENTIABLE_INPUTS(NEED, )
#undef NEED
};

}  // namespace xlnet_kernels

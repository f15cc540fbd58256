// The kernels of one instruction set (instruction_set.h): which of them serves a call.
#pragma once

#include "backward.h"
#include "bfloat16/backward.h"
#include "bfloat16/emulated.h"
#include "bfloat16/forward.h"
#include "bfloat16/products.h"
#include "dropout.h"
#include "few_rows.h"
#include "few_rows_backward.h"
#include "forward.h"
#include "kernels.h"

namespace xlnet_kernels::cpu {
namespace NAMESPACE {
namespace {

// Minima, because smaller calls lose more time by packing than their products gain
constexpr int64_t MIN_ROWS_OF_PARTS = 64, MIN_KEYS_OF_PARTS = 256;

// Whether operands of products are bfloat16, as stored, rounded or in parts
static bool takes_bfloat16(const RelAttention& p, const Products* products) {
  if (products == nullptr) return false;
  if (p.operand_parts == 2)
    return products->are_faster_in_parts && p.length >= MIN_ROWS_OF_PARTS && p.mem_len + p.key_len >= MIN_KEYS_OF_PARTS;
  return p.dtype == DType::bfloat16 || p.operand_parts == 1;
}

static bool forward(const RelAttention& p, const Products* products, int64_t threads, Parallel parallel) {
  if (has_few_rows(p))
    return p.dtype == DType::float64 ? few_rows_forward_as<double>(p, threads, parallel)
                                     : few_rows_forward_as<float>(p, threads, parallel);
  if (p.dtype == DType::float64) return forward_as<double>(p, threads, parallel);
  if (takes_bfloat16(p, products)) return bfloat16_forward(p, *products, threads, parallel);
  return forward_as<float>(p, threads, parallel);
}

static bool backward(const RelAttention& p, const RelAttentionGradients& g, const Products* products, int64_t threads,
                     Parallel parallel) {
  if (has_few_rows(p) && p.mem_len + p.key_len <= KEY_GROUP)  // of many keys, sums over rows take the time
    return p.dtype == DType::float64 ? few_rows_backward_as<double>(p, g, threads, parallel)
                                     : few_rows_backward_as<float>(p, g, threads, parallel);
  if (p.dtype == DType::float64) return backward_as<double>(p, g, threads, parallel);
  if (takes_bfloat16(p, products)) return bfloat16_backward(p, g, *products, threads, parallel);
  return backward_as<float>(p, g, threads, parallel);
}

}  // namespace
}  // namespace NAMESPACE

extern const Kernels KERNELS = {INSTANCE_NAME, NAMESPACE::forward, NAMESPACE::backward, NAMESPACE::drop_out,
                                &NAMESPACE::emulated_products};

}  // namespace xlnet_kernels::cpu

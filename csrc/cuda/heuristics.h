// Which kernels a call runs on: the tables, which `python -m xlnet_kernels.info` prints. No CUDA, no torch.
#pragma once

#include <string_view>

#include "kernels.h"

namespace xlnet_kernels::cuda {

// Whether this build has code for sm_90a; setup.py says what it compiles for.
inline constexpr bool compiled_for_sm90a() {
#ifdef XLNET_KERNELS_CUDA_ARCHITECTURES
#define XLNET_KERNELS_TEXT_(...) #__VA_ARGS__
#define XLNET_KERNELS_TEXT(...) XLNET_KERNELS_TEXT_(__VA_ARGS__)
  return std::string_view(XLNET_KERNELS_TEXT(XLNET_KERNELS_CUDA_ARCHITECTURES)).find("9.0a") != std::string_view::npos;
#else
  return false;
#endif
}

// Whether query rows are likely to be sorted between content rows, each at the position of the row before it or one
// further: there are more rows than positions. The warpgroup kernels are right for all others, but go to the keys once
// for each run of rows that are close.
inline constexpr bool positions_are_close(const RelAttention& p) {
  return p.rows.position == nullptr || p.length > p.key_len;
}

// Whether the warpgroup kernels can serve anything of this call.
inline constexpr bool warpgroups_serve(const Call& call, int capability) {
  const RelAttention& p = call.p;
  return compiled_for_sm90a() && capability == 90 && (p.dtype == DType::float16 || p.dtype == DType::bfloat16) &&
         (p.head_dim == 64 || p.head_dim == 128);
}

// By count a multiprocessor goes through keys up to 2.6 times as fast with the kernels of sm_90a
// (docs/notebook/cuda.md), and what blocks have found has to be merged.
constexpr int SPLITS_THAT_PAY = 8;

struct Choice {
  const char *kernels, *calls;
  bool (*serves)(const Call& call, int capability);  // of the device: 90 is sm_90
};

// The first that serves the call.
inline constexpr Choice FORWARD_CHOICES[] = {
    {"sm_90a",
     "float16 and bfloat16, head_dim 64 and 128, no query_positions or more rows than keys, keys not split by 8, on "
     "sm_90",
     [](const Call& call, int capability) {
       return warpgroups_serve(call, capability) && positions_are_close(call.p) && call.splits < SPLITS_THAT_PAY;
     }},
    {"sm_80", "all others", [](const Call&, int) { return true; }},
};
inline constexpr Choice BACKWARD_CHOICES[] = {
    {"sm_90a", "float16 and bfloat16, head_dim 64 and 128, no query_positions or more rows than keys, on sm_90",
     [](const Call& call, int capability) {
       return warpgroups_serve(call, capability) && positions_are_close(call.p);
     }},
    {"sm_80", "all others", [](const Call&, int) { return true; }},
};
constexpr int WARPGROUPS = 0;  // the tables' first row

inline int choose(const Choice* choices, const Call& call, int capability) {
  int choice = 0;
  while (!choices[choice].serves(call, capability)) ++choice;
  return choice;
}

}  // namespace xlnet_kernels::cuda

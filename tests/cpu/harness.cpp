// The CPU kernels as a program without torch, for processors that torch is not built for here and compilers that it was
// not built with. It says which kernels it has chosen, then answers calls from its input, as harness.py writes them.

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "cpu/bfloat16/products.h"
#include "cpu/kernels.h"

using namespace xlnet_kernels;

namespace {

void run_in_threads(int64_t slots, void (*task)(void*, int64_t), void* context) {
  std::vector<std::thread> threads;
  for (int64_t slot = 1; slot < slots; ++slot) threads.emplace_back(task, context, slot);
  task(context, 0);
  for (std::thread& thread : threads) thread.join();
}

void fail(const char* reason) {
  std::fprintf(stderr, "%s\n", reason);
  std::exit(1);
}

// Memory of just the size, so that sanitizers see what lies outside of it
struct Buffers {
  std::vector<std::unique_ptr<char[]>> kept;

  char* take(int64_t bytes) {
    kept.emplace_back(new char[static_cast<size_t>(bytes)]);
    return kept.back().get();
  }
};

struct Input {
  Buffers& buffers;

  void read(void* to, int64_t bytes) {
    if (std::fread(to, 1, static_cast<size_t>(bytes), stdin) != static_cast<size_t>(bytes))
      fail("the input ends early");
  }
  template <typename T = int64_t>
  T number() {
    T x;
    read(&x, sizeof(x));
    return x;
  }
  // Bytes of -1 say that there is no such tensor.
  Tensor4 tensor() {
    Tensor4 t;
    read(t.stride, sizeof(t.stride));
    const int64_t bytes = number();
    if (bytes < 0) return {};
    t.data = buffers.take(bytes);
    read(t.data, bytes);
    return t;
  }
  template <typename T = void>
  T* data() {
    return static_cast<T*>(tensor().data);
  }
};

void write(const void* data, int64_t bytes) { std::fwrite(data, 1, static_cast<size_t>(bytes), stdout); }

RelAttention read_inputs(Input& input) {
  RelAttention p{};
  p.dtype = static_cast<DType>(input.number());
  for (int64_t* size : {&p.batch, &p.heads, &p.length, &p.key_len, &p.mem_len, &p.rel_len, &p.head_dim})
    *size = input.number();
  p.rel_key.max_distance = input.number();
  const double dropout_p = input.number<double>();
  p.scale = input.number<double>();
  for (Tensor4* t : {&p.rows.query, &p.keys.key, &p.keys.value, &p.rel_key.rows}) *t = input.tensor();
  p.content_bias = input.data();
  p.position_bias = input.data();
  for (Tensor4* t : {&p.memory.key, &p.memory.value}) *t = input.tensor();
  p.segments.embed = input.data();
  p.segments.bias = input.data();
  for (const int32_t** t : {&p.segments.query_ids, &p.segments.key_ids, &p.rank_mask.query_rank, &p.rank_mask.key_rank,
                            &p.rank_mask.query_floor})
    *t = input.data<const int32_t>();
  p.rank_mask.sees_self = input.data<const bool>();
  p.mask = input.tensor();
  p.rows.position = input.data<const int32_t>();
  p.rows.order = input.data<const int32_t>();
  p.dropout = {dropout_p, input.data<const int64_t>()};
  return p;
}

// Contiguous, of the sizes that Python says
Tensor4 output(Input& input, Buffers& buffers, std::vector<std::pair<void*, int64_t>>& outputs) {
  Tensor4 t;
  input.read(t.stride, sizeof(t.stride));
  const int64_t bytes = input.number();
  if (bytes < 0) return {};
  t.data = buffers.take(bytes);
  input.read(t.data, bytes);  // the kernels add to some gradients
  outputs.emplace_back(t.data, bytes);
  return t;
}

void answer(bool is_backward, const cpu::Choice& chosen) {
  Buffers buffers;
  Input input{buffers};
  const int64_t threads = input.number();
  RelAttention p = read_inputs(input);
  std::vector<std::pair<void*, int64_t>> outputs;
  const auto next = [&] { return output(input, buffers, outputs); };
  bool ran;
  if (!is_backward) {
    p.out = next();
    p.lse = next().data;
    p.row_max = next().data;
    p.row_sum = next().data;
    p.out_residual = next();
    ran = chosen.kernels->forward(p, chosen.products, threads, run_in_threads);
  } else {
    RelAttentionGradients g{};
    g.out = input.tensor();
    g.lse = input.data();
    p.out = input.tensor();
    p.out_residual = input.tensor();
    p.row_max = input.data();
    p.row_sum = input.data();
    for (Tensor4* t : {&g.query, &g.keys.key, &g.keys.value, &g.rel_key}) *t = next();
    for (void** t : {&g.content_bias, &g.position_bias}) *t = next().data;
    for (Tensor4* t : {&g.memory.key, &g.memory.value}) *t = next();
    for (void** t : {&g.segment_embed, &g.segment_bias}) *t = next().data;
    ran = chosen.kernels->backward(p, g, chosen.products, threads, run_in_threads);
  }
  if (!ran) fail("out of memory");
  for (const auto& [data, bytes] : outputs) write(data, bytes);
  std::fflush(stdout);
}

}  // namespace

int main() {
  const cpu::Choice chosen = cpu::choose_kernels();
  if (chosen.name == nullptr) fail("XLNET_KERNELS_CPU names no instruction set that this processor has");
  std::printf("%s %s\n", chosen.kernels->name, chosen.products == nullptr ? "-" : chosen.products->name);
  std::fflush(stdout);
  for (int kind; (kind = std::getchar()) != EOF;) answer(kind == 'b', chosen);
}

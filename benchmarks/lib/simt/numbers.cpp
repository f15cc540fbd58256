#include "numbers.h"

#include "schedule.h"

namespace simt {

namespace {

constexpr int ROWS = 16, COLUMNS = 8;

typedef double Row __attribute__((vector_size(COLUMNS * sizeof(double))));

// Tensor cores truncate what they add up (Fasi et al. 2021); the products themselves are exact in double.
inline float truncate(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, 8);
  bits &= ~((uint64_t(1) << 29) - 1);
  std::memcpy(&x, &bits, 8);
  return float(x);
}

template <typename T, int DEPTH>
struct Tiles {
  T a[ROWS][DEPTH], b[DEPTH][COLUMNS];
};

// Register r of each fragment, by the PTX ISA. mma.m16n8k16 with numbers of 16 bits:
inline void gather(Tiles<uint16_t, 16>& tiles, const Fragments& lane, int g, int t) {
  for (int i = 0; i < 2; ++i) {
    for (int r = 0; r < 4; ++r) tiles.a[g + r % 2 * 8][2 * t + r / 2 * 8 + i] = uint16_t(lane.a[r] >> 16 * i);
    for (int r = 0; r < 2; ++r) tiles.b[2 * t + r * 8 + i][g] = uint16_t(lane.b[r] >> 16 * i);
  }
}

// mma.m16n8k8
inline void gather(Tiles<uint32_t, 8>& tiles, const Fragments& lane, int g, int t) {
  for (int r = 0; r < 4; ++r) tiles.a[g + r % 2 * 8][t + r / 2 * 4] = lane.a[r];
  for (int r = 0; r < 2; ++r) tiles.b[t + r * 4][g] = lane.b[r];
}

template <typename T, int DEPTH, typename ToFloat>
void mma(void* const* lanes, ToFloat to_float) {
  Tiles<T, DEPTH> stored;
  for (int lane = 0; lane < LANES; ++lane) gather(stored, *static_cast<Fragments*>(lanes[lane]), lane / 4, lane % 4);
  double a[ROWS][DEPTH];
  Row b[DEPTH];
  for (int row = 0; row < ROWS; ++row) {
    for (int k = 0; k < DEPTH; ++k) a[row][k] = to_float(stored.a[row][k]);
  }
  for (int k = 0; k < DEPTH; ++k) {
    for (int column = 0; column < COLUMNS; ++column) b[k][column] = to_float(stored.b[k][column]);
  }
  for (int row = 0; row < ROWS; ++row) {
    Row sums = {};
    for (int k = 0; k < DEPTH; ++k) sums += a[row][k] * b[k];
    for (int column = 0; column < COLUMNS; ++column) {
      const int lane = row % 8 * 4 + column / 2;
      float& sum = static_cast<Fragments*>(lanes[lane])->sum[row / 8 * 2 + column % 2];
      sum = truncate(double(sum) + sums[column]);
    }
  }
}

}  // namespace

void mma_half(void* const* lanes) {
  mma<uint16_t, 16>(lanes, [](uint16_t number) { return F16::get(number); });
}
void mma_bfloat16(void* const* lanes) {
  mma<uint16_t, 16>(lanes, [](uint16_t number) { return Bf16::get(number); });
}
// The hardware does not look at the lower bits.
void mma_tf32(void* const* lanes) {
  mma<uint32_t, 8>(lanes, [](uint32_t word) { return machine::tf32(as_float(word)); });
}

}  // namespace simt

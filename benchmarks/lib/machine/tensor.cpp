// ldmatrix, stmatrix, movmatrix and mma.sync.

#include "tensor.h"

#include "memory.h"
#include "numbers.h"
#include "shadow.h"

namespace machine {
namespace {

int bits_of(Element element) {
  return element == Element::Tf32 ? 32 : element == Element::Int8 || element == Element::UInt8 ? 8 : 16;
}

// Number `part` of the register of each lane.
void numbers_of(const uint32_t* from, Element element, int part, float* into) {
  const int shift = part * bits_of(element) % 32;
  const auto each = [&](auto value) {
    for (int lane = 0; lane < LANES; ++lane) into[lane] = value(from[lane] >> shift);
  };
  if (element == Element::Half) return each([](uint32_t bits) { return F16::get(bits); });
  if (element == Element::Brain) return each([](uint32_t bits) { return Bf16::get(bits); });
  each([element](uint32_t bits) { return element_value(element, bits); });
}

void read_columns(Warp& warp, const Ref* refs, int count, Element element, int columns, float* into) {
  const int per = 32 / bits_of(element);
  float numbers[LANES];
  for (int reg = 0; reg < count; ++reg) {
    for (int j = 0; j < per; ++j) {
      numbers_of(warp.at<uint32_t>(refs[reg]), element, j, numbers);
      for (int lane = 0; lane < LANES; ++lane)
        into[(reg * 4 * per + lane % 4 * per + j) * columns + lane / 4] = numbers[lane];
    }
  }
}

// Sums of integers wrap; they are exact as long as float's bits hold them, which 32 products of 8 bits do.
void multiply_integers(Warp& warp, const Inst& inst, const float* a, const float* b, const Ref* d, const Ref* c) {
  for (int reg = 0; reg < 4; ++reg) {
    const uint32_t* from = warp.at<uint32_t>(c[reg]);
    uint32_t out[LANES];
    for (int lane = 0; lane < LANES; ++lane) {
      const int row = lane / 4 + reg / 2 * 8, column = lane % 4 * 2 + reg % 2;
      float total = 0;
      for (int k = 0; k < inst.extent[2]; ++k) total += a[row * inst.extent[2] + k] * b[k * 8 + column];
      out[lane] = from[lane] + static_cast<int32_t>(total);
    }
    std::memcpy(warp.at<uint32_t>(d[reg]), out, sizeof out);
  }
}

// m8n8k4: one number of a and b, two sums a lane; fused, in order of k.
void multiply_doubles(Warp& warp, const Inst& inst) {
  double out[2][LANES];
  const double *a = warp.at<double>(inst.refs[2]), *b = warp.at<double>(inst.refs[3]);
  for (int reg = 0; reg < 2; ++reg) {
    const double* c = warp.at<double>(inst.refs[4 + reg]);
    for (int lane = 0; lane < LANES; ++lane) {
      out[reg][lane] = c[lane];
      for (int k = 0; k < 4; ++k)
        out[reg][lane] = std::fma(a[lane / 4 * 4 + k], b[(lane % 4 * 2 + reg) * 4 + k], out[reg][lane]);
    }
  }
  for (int reg = 0; reg < 2; ++reg) std::memcpy(warp.at<double>(inst.refs[reg]), out[reg], sizeof out[reg]);
}

struct Matrices {  // the rows of 16 bytes that ldmatrix and stmatrix move
  Access access;

  Matrices(Warp& warp, const Inst& inst, size_t base, const uint8_t (*writes)[64]) {
    aligned(warp, writes ? "stmatrix" : "ldmatrix");
    if (warp.exec != ALL) throw Fault{"divergence", "a warp of fewer than 32 lanes moves matrices", -1};
    access.bytes = 16;
    access.writes = writes;
    access.data = writes;
    access.space = Space::Shared;
    addresses(warp, inst, base, access);
    const bool generic = access.address[0] >= SHARED_WINDOW;
    if (generic)
      for (uint64_t& address : access.address) address -= SHARED_WINDOW;
    warp.exec = inst.count == 4 ? ALL : (1u << 8 * inst.count) - 1;
    locate(warp, access);
    warp.exec = ALL;
  }
};

}  // namespace

void read_rows(Warp& warp, const Ref* refs, int count, Element element, int depth, float* into) {
  const int per = 32 / bits_of(element);
  float numbers[LANES];
  for (int reg = 0; reg < count; ++reg) {
    for (int j = 0; j < per; ++j) {
      numbers_of(warp.at<uint32_t>(refs[reg]), element, j, numbers);
      for (int lane = 0; lane < LANES; ++lane)
        into[(lane / 4 + reg % 2 * 8) * depth + reg / 2 * 4 * per + lane % 4 * per + j] = numbers[lane];
    }
  }
}

void read_sums(Warp& warp, const Ref* refs, bool half, int columns, float* into) {
  for (int reg = 0; reg < columns / (half ? 4 : 2); ++reg) {
    const uint32_t* from = warp.at<uint32_t>(refs[reg]);
    for (int lane = 0; lane < LANES; ++lane) {
      const int row = lane / 4 + (half ? reg % 2 : reg / 2 % 2) * 8;
      const int column = reg / (half ? 2 : 4) * 8 + lane % 4 * 2;
      float* to = into + row * columns + column;
      if (half) to[0] = F16::get(from[lane]), to[1] = F16::get(from[lane] >> 16);
      if (!half) to[reg % 2] = as_float(from[lane]);
    }
  }
}

void write_sums(Warp& warp, const Ref* refs, bool half, int columns, const float* sums) {
  for (int reg = 0; reg < columns / (half ? 4 : 2); ++reg) {
    uint32_t* into = warp.at<uint32_t>(refs[reg]);
    for (int lane = 0; lane < LANES; ++lane) {
      const int row = lane / 4 + (half ? reg % 2 : reg / 2 % 2) * 8;
      const int column = reg / (half ? 2 : 4) * 8 + lane % 4 * 2;
      const float* from = sums + row * columns + column;
      into[lane] = half ? F16::make(from[0]) | static_cast<uint32_t>(F16::make(from[1])) << 16 : as_bits(from[reg % 2]);
    }
  }
}

// refs: d, a, b, c; extent: rows, columns, depth; mode: Element; count, size, bits: registers of a, b, d
void multiply_matrices(Warp& warp, const Inst& inst) {
  aligned(warp, "mma.sync");
  if (warp.exec != ALL) throw Fault{"divergence", "mma.sync in a warp of fewer than 32 lanes", -1};
  const Element element = static_cast<Element>(inst.mode);
  if (element == Element::Double) return multiply_doubles(warp, inst);
  const int columns = inst.extent[1], depth = inst.extent[2];
  const Ref *d = inst.refs.data(), *a = d + inst.bits, *b = a + inst.count, *c = b + inst.size;
  alignas(64) float rows[16 * 64], across[64 * 8], sums[16 * 8];
  read_rows(warp, a, inst.count, element, depth, rows);
  read_columns(warp, b, inst.size, element, columns, across);
  if (element == Element::Int8 || element == Element::UInt8) return multiply_integers(warp, inst, rows, across, d, c);
  const bool half = inst.bits == 2;
  read_sums(warp, c, half, columns, sums);
  multiply(rows, across, sums, 16, columns, depth,
           accumulation(warp.launch->architecture, bits_of(element), warp.launch->round_to_nearest));
  write_sums(warp, d, half, columns, sums);
}

// refs: registers, address; mode 1: transposed
void load_matrix(Warp& warp, const Inst& inst) {
  const Matrices from(warp, inst, inst.count, nullptr);
  for (int matrix = 0; matrix < inst.count; ++matrix) {
    uint16_t values[8][8];
    for (int row = 0; row < 8; ++row) std::memcpy(values[row], from.access.pointer[matrix * 8 + row], 16);
    uint32_t* into = warp.at<uint32_t>(inst.refs[matrix]);
    for (int lane = 0; lane < LANES; ++lane) {
      const int i = lane / 4, j = lane % 4 * 2;
      into[lane] = inst.mode ? values[j][i] | static_cast<uint32_t>(values[j + 1][i]) << 16
                             : values[i][j] | static_cast<uint32_t>(values[i][j + 1]) << 16;
    }
  }
}

void store_matrix(Warp& warp, const Inst& inst) {
  uint8_t rows[LANES][64];
  for (int matrix = 0; matrix < inst.count; ++matrix) {
    const uint32_t* from = warp.at<uint32_t>(inst.refs[matrix]);
    for (int lane = 0; lane < LANES; ++lane) {
      for (int half = 0; half < 2; ++half) {
        const int i = lane / 4, j = lane % 4 * 2 + half;
        const uint16_t value = from[lane] >> (16 * half);
        std::memcpy(rows[matrix * 8 + (inst.mode ? j : i)] + 2 * (inst.mode ? i : j), &value, 2);
      }
    }
  }
  const Matrices into(warp, inst, inst.count, rows);
  for (int row = 0; row < 8 * inst.count; ++row) std::memcpy(into.access.pointer[row], rows[row], 16);
}

// movmatrix.trans: an 8 x 8 matrix in one register of each lane, transposed
void move_matrix(Warp& warp, const Inst& inst) {
  aligned(warp, "movmatrix");
  uint16_t values[8][8];
  const uint32_t* from = warp.at<uint32_t>(inst.refs[1]);
  for (int lane = 0; lane < LANES; ++lane)
    for (int half = 0; half < 2; ++half) values[lane / 4][lane % 4 * 2 + half] = from[lane] >> (16 * half);
  uint32_t* into = warp.at<uint32_t>(inst.refs[0]);
  for (int lane = 0; lane < LANES; ++lane)
    into[lane] = values[lane % 4 * 2][lane / 4] | static_cast<uint32_t>(values[lane % 4 * 2 + 1][lane / 4]) << 16;
}

}  // namespace machine

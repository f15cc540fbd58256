// wgmma: products of four warps whose operands lie in shared memory, under way until they are waited for.

#include "async.h"
#include "memory.h"
#include "numbers.h"
#include "tensor.h"
#include "undefined.h"

namespace machine {
namespace {

// PTX ISA, "Matrix descriptor": where a matrix of shared memory begins and how it goes on.
struct Descriptor {
  uint64_t start, leading, stride;
  int swizzle;  // bytes of a row of the pattern: 16 (none), 32, 64 or 128

  explicit Descriptor(uint64_t bits)
      : start((bits & 0x3fff) << 4), leading((bits >> 16 & 0x3fff) << 4), stride((bits >> 32 & 0x3fff) << 4) {
    const int widths[] = {16, 128, 64, 32};
    swizzle = widths[bits >> 62];
    if (bits >> 49 & 7)
      throw Fault{"undefined", "a matrix descriptor with a base offset, which the machine does not know", -1};
  }

  // The address of 16 bytes that hold neighbours along K (or along M or N, if transposed) from (row, depth) on; row counts along
  // M or N. `bytes` of one number.
  uint64_t address(int row, int depth, int bytes, bool transposed) const {
    const int per = 16 / bytes, wide = swizzle / bytes;
    uint64_t at = start;
    if (!transposed) {
      at += row / 8 * stride + row % 8 * swizzle;
      at += swizzle == 16 ? depth / per * leading : depth / per * 16;
    } else if (swizzle == 16) {
      at += row / per * stride + depth % 8 * 16 + depth / 8 * leading;
    } else {
      at += row / wide * leading + row % wide * bytes + depth % 8 * swizzle + depth / 8 * stride;
    }
    // Bits 4, 5 and 6 are exchanged with the row's number within the pattern, as many as its width has.
    return at ^ ((at >> 7 & (swizzle / 16 - 1)) << 4);
  }
};

struct Reader {
  Warp& warp;
  Element element;
  bool negated, transposed, undefined = false;

  // Numbers of a matrix: into[row * row_step + depth * depth_step].
  void read(const Descriptor& from, int first_row, int rows, int depth, float* into, int row_step, int depth_step) {
    const int bytes = element == Element::Tf32 ? 4 : 2, per = 16 / bytes;
    const int row_by = transposed ? per : 1, depth_by = transposed ? 1 : per;
    for (int row = 0; row < rows; row += row_by) {
      for (int k = 0; k < depth; k += depth_by) {
        const uint64_t address = from.address(first_row + row, k, bytes, transposed);
        const uint8_t* data = shared_range(warp, address, 16, 16, -1);
        if (warp.block->shadow) {
          warp.block->shadow->begin_operand(warp, address, 16);
          undefined |= warp.block->shadow->is_undefined(address, 16);
          operands().push_back({address, 16});
        }
        for (int i = 0; i < per; ++i) {
          uint32_t bits = 0;
          std::memcpy(&bits, data + i * bytes, bytes);
          const float value = element_value(element, bits);
          into[(row + (transposed ? i : 0)) * row_step + (k + (transposed ? 0 : i)) * depth_step] =
              negated ? -value : value;
        }
      }
    }
  }

  std::vector<Operand16>& operands() { return async_of(warp).wgmma_open.shared; }
};

// Passes through the banks, 128 bytes each and none colliding: each warp reads its rows of a, one of four all of b.
void count_operands(Warp& warp, const Inst& inst) {
  uint64_t& passes = warp.launch->totals.shared_wavefronts;
  if (inst.count == 1) passes += 16 * 32 / 128;
  if (warp.index % 4 == 0) passes += inst.extent[1] * 32 / 128;
}

void complete(Warp& warp, WgmmaGroup& group) {
  if (warp.block->shadow)
    for (const Operand16& of : group.shared) warp.block->shadow->end_operand(of.address, of.bytes);
  for (Ref ref : group.registers) --warp.in_flight[ref / 128];
  --warp.flights;
}

// PTX ISA, wgmma.fence: it stands between other writes of a register and a wgmma with it. All registers count as
// written before a warp's first fence.
void check_fence(const Warp& warp, Ref ref) {
  if (ref >= 0 && warp.launch->check && warp.written[ref / 128] == warp.fences)
    throw Fault{"in_flight", "wgmma uses a register that was written since the last wgmma.fence", -1};
}

void mark(Warp& warp, Ref ref) {
  if (ref < 0) return;
  WgmmaGroup& open = async_of(warp).wgmma_open;
  ++warp.in_flight[ref / 128];
  open.registers.push_back(ref);
}

}  // namespace

bool reads_sums(Warp& warp, const Inst& inst) { return *warp.at<uint32_t>(inst.refs.back()) & warp.exec; }

// refs: sums (as many as value), a's registers or descriptor, b's descriptor, predicate to keep the sums
void wgmma_multiply(Warp& warp, const Inst& inst) {
  aligned(warp, "wgmma");
  if (warp.exec != ALL) throw Fault{"divergence", "wgmma in a warp of fewer than 32 lanes", -1};
  WarpAsync& own = async_of(warp);
  const Element element = static_cast<Element>(inst.mode);
  const int columns = inst.extent[1], depth = inst.extent[2];
  const Ref *sums = inst.refs.data(), *a = sums + inst.value, *b = a + inst.count;
  if (own.wgmma_open.empty()) ++warp.flights;
  alignas(64) float rows[16 * 16], across[16 * 256], total[16 * 256];
  const bool negate_a = inst.size & 1, negate_b = inst.size & 2, transpose_a = inst.size & 4,
             transpose_b = inst.size & 8;
  if (inst.count == 4) {
    read_rows(warp, a, 4, element, depth, rows);
    for (int i = 0; i < 16 * depth && negate_a; ++i) rows[i] = -rows[i];
    for (int i = 0; i < 4; ++i) {
      check_fence(warp, a[i]);
      mark(warp, a[i]);
    }
  } else {
    const Descriptor from(*warp.at<uint64_t>(a[0]));
    Reader reader{warp, element, negate_a, transpose_a};
    reader.read(from, warp.index % 4 * 16, 16, depth, rows, depth, 1);
    if (reader.undefined) undefined_operand(warp, inst);
  }
  const Descriptor from(*warp.at<uint64_t>(b[0]));
  count_operands(warp, inst);
  Reader reader{warp, element, negate_b, transpose_b};
  reader.read(from, 0, columns, depth, across, 1, columns);
  if (reader.undefined) undefined_operand(warp, inst);
  if (reads_sums(warp, inst)) {
    read_sums(warp, sums, inst.bits, columns, total);
  } else {
    std::fill(total, total + 16 * columns, 0.f);
  }
  multiply(rows, across, total, 16, columns, depth,
           accumulation(warp.launch->architecture, element == Element::Tf32 ? 32 : 16, warp.launch->round_to_nearest));
  write_sums(warp, sums, inst.bits, columns, total);
  for (int i = 0; i < inst.value; ++i) {
    check_fence(warp, sums[i]);
    mark(warp, sums[i]);
  }
}

void wgmma_fence(Warp& warp, const Inst&) {
  aligned(warp, "wgmma.fence");
  ++warp.fences;
}

void wgmma_commit(Warp& warp, const Inst&) {
  aligned(warp, "wgmma.commit_group");
  WarpAsync& own = async_of(warp);
  if (own.wgmma_open.empty()) ++warp.flights;  // a group of none
  own.wgmma_groups.push_back(std::move(own.wgmma_open));
  own.wgmma_open = WgmmaGroup();
}

void wgmma_wait(Warp& warp, const Inst& inst) {
  aligned(warp, "wgmma.wait_group");
  auto& groups = async_of(warp).wgmma_groups;
  for (; groups.size() > static_cast<size_t>(inst.value); groups.pop_front()) complete(warp, groups.front());
}

// Registers of a wgmma that is under way: only wgmma itself may name them. A copy of one, as compilers place around
// inline assembly, is under way with it: the assembler gives both the same register.
void check_flight(Warp& warp, const Inst& inst) {
  if (inst.run == wgmma_multiply || inst.run == wgmma_commit || inst.run == wgmma_wait || !warp.launch->check) return;
  bool touches = false;
  for (const auto& [ref, bytes] : inst.accesses) touches |= ref >= 0 && warp.in_flight[ref / 128];
  if (!touches) return;
  if (inst.kind == Class::Move && inst.refs.size() == 2 && inst.refs[1] >= 0 && warp.in_flight[inst.refs[1] / 128])
    return mark_copy(warp, inst.refs[0]);
  throw Fault{"in_flight", "a register is used while wgmma is under way with it", -1};
}

// A copy counts as written when its source was.
void note_writes(Warp& warp, const Inst& inst) {
  if (inst.run == wgmma_multiply) return;
  const bool copies = inst.kind == Class::Move && inst.refs.size() == 2 && inst.refs[1] >= 0;
  for (Ref ref : inst.results) {
    uint32_t& written = warp.written[ref / 128];
    const uint32_t own = copies ? warp.written[inst.refs[1] / 128] : warp.fences;
    written = warp.exec == ALL ? own : std::max(written, own);
  }
}

// The copy is under way as long as the last group.
void mark_copy(Warp& warp, Ref ref) {
  WarpAsync& own = async_of(warp);
  ++warp.in_flight[ref / 128];
  (own.wgmma_open.empty() && !own.wgmma_groups.empty() ? own.wgmma_groups.back() : own.wgmma_open)
      .registers.push_back(ref);
}

}  // namespace machine

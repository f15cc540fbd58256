// atom and red: one lane after another, on global and shared memory.

#include "memory.h"
#include "numbers.h"

namespace machine {
namespace {

enum Operation { ADD, MIN, MAX, AND, OR, XOR, INC, DEC, EXCH, CAS };
enum Type { U32, S32, U64, S64, F32, F64, HALF, BRAIN, HALF2, BRAIN2, B32, B64, B16 };

template <class T>
T integers(int operation, T old, T a, T b) {
  switch (operation) {
    case ADD:
      return static_cast<std::make_unsigned_t<T>>(old) + a;
    case MIN:
      return a < old ? a : old;
    case MAX:
      return a > old ? a : old;
    case AND:
      return old & a;
    case OR:
      return old | a;
    case XOR:
      return old ^ a;
    case INC:
      return old >= a ? 0 : old + 1;
    case DEC:
      return old == 0 || old > a ? a : old - 1;
    case EXCH:
      return a;
    default:
      return old == a ? b : old;
  }
}

template <class T>
T reals(int operation, T old, T a) {
  if (operation == ADD) return old + a;
  if (operation == MIN) return std::fmin(old, a);
  return operation == MAX ? std::fmax(old, a) : a;
}

template <class Half>
uint32_t halves(int operation, uint32_t old, uint32_t a, int count) {
  uint32_t result = 0;
  for (int part = 0; part < count; ++part) {
    const int shift = 16 * part;
    result |= static_cast<uint32_t>(Half::make(reals<float>(operation, Half::get(old >> shift), Half::get(a >> shift))))
              << shift;
  }
  return result;
}

double as_double(uint64_t bits) {
  double value;
  std::memcpy(&value, &bits, 8);
  return value;
}

uint64_t changed(int operation, int type, uint64_t old, uint64_t a, uint64_t b) {
  switch (type) {
    case U32:
    case B32:
      return integers<uint32_t>(operation, old, a, b);
    case S32:
      return static_cast<uint32_t>(integers<int32_t>(operation, old, a, b));
    case U64:
    case B64:
      return integers<uint64_t>(operation, old, a, b);
    case S64:
      return integers<int64_t>(operation, old, a, b);
    case B16:
      return integers<uint16_t>(operation, old, a, b);
    case F32:
      return as_bits(reals<float>(operation, as_float(old), as_float(a)));
    case HALF:
      return halves<F16>(operation, old, a, 1);
    case HALF2:
      return halves<F16>(operation, old, a, 2);
    case BRAIN:
      return halves<Bf16>(operation, old, a, 1);
    case BRAIN2:
      return halves<Bf16>(operation, old, a, 2);
    default: {
      const double result = reals<double>(operation, as_double(old), as_double(a));
      uint64_t bits;
      std::memcpy(&bits, &result, 8);
      return bits;
    }
  }
}

struct Lanes {  // what an instruction does, apart from the warp: it may happen later
  int operation, type, size, count;
  uint32_t exec;
  uint8_t* pointer[LANES];
  uint64_t a[LANES][8], b[LANES];
  uint64_t old[LANES][8];

  void apply() {
    for (int lane = 0; lane < LANES; ++lane) {
      for (int part = 0; part < count && (exec >> lane & 1); ++part) {
        uint64_t now = 0;
        std::memcpy(&now, pointer[lane] + part * size, size);
        old[lane][part] = now;
        now = changed(operation, type, now, a[lane][part], b[lane]);
        std::memcpy(pointer[lane] + part * size, &now, size);
      }
    }
  }
};

uint64_t contents(Warp& warp, const Inst& inst, size_t ref, int lane) {
  return inst.bits == 64 ? warp.at<uint64_t>(inst.refs[ref])[lane] : warp.at<uint32_t>(inst.refs[ref])[lane];
}

void atomic(Warp& warp, const Inst& inst, Space space, bool generic) {
  const int returned = inst.extent[2] ? inst.count : 0;
  if (inst.releases) flush(warp);
  Access access;
  access.bytes = inst.size * inst.count;
  access.writes = access.atomic = true;
  access.space = space;
  addresses(warp, inst, returned, access);
  generic ? locate_generic(warp, access) : locate(warp, access);
  auto lanes = std::make_shared<Lanes>();
  lanes->operation = inst.mode;
  lanes->type = inst.extent[1];
  lanes->size = inst.size;
  lanes->count = inst.count;
  lanes->exec = warp.exec;
  std::copy(access.pointer, access.pointer + LANES, lanes->pointer);
  for (int lane = 0; lane < LANES; ++lane) {
    for (int part = 0; part < inst.count; ++part)
      lanes->a[lane][part] = contents(warp, inst, returned + 1 + part, lane);
    lanes->b[lane] = inst.mode == CAS ? contents(warp, inst, returned + 1 + inst.count, lane) : 0;
  }
  if (!returned && space == Space::Global && !generic)
    return later(warp, access.low, access.high, [lanes] { lanes->apply(); });
  lanes->apply();
  for (int part = 0; part < returned; ++part) {
    for (int lane = 0; lane < LANES; ++lane) {
      if (!(warp.exec >> lane & 1)) continue;
      if (inst.bits == 64) warp.at<uint64_t>(inst.refs[part])[lane] = lanes->old[lane][part];
      if (inst.bits != 64) warp.at<uint32_t>(inst.refs[part])[lane] = lanes->old[lane][part];
    }
  }
}

}  // namespace

void reduce_global(Warp& warp, const Inst& inst) { atomic(warp, inst, Space::Global, false); }
void atomic_global(Warp& warp, const Inst& inst) { atomic(warp, inst, Space::Global, false); }
void atomic_shared(Warp& warp, const Inst& inst) { atomic(warp, inst, Space::Shared, false); }
void atomic_generic(Warp& warp, const Inst& inst) { atomic(warp, inst, Space::Global, true); }

}  // namespace machine

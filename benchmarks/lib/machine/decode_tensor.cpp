// Decoders of ldmatrix, mma and wgmma; the cycles that tensor cores take.

#include "decoder.h"
#include "tensor.h"

namespace machine {
namespace {

// Multiply-adds of one quarter of a multiprocessor's tensor cores in a cycle. A100 white paper: 1024 of 16 bits a
// multiprocessor, TF32 half, 8-bit twice as many, float64 64; H100 white paper: twice of each. mma.sync is slower there
// than wgmma: bounds.py adds the difference. GPUs other than these two are assumed to do half of A100's.
int64_t products_a_cycle(int architecture, int operand_bits) {
  const int64_t of_16_bits = architecture >= 90 ? 512 : architecture == 80 ? 256 : 128;
  return operand_bits == 64 ? of_16_bits / 16 : of_16_bits * 16 / operand_bits;
}

struct ElementName {
  const char* name;
  Element element;
  int bits;
};
constexpr ElementName ELEMENTS[] = {{"f16", Element::Half, 16},  {"bf16", Element::Brain, 16},
                                    {"tf32", Element::Tf32, 32}, {"s8", Element::Int8, 8},
                                    {"u8", Element::UInt8, 8},   {"f64", Element::Double, 64}};

const ElementName* element_named(const std::string& name) {
  for (const ElementName& element : ELEMENTS)
    if (name == element.name) return &element;
  return nullptr;
}

// Sizes of "m16n8k16".
bool shape(const std::string& word, int32_t* sizes) {
  return std::sscanf(word.c_str(), "m%dn%dk%d", &sizes[0], &sizes[1], &sizes[2]) == 3;
}

}  // namespace

// Notes the instruction's name for the counts, and the cycles it takes.
void Decoder::counts_as(const std::string& name) {
  const ElementName* element = element_named(name.substr(name.rfind('.') + 1));
  const int64_t rows = inst_->extent[0] == 64 ? 16 : inst_->extent[0];  // of a warp
  const int64_t cycles =
      rows * inst_->extent[1] * inst_->extent[2] / products_a_cycle(module_.architecture, element->bits);
  auto& names = program_.tensor_names;
  const auto found = std::find(names.begin(), names.end(), name);
  inst_->tensor_name = found - names.begin();
  if (found != names.end()) return;
  names.push_back(name);
  program_.tensor_cycles.push_back(std::max<int64_t>(cycles, 1));
}

// mma.sync.aligned.shape.row.col[.satfinite].d.a.b.c
void Decoder::decode_mma() {
  only({"sync", "aligned", "m16n8k4", "m16n8k8", "m16n8k16", "m16n8k32", "m8n8k4", "row", "col", "f16", "bf16", "tf32",
        "f32", "s8", "u8", "s32", "f64"});
  inst_->run = multiply_matrices;
  inst_->kind = Class::Product;
  const size_t words = parts_.size();
  const ElementName *a = element_named(parts_.at(words - 3)), *b = element_named(parts_.at(words - 2));
  if (!shape(parts_.at(3), inst_->extent) || !a || a != b || !has("row") || !has("col")) unknown();
  if ((inst_->extent[0] == 8) != (a->bits == 64)) unknown("of this shape");
  const auto count = [](const Operand& of) { return of.kind == Kind::Vector ? of.parts.size() : size_t(1); };
  const int bits = a->bits == 64 ? 64 : 32;
  for (int i = 0; i < 4; ++i) values(operand(i), bits);
  inst_->bits = count(operand(0));
  inst_->count = count(operand(1));
  inst_->size = count(operand(2));
  const size_t sums = parts_.at(words - 4) == "f16" ? 2 : a->bits == 64 ? 2 : 4;
  const int per = 32 / std::min(a->bits, 32);
  if (a->bits < 64 && (inst_->bits != sums || inst_->count * 4 * per != inst_->extent[2] * 2 ||
                       inst_->size * 4 * per != inst_->extent[2]))
    unknown("another number of registers");
  if (count(operand(3)) != inst_->bits || parts_.back() != parts_.at(words - 4)) unknown("sums of two types");
  inst_->mode = static_cast<uint8_t>(a->element);
  counts_as("mma." + parts_[3] + "." + a->name);
}

void Decoder::decode_matrix() {
  only({"sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b16"});
  inst_->mode = has("trans");
  inst_->kind = Class::Shared;
  if (parts_[0] == "movmatrix") {
    inst_->run = move_matrix;
    inst_->kind = Class::Shuffle;
    inst_->refs = {value(operand(0), 32), value(operand(1), 32)};
    return;
  }
  const bool loads = parts_[0] == "ldmatrix";
  inst_->run = loads ? load_matrix : store_matrix;
  inst_->count = has("x4") ? 4 : has("x2") ? 2 : 1;
  values(operand(loads ? 0 : 1), 32);
  if (inst_->refs.size() != inst_->count) unknown("another number of registers");
  address(operand(loads ? 1 : 0), "an operand");
}

// wgmma.mma_async.sync.aligned.shape.d.a.b {d}, {a} | descriptor, descriptor, keep, sign of a, of b[, transposed a], b
void Decoder::decode_wgmma() {
  program_.uses_wgmma = true;
  if (!has("mma_async")) {
    inst_->kind = Class::Barrier;
    inst_->run = has("fence") ? wgmma_fence : has("commit_group") ? wgmma_commit : wgmma_wait;
    if (has("wait_group")) inst_->value = operand(0).value;
    return;
  }
  inst_->run = wgmma_multiply;
  inst_->kind = Class::Product;
  const size_t words = parts_.size();
  const ElementName *a = element_named(parts_.at(words - 2)), *b = element_named(parts_.at(words - 1));
  if (!a || a != b || a->bits > 32 || a->bits < 16 || !shape(parts_.at(words - 4), inst_->extent)) unknown();
  if (inst_->extent[2] * a->bits != 256) unknown("of this shape");
  const bool half = parts_.at(words - 3) == "f16", registers = operand(1).kind == Kind::Vector;
  if (!half && parts_.at(words - 3) != "f32") unknown("sums of this type");
  values(operand(0), 32);
  inst_->value = inst_->refs.size();  // sums
  if (inst_->value != inst_->extent[1] / (half ? 4 : 2)) unknown("another number of registers");
  values(operand(1), registers ? 32 : 64);
  values(operand(2), 64);
  inst_->refs.push_back(value(operand(3), 1));
  inst_->mode = static_cast<uint8_t>(a->element);
  inst_->bits = half;
  inst_->count = registers ? 4 : 1;
  // size: bit 0 and 1 negate a and b, 2 and 3 transpose them
  const auto flag = [&](size_t index) { return index < at_->operands.size() ? operand(index).value : 0; };
  inst_->size = (flag(4) == -1) | (flag(5) == -1) << 1;
  if (registers) inst_->size |= flag(6) << 3;
  if (!registers) inst_->size |= flag(6) << 2 | flag(7) << 3;
  counts_as("wgmma." + parts_.at(words - 4) + "." + a->name);
}

}  // namespace machine

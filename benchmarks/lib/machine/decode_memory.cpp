// Decoders of loads, stores, atomics and asynchronous copies.

#include "decoder.h"

namespace machine {
namespace {

struct MemoryType {
  const char* name;
  uint8_t bytes, is_signed;
};

constexpr MemoryType TYPES[] = {{"b8", 1, 0},  {"u8", 1, 0},    {"s8", 1, 1},    {"b16", 2, 0}, {"u16", 2, 0},
                                {"s16", 2, 1}, {"f16", 2, 0},   {"bf16", 2, 0},  {"b32", 4, 0}, {"u32", 4, 0},
                                {"s32", 4, 1}, {"f32", 4, 0},   {"b64", 8, 0},   {"u64", 8, 0}, {"s64", 8, 1},
                                {"f64", 8, 0}, {"f16x2", 4, 0}, {"bf16x2", 4, 0}};

// Words that choose caches, order or scope; every access of the machine is ordered as the strongest of them asks.
const char* const CACHES[] = {"volatile",
                              "relaxed",
                              "acquire",
                              "release",
                              "acq_rel",
                              "weak",
                              "cta",
                              "gpu",
                              "sys",
                              "cluster",
                              "nc",
                              "ca",
                              "cg",
                              "cs",
                              "lu",
                              "cv",
                              "wb",
                              "wt",
                              "mmio",
                              "noftz",
                              "L1::evict_normal",
                              "L1::evict_unchanged",
                              "L1::evict_first",
                              "L1::evict_last",
                              "L1::no_allocate",
                              "L2::cache_hint",
                              "L2::64B",
                              "L2::128B",
                              "L2::256B",
                              "L2::evict_first",
                              "L2::evict_last",
                              "L2::evict_normal"};

struct SpaceName {
  const char* name;
  uint8_t space;  // 1 + Space; 0: generic
};
constexpr SpaceName SPACES[] = {{"global", 1},          {"shared", 2},      {"shared::cta", 2},
                                {"shared::cluster", 2}, {"local", 3},       {"param", 4},
                                {"param::entry", 4},    {"param::func", 4}, {"const", 1}};

}  // namespace

// Sets space, size, count and mode from the words of a memory instruction; `more` are words of its own.
void Decoder::memory_words(std::initializer_list<const char*> more) {
  inst_->count = 1;
  for (size_t i = 1; i < parts_.size(); ++i) {
    const std::string& word = parts_[i];
    bool known = std::find(std::begin(CACHES), std::end(CACHES), word) != std::end(CACHES);
    known |= std::find(more.begin(), more.end(), word) != more.end();
    for (const SpaceName& space : SPACES)
      if (word == space.name) inst_->space = space.space, known = true;
    for (const MemoryType& type : TYPES)
      if (word == type.name) inst_->size = type.bytes, inst_->mode = type.is_signed, known = true;
    if (word == "v2" || word == "v4" || word == "v8") inst_->count = word[1] - '0', known = true;
    if (!known) unknown("." + word);
  }
  const Class classes[] = {Class::Global, Class::Global, Class::Shared, Class::Local, Class::Move};
  inst_->kind = classes[inst_->space];
  inst_->releases = has("release") || has("acq_rel");
}

void Decoder::address(const Operand& of, const char* what) {
  if (of.kind != Kind::Address) unknown(std::string(what) + " is no address");
  inst_->value = of.value;
  if (of.reg >= 0) {
    inst_->extent[0] = bits_of(of);
    if (inst_->extent[0] < 32) unknown("an address in a narrow register");
    inst_->refs.push_back(flow_.slots[of.reg]);
  } else {
    inst_->extent[0] = 64;
    inst_->refs.push_back(constant(of.name.empty() ? 0 : address_of(variable(of.name)), 64));
  }
}

void Decoder::decode_load() {
  memory_words({});
  const Handler by_space[] = {load_generic, load_global, load_shared, load_local, load_param};
  inst_->run = by_space[inst_->space];
  const Operand& from = operand(1);
  if (inst_->space == 4 && from.reg < 0 && !function_.variables.count(from.name)) {  // what a call returned: nothing
    inst_->run = simple_instructions().at("mov.b32").run;
    inst_->refs = {value(operand(0), inst_->size == 8 ? 64 : 32), constant(0, 64)};
    return;
  }
  const Operand& first = operand(0).kind == Kind::Vector ? operand(0).parts.at(0) : operand(0);
  inst_->bits = bits_of(first) == 64 || (first.kind == Kind::Sink && inst_->size == 8) ? 64 : 32;
  values(operand(0), inst_->bits);
  if (inst_->refs.size() != inst_->count) unknown("another number of registers");
  address(from, "the second operand");
}

void Decoder::decode_store() {
  memory_words({"async", "mbarrier::complete_tx::bytes"});
  if (has("async")) unknown();
  if (inst_->space == 4) {  // an argument of a call
    inst_->run = nothing;
    return;
  }
  const Handler by_space[] = {store_generic, store_global, store_shared, store_local};
  inst_->run = by_space[inst_->space];
  const Operand& first = operand(1).kind == Kind::Vector ? operand(1).parts.at(0) : operand(1);
  inst_->bits = bits_of(first) == 64 || (!bits_of(first) && inst_->size == 8) ? 64 : 32;
  values(operand(1), inst_->bits);
  if (inst_->refs.size() != inst_->count) unknown("another number of registers");
  address(operand(0), "the first operand");
}

// atom.op.type d, [a], b[, c] and red.op.type [a], b; refs: d..., a, b..., c
void Decoder::decode_atomic() {
  memory_words({"add", "min", "max", "and", "or", "xor", "inc", "dec", "exch", "cas"});
  if (has("b128")) unknown("of 128 bits");
  const bool returns = parts_[0] == "atom";
  const Handler by_space[] = {atomic_generic, returns ? atomic_global : reduce_global, atomic_shared};
  if (inst_->space > 2) unknown("in this space");
  inst_->run = by_space[inst_->space];
  const char* operations[] = {"add", "min", "max", "and", "or", "xor", "inc", "dec", "exch", "cas"};
  const char* types[] = {"u32",  "s32",   "u64",    "s64", "f32", "f64", "f16",
                         "bf16", "f16x2", "bf16x2", "b32", "b64", "b16"};
  uint8_t operation = 255, type = 255;
  for (uint8_t i = 0; i < std::size(operations); ++i)
    if (has(operations[i])) operation = i;
  for (uint8_t i = 0; i < std::size(types); ++i)
    if (has(types[i])) type = i;
  if (operation == 255 || type == 255) unknown();
  inst_->bits = inst_->size == 8 ? 64 : 32;
  inst_->mode = operation;
  inst_->extent[1] = type;
  inst_->extent[2] = returns;
  if (returns) values(operand(0), inst_->bits);
  address(operand(returns), "an operand");
  values(operand(returns + 1), inst_->bits);
  if (operation == 9) values(operand(returns + 2), inst_->bits);
}

void Decoder::decode_prefetch() {
  inst_->run = prefetch;
  inst_->kind = Class::Copy;
}

void Decoder::decode_cp() {
  inst_->kind = Class::Copy;
  if (has("bulk") || has("reduce")) return decode_bulk();
  if (has("commit_group")) {
    inst_->run = copy_commit;
  } else if (has("wait_group") || has("wait_all")) {
    inst_->run = copy_wait;
    inst_->value = has("wait_all") ? 0 : operand(0).value;
    inst_->mode = has("wait_all");
  } else if (has("mbarrier")) {
    only({"async", "mbarrier", "arrive", "noinc", "shared", "shared::cta", "b64"});
    inst_->run = mbarrier_copies;
    inst_->mode = has("noinc");
    inst_->space = has("shared") || has("shared::cta") ? 2 : 0;
    address(operand(0), "the first operand");
  } else {
    // cp.async.cg.shared.global [into], [from], bytes[, bytes to read | predicate to ignore it][, policy]
    only({"async", "ca", "cg", "shared", "shared::cta", "global", "L2::cache_hint", "L2::64B", "L2::128B", "L2::256B"});
    inst_->run = copy_async;
    inst_->size = operand(2).value;
    const size_t operands = at_->operands.size() - has("L2::cache_hint");
    address(operand(0), "the first operand");
    const int64_t into = inst_->value;
    const int bits = inst_->extent[0];
    address(operand(1), "the second operand");
    inst_->extent[1] = bits;
    inst_->extent[2] = into;
    if (operands <= 3) return;
    inst_->mode = bits_of(operand(3)) == 1 ? 2 : 1;
    inst_->refs.push_back(value(operand(3), inst_->mode == 2 ? 1 : 32));
  }
}

// cp.async.bulk[.tensor.Nd]: to shared memory with an mbarrier, to global memory in groups
void Decoder::decode_bulk() {
  if (has("commit_group") || has("wait_group")) {
    inst_->run = has("commit_group") ? bulk_commit : bulk_wait;
    if (has("wait_group")) inst_->value = operand(0).value;
    return;
  }
  if (has("prefetch")) return decode_prefetch();
  only({"async", "bulk", "tensor", "1d", "2d", "3d", "4d", "5d", "tile", "shared::cluster", "shared::cta", "global",
        "mbarrier::complete_tx::bytes", "bulk_group", "L2::cache_hint"});
  const bool tensor = has("tensor"), stores = has("bulk_group");
  inst_->run = tensor ? stores ? tensor_to_global : tensor_to_shared : stores ? bulk_to_global : bulk_to_shared;
  std::vector<size_t> order = {0, 1};  // operands, in the order of refs
  if (!tensor) order.push_back(2);
  if (!stores) order.push_back(tensor ? 2 : 3);
  for (size_t index : order) {
    if (operand(index).kind != Kind::Address) {
      inst_->refs.push_back(value(operand(index), 32));
      continue;
    }
    address(operand(index), "an operand");
    inst_->bulk_bits[inst_->refs.size() - 1] = inst_->extent[0];
    inst_->bulk_offset[inst_->refs.size() - 1] = inst_->value;
  }
  if (!tensor) return;
  const Operand& coordinates = operand(!stores).parts.at(0);
  inst_->count = coordinates.parts.size();
  for (const Operand& part : coordinates.parts) inst_->refs.push_back(value(part, 32));
}

// tensormap.replace.tile.field.space.b1024.type [map][, index], value and
// tensormap.cp_fenceproxy.global.shared::cta... [into], [from], 128
void Decoder::decode_tensor_map() {
  inst_->kind = Class::Copy;
  if (has("cp_fenceproxy")) {
    only({"cp_fenceproxy", "global", "shared::cta", "tensormap::generic", "release", "gpu", "sys", "cta", "cluster",
          "sync", "aligned"});
    inst_->run = publish_map;
    for (int i = 0; i < 2; ++i) {
      address(operand(i), "an operand");
      inst_->bulk_bits[i] = inst_->extent[0];
      inst_->bulk_offset[i] = inst_->value;
    }
    return;
  }
  const char* fields[] = {"global_address", "rank",     "box_dim",           "global_dim",   "global_stride",
                          "element_stride", "elemtype", "interleave_layout", "swizzle_mode", "fill_mode"};
  only({"replace", "tile", "global", "shared::cta", "b1024", "b32", "b64", "global_address", "rank", "box_dim",
        "global_dim", "global_stride", "element_stride", "elemtype", "interleave_layout", "swizzle_mode", "fill_mode"});
  inst_->run = replace_field;
  inst_->mode = 255;
  for (uint8_t i = 0; i < std::size(fields); ++i)
    if (has(fields[i])) inst_->mode = i;
  if (!has("replace") || inst_->mode == 255) unknown();
  inst_->space = has("shared::cta") ? 2 : has("global") ? 1 : 0;
  inst_->bits = has("b64") ? 64 : 32;
  address(operand(0), "the first operand");
  inst_->bulk_bits[0] = inst_->extent[0];
  inst_->bulk_offset[0] = inst_->value;
  const bool indexed = inst_->mode >= 2 && inst_->mode <= 5;
  inst_->refs.push_back(indexed ? value(operand(1), 32) : constant(0, 32));
  inst_->refs.push_back(value(operand(1 + indexed), inst_->bits));
}

// mbarrier.init, inval, arrive[.expect_tx][.noComplete], expect_tx, complete_tx, test_wait, try_wait[.parity]
void Decoder::decode_mbarrier() {
  only({"init",     "inval",   "arrive",     "arrive_drop", "expect_tx",   "complete_tx",     "test_wait",
        "try_wait", "parity",  "noComplete", "shared",      "shared::cta", "shared::cluster", "b64",
        "release",  "acquire", "relaxed",    "cta",         "cluster",     "pending_count"});
  if (has("arrive_drop") || has("pending_count") || has("noComplete")) unknown();
  inst_->kind = Class::Barrier;
  const bool waits = has("test_wait") || has("try_wait"), arrives = has("arrive");
  const bool result = (waits || arrives) && operand(0).kind != Kind::Address;
  inst_->space = has("shared") || has("shared::cta") || has("shared::cluster") ? 2 : 0;
  address(operand(result), "an operand");
  Ref into = flow_.file_bytes;
  if (result) into = value(operand(0), waits ? 1 : 64);
  inst_->refs.push_back(into);
  inst_->refs.push_back(constant(1, 32));
  if (at_->operands.size() > result + 1u) {
    const Operand& last = operand(result + 1);
    const int bits = waits && !has("parity") ? 64 : 32;
    inst_->refs.back() = value(last, bits);
  }
  inst_->mode = (arrives && has("expect_tx")) | has("parity") << 1 | has("test_wait") << 2;
  inst_->run = has("init")    ? mbarrier_init
               : has("inval") ? mbarrier_inval
               : waits        ? mbarrier_wait
               : arrives      ? mbarrier_arrive
                              : mbarrier_expect;
  if (has("complete_tx")) unknown();
}

}  // namespace machine

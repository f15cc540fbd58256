// Statements -> instructions: the dispatch by name, operands, and everything that is neither memory nor tensor cores.

#include "decoder.h"

namespace machine {

const SimpleTable& simple_instructions() {
  static const SimpleTable table = [] {
    SimpleTable made;
    add_integer(made);
    add_carry(made);
    add_selection(made);
    add_float(made);
    add_half(made);
    add_convert(made);
    return made;
  }();
  return table;
}

const std::map<std::string, Decoder::Family>& Decoder::families() {
  static const std::map<std::string, Family> table = {
      {"bra", &Decoder::decode_branch},
      {"ret", &Decoder::decode_leave},
      {"exit", &Decoder::decode_leave},
      {"trap", &Decoder::decode_leave},
      {"call", &Decoder::decode_call},
      {"bar", &Decoder::decode_barrier},
      {"barrier", &Decoder::decode_barrier},
      {"membar", &Decoder::decode_fence},
      {"fence", &Decoder::decode_fence},
      {"setp", &Decoder::decode_setp},
      {"mov", &Decoder::decode_mov},
      {"cvta", &Decoder::decode_cvta},
      {"isspacep", &Decoder::decode_cvta},
      {"shfl", &Decoder::decode_shfl},
      {"vote", &Decoder::decode_vote},
      {"match", &Decoder::decode_vote},
      {"activemask", &Decoder::decode_vote},
      {"elect", &Decoder::decode_vote},
      {"redux", &Decoder::decode_redux},
      {"nanosleep", &Decoder::decode_nothing},
      {"setmaxnreg", &Decoder::decode_nothing},
      {"griddepcontrol", &Decoder::decode_nothing},
      {"brkpt", &Decoder::decode_nothing},
      {"pmevent", &Decoder::decode_nothing},
      {"createpolicy", &Decoder::decode_nothing},
      {"applypriority", &Decoder::decode_nothing},
      {"discard", &Decoder::decode_nothing},
      {"ld", &Decoder::decode_load},
      {"ldu", &Decoder::decode_load},
      {"st", &Decoder::decode_store},
      {"red", &Decoder::decode_atomic},
      {"atom", &Decoder::decode_atomic},
      {"cp", &Decoder::decode_cp},
      {"mbarrier", &Decoder::decode_mbarrier},
      {"prefetch", &Decoder::decode_prefetch},
      {"prefetchu", &Decoder::decode_prefetch},
      {"mma", &Decoder::decode_mma},
      {"ldmatrix", &Decoder::decode_matrix},
      {"stmatrix", &Decoder::decode_matrix},
      {"movmatrix", &Decoder::decode_matrix},
      {"wgmma", &Decoder::decode_wgmma},
      {"tensormap", &Decoder::decode_tensor_map},
  };
  return table;
}

Decoder::Decoder(Module& module, Function& function)
    : module_(module), function_(function), program_(*function.program), flow_(analyze(function)) {}

void Decoder::run() {
  program_.file_bytes = flow_.file_bytes + 512;  // the rest is a place for unread values
  program_.tracked = flow_.tracked_count;
  program_.undefined_memory = flow_.undefined_memory;
  for (size_t reg = 0; reg < function_.registers.size(); ++reg)
    if (flow_.tracked[reg] >= 0) tracked_[flow_.slots[reg]] = flow_.tracked[reg];
  program_.special.assign(std::size(SPECIAL), NONE);
  for (size_t reg = 0; reg < function_.registers.size(); ++reg)
    if (function_.registers[reg].special >= 0) program_.special[function_.registers[reg].special] = flow_.slots[reg];
  program_.code.resize(function_.statements.size() + 1);
  for (size_t i = 0; i < function_.statements.size(); ++i) statement(i);
  program_.code.back().run = leave;  // falling off the end
  program_.code.back().kind = Class::Control;
}

std::string Decoder::opcodes() {
  std::set<std::string> found;
  for (const auto& [name, family] : families()) found.insert(name);
  for (const auto& [name, simple] : simple_instructions()) found.insert(split(name)[0]);
  std::string names;
  for (const std::string& name : found) names += name + "\n";
  return names;
}

void Decoder::statement(int index) {
  at_ = &function_.statements[index];
  inst_ = &program_.code[index];
  inst_->target = at_->target;
  inst_->reconverge = flow_.reconverge[index];
  if (at_->predicate >= 0) inst_->predicate = flow_.slots[at_->predicate];
  inst_->negated = at_->negated;
  parts_ = split(at_->op);
  const auto family = families().find(parts_[0]);
  family == families().end() ? generic() : (this->*family->second)();
  notes_registers();
}

void Decoder::generic() {
  const auto found = simple_instructions().find(at_->op);
  if (found == simple_instructions().end()) unknown();
  const Simple& simple = found->second;
  if (at_->operands.size() != simple.bits.size()) unknown("another number of operands");
  inst_->run = simple.run;
  inst_->kind = simple.kind;
  inst_->value = simple.value;
  const bool low = parts_[0] == "cvt" && simple.bits[1] == 32 && bits_of(operand(1)) == 64;
  for (size_t i = 0; i < simple.bits.size(); ++i)
    inst_->refs.push_back(value(operand(i), low && i ? 64 : simple.bits[i]));
  if (!low) return;  // else cvt reads the low half of a wider register
  inst_->inner = inst_->run;
  inst_->run = convert_low;
  inst_->refs.insert(inst_->refs.begin() + 1, static_cast<Ref>(flow_.file_bytes));
}

void Decoder::unknown(const std::string& why) const {
  std::string message = "PTX line " + std::to_string(at_->line) + ": unknown instruction " + at_->op;
  throw Unknown{at_->op, at_->line, why.empty() ? message : message + " (" + why + ")"};
}

const Operand& Decoder::operand(size_t index) const {
  if (index >= at_->operands.size()) unknown("too few operands");
  return at_->operands[index];
}

void Decoder::only(std::initializer_list<const char*> known) {
  for (size_t i = 1; i < parts_.size(); ++i)
    if (std::find(known.begin(), known.end(), parts_[i]) == known.end()) unknown("." + parts_[i]);
}

int Decoder::bits_of(const Operand& of) const { return of.reg >= 0 ? function_.registers[of.reg].bits : 0; }

Ref Decoder::constant(int64_t number, int bits) {
  if (bits == 1) number = number ? ALL : 0;
  const auto [place, fresh] = constants_.insert({{bits, number}, ~static_cast<Ref>(program_.constants.size())});
  if (!fresh) return place->second;
  const size_t begin = program_.constants.size();
  program_.constants.resize(begin + (bits == 64 ? 256 : 128));
  for (int lane = 0; lane < LANES; ++lane) {
    if (bits == 64) std::memcpy(&program_.constants[begin + lane * 8], &number, 8);
    if (bits != 64) std::memcpy(&program_.constants[begin + lane * 4], &number, 4);
  }
  return place->second;
}

const Variable& Decoder::variable(const std::string& name) const {
  static const Variable none{Space::Param, 0, 1, 0, false, {}};  // a function, or a parameter of a call
  if (const auto own = function_.variables.find(name); own != function_.variables.end()) return own->second;
  const auto found = module_.variables.find(name);
  return found == module_.variables.end() ? none : found->second;
}

int64_t Decoder::address_of(const Variable& of) const { return of.external ? function_.shared_bytes : of.offset; }

Ref Decoder::value(const Operand& of, int bits) {
  switch (of.kind) {
    case Kind::Register: {
      const int declared = bits_of(of);
      const bool fits = bits <= 1 ? declared == 1 : bits <= 32 ? declared > 1 && declared <= 32 : declared == bits;
      if (!fits || of.negated) unknown("operand " + function_.registers[of.reg].name);
      return flow_.slots[of.reg];
    }
    case Kind::Immediate:
      if (of.form == 'd' && bits <= 32) unknown("a double where 32 bits are meant");
      return constant(bits == 16 ? of.value & 0xffff : bits == 32 ? of.value & 0xffffffff : of.value, bits);
    case Kind::Symbol:
      return constant(address_of(variable(of.name)) + of.value, bits);
    case Kind::Sink:
      return flow_.file_bytes;
    default:
      unknown("an operand of another kind");
  }
}

void Decoder::values(const Operand& of, int bits) {
  if (of.kind != Kind::Vector) {
    inst_->refs.push_back(value(of, bits));
  } else {
    for (const Operand& part : of.parts) inst_->refs.push_back(value(part, bits));
  }
}

void Decoder::decode_branch() {
  only({"uni"});
  inst_->run = branch;
  inst_->kind = Class::Control;
}

void Decoder::decode_leave() {
  only({"uni"});
  inst_->run = parts_[0] == "trap" ? trap : leave;
  inst_->kind = Class::Control;
}

// Only what the run-time library offers to kernels: printing does nothing, a failed assertion ends the launch.
void Decoder::decode_call() {
  bool assertion_fails = false, prints = false;
  for (const Operand& of : at_->operands) {
    assertion_fails |= of.name == "__assertfail";
    prints |= of.name == "vprintf";
  }
  if (!assertion_fails && !prints) unknown("of a function that is not inlined");
  inst_->run = assertion_fails ? assertion : nothing;
  inst_->kind = Class::Control;
}

void Decoder::decode_nothing() {
  inst_->run = nothing;
  inst_->kind = Class::Control;
}

void Decoder::decode_fence() {
  only({"gl", "cta", "sys", "gpu", "cluster", "sc", "acq_rel", "acquire", "release", "proxy", "async", "async::generic",
        "alias", "async.shared::cta", "shared::cta", "global", "mbarrier_init", "tensormap::generic",
        "sync_restrict::shared::cta"});
  inst_->run = memory_fence;
  inst_->kind = Class::Barrier;
  inst_->mode = has("async");
}

void Decoder::decode_barrier() {
  inst_->kind = Class::Barrier;
  if (has("cluster")) {  // blocks form clusters of one
    inst_->run = has("arrive") ? memory_fence : nothing;
    return;
  }
  only({"cta", "sync", "aligned", "arrive", "warp", "red", "popc", "and", "or", "u32", "pred"});
  if (has("warp")) {
    inst_->run = warp_barrier;
    inst_->refs = {value(operand(0), 32)};
    return;
  }
  inst_->mode = parts_[0] == "bar" || has("aligned");  // all lanes of a warp together
  const size_t first = has("red");
  inst_->run = has("arrive") ? barrier_arrive : barrier_sync;
  Ref threads = constant(0, 32);
  const size_t count = at_->operands.size() - (has("red") ? 2 : 0);
  if (count > 1) threads = value(operand(first + 1), 32);
  inst_->refs = {count ? value(operand(first), 32) : constant(0, 32), threads};
  if (!has("red")) return;
  inst_->run = barrier_reduce;
  inst_->count = has("popc") ? 0 : has("and") ? 1 : 2;
  inst_->refs.push_back(value(operand(0), has("popc") ? 32 : 1));
  Ref from = NONE;
  inst_->bits = predicate_flag(at_->operands.back(), from);
  inst_->refs.push_back(from);
}

// A predicate that may be negated: its place, and whether it is.
uint32_t Decoder::predicate_flag(const Operand& of, Ref& ref) {
  Operand plain = of;
  plain.negated = false;
  ref = value(plain, 1);
  return of.negated;
}

// setp.compare[.boolean][.ftz].type p[|q], a, b[, [!]c]
void Decoder::decode_setp() {
  uint8_t join = 0;
  std::string name = "setp";
  for (size_t i = 1; i < parts_.size(); ++i) {
    const bool boolean = parts_[i] == "and" || parts_[i] == "or" || parts_[i] == "xor";
    if (boolean) join = parts_[i] == "and" ? 1 : parts_[i] == "or" ? 2 : 3;
    if (!boolean) name += "." + parts_[i];
  }
  const auto found = simple_instructions().find(name);
  if (found == simple_instructions().end()) unknown();
  const bool pair = operand(0).kind == Kind::Pair;
  inst_->kind = Class::Selection;
  inst_->run = found->second.run;
  const int bits = found->second.bits[1];
  inst_->refs = {value(pair ? operand(0).parts[0] : operand(0), 1), value(operand(1), bits), value(operand(2), bits)};
  if (!join && !pair) return;
  if (parts_.back().size() > 2 &&
      parts_.back().substr(parts_.back().size() - 2) == "x2") {  // a predicate for each half
    if (join || !pair) unknown();
    inst_->refs.push_back(value(operand(0).parts[1], 1));
    return;
  }
  inst_->inner = inst_->run;
  inst_->run = set_predicates;
  inst_->mode = join;
  inst_->refs.push_back(pair ? value(operand(0).parts[1], 1) : static_cast<Ref>(flow_.file_bytes));
  Ref other = constant(0, 1);
  if (join) inst_->bits = predicate_flag(operand(3), other);
  inst_->refs.push_back(other);
}

void Decoder::decode_mov() {
  const Operand &into = operand(0), &from = operand(1);
  inst_->kind = Class::Move;
  const int bits = parts_[1] == "pred" ? 1 : std::atoi(parts_[1].c_str() + 1);
  if (into.kind == Kind::Vector || from.kind == Kind::Vector) {
    const bool packs = from.kind == Kind::Vector;
    const size_t count = (packs ? from : into).parts.size();
    inst_->run = bits == 128 ? move_b128 : packs ? pack : unpack;
    inst_->size = bits / 8;
    inst_->count = count;
    inst_->mode = packs;
    for (const Operand& part : (packs ? from : into).parts) inst_->refs.push_back(value(part, bits / count));
    inst_->refs.push_back(value(packs ? into : from, bits));
    return;
  }
  if (bits_of(from) && function_.registers[from.reg].name.rfind("%clock", 0) == 0) {
    inst_->run = clock;
    inst_->bits = bits;
    inst_->refs = {value(into, bits)};
    return;
  }
  generic();
}

// Generic addresses are those of this process, except in the windows of the other spaces.
void Decoder::decode_cvta() {
  only({"to", "global", "shared", "shared::cta", "local", "const", "param", "param::entry", "u64", "u32"});
  const bool shared = has("shared") || has("shared::cta"), params = has("param") || has("param::entry");
  const uint64_t window = shared ? SHARED_WINDOW : has("local") ? LOCAL_WINDOW : params ? PARAM_WINDOW : 0;
  if (parts_[0] == "isspacep") {
    inst_->run = is_space;
    inst_->kind = Class::Selection;
    inst_->value = window;
    inst_->refs = {value(operand(0), 1), value(operand(1), 64)};
    return;
  }
  if (!has("u64")) unknown("addresses of 32 bits");
  inst_->run = simple_instructions().at("add.u64").run;
  inst_->kind = Class::Integer;
  inst_->refs = {value(operand(0), 64), value(operand(1), 64), constant(has("to") ? -window : window, 64)};
}

void Decoder::decode_shfl() {
  only({"sync", "bfly", "idx", "up", "down", "b32"});
  inst_->run = shuffle;
  inst_->kind = Class::Shuffle;
  inst_->mode = has("bfly") ? 0 : has("idx") ? 1 : has("up") ? 2 : 3;
  const bool pair = operand(0).kind == Kind::Pair;
  inst_->refs = {value(pair ? operand(0).parts[0] : operand(0), 32)};
  for (int i = 1; i < 5; ++i) inst_->refs.push_back(value(operand(i), 32));
  inst_->refs.push_back(pair ? value(operand(0).parts[1], 1) : static_cast<Ref>(flow_.file_bytes));
}

void Decoder::decode_vote() {
  inst_->kind = Class::Shuffle;
  if (parts_[0] == "activemask") {
    inst_->run = active_mask;
    inst_->refs = {value(operand(0), 32)};
  } else if (parts_[0] == "elect") {
    const Operand& into = operand(0);
    inst_->run = elect;
    inst_->refs = {value(into.parts.at(0), 32), value(into.parts.at(1), 1), value(operand(1), 32)};
  } else if (parts_[0] == "match") {
    only({"any", "all", "sync", "b32", "b64"});
    const bool pair = operand(0).kind == Kind::Pair;
    inst_->run = match;
    inst_->mode = has("all");
    inst_->bits = has("b64") ? 64 : 32;
    inst_->refs = {value(pair ? operand(0).parts[0] : operand(0), 32), value(operand(1), inst_->bits),
                   value(operand(2), 32), pair ? value(operand(0).parts[1], 1) : static_cast<Ref>(flow_.file_bytes)};
  } else {
    only({"sync", "all", "any", "uni", "ballot", "pred", "b32"});
    inst_->run = vote;
    inst_->mode = has("all") ? 0 : has("any") ? 1 : has("uni") ? 2 : 3;
    Ref from = NONE;
    inst_->bits = predicate_flag(operand(1), from);
    inst_->refs = {value(operand(0), has("ballot") ? 32 : 1), from, value(operand(2), 32)};
  }
}

void Decoder::decode_redux() {
  only({"sync", "add", "min", "max", "and", "or", "xor", "s32", "u32", "b32"});
  inst_->run = reduce_lanes;
  inst_->kind = Class::Shuffle;
  const char* names[] = {"add", "min", "max", "and", "or", "xor"};
  for (int i = 0; i < 6; ++i)
    if (has(names[i])) inst_->mode = i;
  inst_->count = has("s32");
  inst_->refs = {value(operand(0), 32), value(operand(1), 32), value(operand(2), 32)};
}

std::string opcodes() { return Decoder::opcodes(); }

void decode(Module& module, Function& function) {
  function.program = std::make_shared<Program>();
  Decoder(module, function).run();
}

}  // namespace machine

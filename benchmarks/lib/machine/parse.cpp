// PTX text -> Module: functions as lists of statements whose names are resolved.

#include <cstdlib>
#include <cstring>
#include <set>

#include "lexer.h"

namespace machine {
namespace {

int type_bits(std::string_view type) {  // ".b32" and the like
  if (type == ".pred") return 1;
  const size_t digit = type.find_first_of("0123456789");
  if (digit == std::string_view::npos) return 0;
  return std::atoi(std::string(type.substr(digit)).c_str()) * (type.find("x2") != std::string_view::npos ? 2 : 1);
}

struct Scope {
  std::map<std::string, int, std::less<>> registers;
  std::map<std::string, int, std::less<>> families;  // %r<100>: prefix -> bits
  std::map<std::string, int, std::less<>> labels;
  std::set<std::string, std::less<>> call_params;
};

struct Jump {
  int statement;
  std::vector<int> scopes;  // from the innermost outwards
};

class Parser {
 public:
  Parser(const std::string& text, int architecture) : lex_(text), module_(new Module) {
    module_->architecture = architecture;
  }

  std::unique_ptr<Module> run() {
    while (!lex_.done()) directive();
    for (auto& function : module_->functions) function->shared_bytes += module_->shared_bytes;
    return std::move(module_);
  }

 private:
  void directive() {
    const std::string word(lex_.peek());
    if (word == ".version" || word == ".target" || word == ".address_size" || word == ".weak" || word == ".visible" ||
        word == ".extern" || word == ".common") {
      external_ = word == ".extern";
      lex_.take();
      if (word == ".version" || word == ".target" || word == ".address_size") lex_.rest_of_line();
    } else if (word == ".file") {
      file();
    } else if (word == ".global" || word == ".shared" || word == ".const") {
      variable(module_->variables, module_->shared_bytes);
    } else if (word == ".entry") {
      lex_.take();
      entry();
    } else if (word == ".func" || word == ".section") {
      while (!lex_.at("{") && !lex_.at(";")) lex_.take();
      lex_.at("{") ? lex_.skip_block() : lex_.skip_statement();
    } else if (word == ".alias" || word == ".pragma") {
      lex_.skip_statement();
    } else if (word == ".b8" || word == ".b32" || word == ";") {
      lex_.rest_of_line();
    } else {
      throw Unknown{word, lex_.line(), "PTX line " + std::to_string(lex_.line()) + ": unknown directive " + word};
    }
  }

  void file() {
    lex_.take();
    const int number = std::atoi(std::string(lex_.take()).c_str());
    std::string_view name = lex_.take();
    if (name.size() >= 2) name = name.substr(1, name.size() - 2);
    module_->files[number] = std::string(name);
    while (lex_.accept(",")) lex_.take();
  }

  // .space .align N .type name[size] = {...}; several names may share a line of parameters, never of variables.
  void variable(std::map<std::string, Variable>& variables, uint64_t& used) {
    const std::string space(lex_.take());
    Variable made;
    made.space = space == ".shared"  ? Space::Shared
                 : space == ".local" ? Space::Local
                 : space == ".const" ? Space::Const
                                     : Space::Global;
    made.external = external_;
    external_ = false;
    const std::string name = declared(made);
    if (lex_.accept("=")) contents(made);
    lex_.expect(";");
    if (made.space == Space::Global || made.space == Space::Const) {
      module_->memory.emplace_back(new uint8_t[made.bytes + 256]());
      uint8_t* at = module_->memory.back().get();
      at += -reinterpret_cast<uint64_t>(at) & 127;
      std::memcpy(at, made.contents.data(), std::min<uint64_t>(made.contents.size(), made.bytes));
      made.offset = reinterpret_cast<uint64_t>(at);
    } else if (!made.external) {
      made.offset = (used + made.align - 1) / made.align * made.align;
      used = made.offset + made.bytes;
    }
    variables[name] = made;
  }

  // [.align N] [.ptr ...] .type name [size] of a variable or parameter; fills in align and bytes.
  std::string declared(Variable& made) {
    int bits = 0, vector = 1;
    uint64_t align = 0;
    while (lex_.peek()[0] == '.') {
      const std::string word(lex_.take());
      if (word == ".align") {
        align = integer(lex_.take());
      } else if (word == ".ptr") {  // says something of what a pointer points to
        while (lex_.at(".global") || lex_.at(".shared") || lex_.at(".const") || lex_.at(".local")) lex_.take();
        if (lex_.accept(".align")) lex_.take();
      } else if (word == ".v2" || word == ".v4") {
        vector = word[2] - '0';
      } else if (type_bits(word)) {
        bits = type_bits(word);
      } else if (word != ".managed" && word != ".unified") {
        lex_.fail("unknown word in a declaration: " + word);
      }
    }
    const std::string name(lex_.take());
    uint64_t count = vector;
    while (lex_.accept("[")) {
      count *= lex_.at("]") ? 0 : integer(lex_.take());
      lex_.expect("]");
    }
    made.bytes = count * bits / 8;
    made.align = align ? align : std::max(bits / 8 * vector, 1);
    element_bytes_ = bits / 8;
    return name;
  }

  void contents(Variable& made) {
    const bool list = lex_.accept("{");
    do {
      const int64_t value = integer(lex_.take());
      for (int byte = 0; byte < element_bytes_; ++byte) made.contents.push_back(value >> (8 * byte));
    } while (list && lex_.accept(","));
    if (list) lex_.expect("}");
  }

  static int64_t integer(std::string_view word) {
    return static_cast<int64_t>(std::strtoull(std::string(word).c_str(), nullptr, 0));
  }

  void entry() {
    module_->functions.emplace_back(new Function);
    function_ = module_->functions.back().get();
    function_->name = std::string(lex_.take());
    if (lex_.accept("(")) {
      while (!lex_.accept(")")) {
        lex_.expect(".param");
        Variable made{Space::Param, 0, 1, 0, false, {}};
        const std::string name = declared(made);
        made.offset = (function_->param_bytes + made.align - 1) / made.align * made.align;
        function_->param_bytes = made.offset + made.bytes;
        function_->variables[name] = made;
        lex_.accept(",");
      }
    }
    while (!lex_.at("{")) performance_directive();
    file_ = source_line_ = 0;
    scopes_.assign(1, Scope());
    jumps_.clear();
    std::vector<int> open = {0};
    lex_.expect("{");
    while (!open.empty()) body(open);
    resolve_jumps();
  }

  void performance_directive() {
    const std::string word(lex_.take());
    uint32_t sizes[3] = {1, 1, 1};
    int count = 0;
    while (count < 3 && std::isdigit(static_cast<unsigned char>(lex_.peek()[0]))) {
      sizes[count++] = integer(lex_.take());
      if (!lex_.accept(",")) break;
    }
    if (word == ".reqntid") std::memcpy(function_->required_threads, sizes, sizeof sizes);
    if (word == ".maxntid") std::memcpy(function_->max_threads, sizes, sizeof sizes);
    if (word == ".maxnreg") function_->max_registers = sizes[0];
    if (word == ".pragma") lex_.skip_statement();
  }

  void body(std::vector<int>& open) {
    if (lex_.accept("{")) {
      scopes_.emplace_back();
      open.push_back(scopes_.size() - 1);
    } else if (lex_.accept("}")) {
      open.pop_back();
    } else if (lex_.accept(";")) {
    } else if (lex_.at(".loc")) {
      lex_.take();
      char* rest;
      const std::string text(lex_.rest_of_line());
      file_ = std::strtol(text.c_str(), &rest, 10);
      source_line_ = std::strtol(rest, nullptr, 10);
    } else if (lex_.at(".reg")) {
      lex_.take();
      registers(scopes_[open.back()]);
    } else if (lex_.at(".local") || lex_.at(".shared")) {
      uint64_t& used = lex_.at(".local") ? function_->local_bytes : function_->shared_bytes;
      variable(function_->variables, used);
    } else if (lex_.at(".param")) {
      lex_.take();
      Variable ignored{Space::Param, 0, 1, 0, false, {}};
      scopes_[open.back()].call_params.insert(declared(ignored));
      lex_.expect(";");
    } else if (lex_.at(".pragma") || lex_.at(".branchtargets") || lex_.at(".callprototype")) {
      lex_.skip_statement();
    } else {
      statement(open);
    }
  }

  void registers(Scope& scope) {
    const int bits = std::max(type_bits(lex_.take()), 1);
    do {
      const std::string name(lex_.take());
      if (lex_.accept("<")) {
        lex_.take();
        lex_.expect(">");
        scope.families[name] = bits;
      } else {
        scope.registers[name] = add_register(name, bits);
      }
    } while (lex_.accept(","));
    lex_.expect(";");
  }

  int add_register(const std::string& name, int bits, int special = -1) {
    function_->registers.push_back({name, bits < 16 && bits > 1 ? 16 : bits, special});
    return function_->registers.size() - 1;
  }

  // The register of that name, or -1: names of variables and labels look alike.
  int find_register(std::string_view name, const std::vector<int>& open) {
    for (auto scope = open.rbegin(); scope != open.rend(); ++scope) {
      Scope& of = scopes_[*scope];
      if (const auto found = of.registers.find(name); found != of.registers.end()) return found->second;
      const size_t digits = name.find_last_not_of("0123456789") + 1;
      const auto family = of.families.find(name.substr(0, digits));
      if (digits < name.size() && family != of.families.end())
        return of.registers[std::string(name)] = add_register(std::string(name), family->second);
    }
    for (size_t special = 0; special < std::size(SPECIAL); ++special) {
      if (name != SPECIAL[special]) continue;
      const bool wide = name == "%clock64" || name == "%globaltimer" || name == "%gridid";
      const int bits = name == "%is_explicit_cluster" ? 1 : wide ? 64 : 32;
      return scopes_[0].registers[std::string(name)] = add_register(std::string(name), bits, special);
    }
    if (name[0] == '%') lex_.fail("unknown register " + std::string(name));
    return -1;
  }

  void statement(const std::vector<int>& open) {
    Statement made;
    made.line = lex_.line();
    made.file = file_;
    made.source_line = source_line_;
    if (lex_.accept("@")) {
      made.negated = lex_.accept("!");
      made.predicate = find_register(lex_.take(), open);
    }
    made.op = std::string(lex_.take());
    if (lex_.accept(":")) {
      scopes_[open.back()].labels[made.op] = function_->statements.size();
      return;
    }
    while (!lex_.accept(";")) {
      if (lex_.done() || lex_.at("}")) lex_.fail("a statement that does not end: " + made.op);
      if (lex_.accept(",") || lex_.accept("(") || lex_.accept(")")) continue;
      made.operands.push_back(operand(open));
    }
    if (made.op.rfind("bra", 0) == 0 && (made.op.size() == 3 || made.op[3] == '.'))
      jumps_.push_back({static_cast<int>(function_->statements.size()), {open.rbegin(), open.rend()}});
    function_->statements.push_back(std::move(made));
  }

  Operand operand(const std::vector<int>& open) {
    Operand made = primary(open);
    if (!lex_.accept("|")) return made;
    Operand pair;
    pair.kind = Kind::Pair;
    pair.parts = {made, primary(open)};
    return pair;
  }

  Operand primary(const std::vector<int>& open) {
    Operand made;
    made.negated = lex_.accept("!");
    if (lex_.accept("{")) {
      made.kind = Kind::Vector;
      while (!lex_.accept("}")) {
        made.parts.push_back(operand(open));
        lex_.accept(",");
      }
      return made;
    }
    if (lex_.accept("[")) {
      made = primary(open);
      if (made.kind == Kind::Immediate) made.reg = -1;
      made.kind = Kind::Address;
      if (lex_.accept("+")) made.value += primary(open).value;
      while (lex_.accept(",")) made.parts.push_back(primary(open));
      lex_.expect("]");
      return made;
    }
    const bool minus = lex_.accept("-");
    const std::string_view word = lex_.take();
    if (word == "_") return made;
    if (std::isdigit(static_cast<unsigned char>(word[0]))) {
      made.kind = Kind::Immediate;
      const bool real = word[0] == '0' && word.size() >= 10 && std::strchr("fFdD", word[1]);
      made.form = real ? std::tolower(word[1]) : 'i';
      made.value = real ? std::strtoull(std::string(word.substr(2)).c_str(), nullptr, 16) : integer(word);
      if (minus) made.value = -made.value;
      return made;
    }
    made.reg = find_register(word, open);
    made.kind = made.reg >= 0 ? Kind::Register : Kind::Symbol;
    if (made.kind == Kind::Symbol) {
      made.name = std::string(word);
      if (lex_.accept("+")) made.value = primary(open).value;
    }
    return made;
  }

  void resolve_jumps() {
    for (const Jump& jump : jumps_) {
      Statement& from = function_->statements[jump.statement];
      for (int scope : jump.scopes) {
        const auto found = scopes_[scope].labels.find(from.operands.at(0).name);
        if (found == scopes_[scope].labels.end()) continue;
        from.target = found->second;
        break;
      }
      if (from.target < 0) throw Malformed{"PTX line " + std::to_string(from.line) + ": a branch to nowhere"};
    }
  }

  Lexer lex_;
  std::unique_ptr<Module> module_;
  Function* function_ = nullptr;
  std::vector<Scope> scopes_;
  std::vector<Jump> jumps_;
  bool external_ = false;
  int element_bytes_ = 1, file_ = 0, source_line_ = 0;
};

}  // namespace

std::unique_ptr<Module> parse(const std::string& text, int architecture) { return Parser(text, architecture).run(); }

}  // namespace machine

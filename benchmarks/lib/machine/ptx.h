#pragma once
// A module of PTX as read: statements with their operands, registers, variables; nothing decoded yet.

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace machine {

enum class Kind { Register, Immediate, Address, Vector, Symbol, Sink, Pair };

struct Operand {
  Kind kind = Kind::Sink;
  int reg = -1;                // Register, or the base of an Address (-1: none)
  bool negated = false;        // !%p
  char form = 'i';             // of an Immediate: i integer, f bits of a float, d bits of a double
  int64_t value = 0;           // of an Immediate; the offset of an Address
  std::string name;            // of a Symbol (label, variable, function), or the variable an Address begins at
  std::vector<Operand> parts;  // of a Vector or a Pair; the coordinates of an Address into a tensor
};

struct Statement {
  std::string op;
  std::vector<Operand> operands;
  int predicate = -1;  // register
  bool negated = false;
  int line = 0;
  int file = 0, source_line = 0;
  int target = -1;  // of a branch: index of a statement
};

struct Register {
  std::string name;
  int bits = 32;     // 1 for predicates
  int special = -1;  // index into SPECIAL
};

enum class Space { Global, Shared, Local, Param, Const };

struct Variable {
  Space space;
  uint64_t bytes = 0, align = 1, offset = 0;  // the offset in its space; of a global: address of its memory
  bool external = false;                      // dynamic shared memory
  std::vector<uint8_t> contents;
};

struct Program;  // decoded, see program.h

struct Function {
  std::string name;
  std::vector<Register> registers;
  std::vector<Statement> statements;
  std::map<std::string, Variable> variables;  // parameters, local and shared arrays of its own
  uint64_t param_bytes = 0, local_bytes = 0, shared_bytes = 0;
  uint32_t required_threads[3] = {0, 0, 0}, max_threads[3] = {0, 0, 0}, max_registers = 0;
  std::shared_ptr<Program> program;
};

struct Module {
  int architecture = 0;
  std::map<int, std::string> files;
  std::map<std::string, Variable> variables;
  std::vector<std::unique_ptr<uint8_t[]>> memory;  // of global variables
  uint64_t shared_bytes = 0;                       // of shared variables outside of functions
  std::vector<std::unique_ptr<Function>> functions;
  std::string entry_names, counts;  // texts handed out by the interface
};

// Special registers that the machine fills in, by index.
constexpr const char* SPECIAL[] = {
    "%tid.x",
    "%tid.y",
    "%tid.z",
    "%ntid.x",
    "%ntid.y",
    "%ntid.z",
    "%ctaid.x",
    "%ctaid.y",
    "%ctaid.z",
    "%nctaid.x",
    "%nctaid.y",
    "%nctaid.z",
    "%laneid",
    "%warpid",
    "%nwarpid",
    "%smid",
    "%nsmid",
    "%lanemask_eq",
    "%lanemask_lt",
    "%lanemask_le",
    "%lanemask_gt",
    "%lanemask_ge",
    "%clock",
    "%clock_hi",
    "%clock64",
    "%globaltimer",
    "%gridid",
    "%cluster_ctaid.x",
    "%cluster_ctaid.y",
    "%cluster_ctaid.z",
    "%cluster_nctaid.x",
    "%cluster_nctaid.y",
    "%cluster_nctaid.z",
    "%cluster_ctarank",
    "%cluster_nctarank",
    "%clusterid.x",
    "%clusterid.y",
    "%clusterid.z",
    "%nclusterid.x",
    "%nclusterid.y",
    "%nclusterid.z",
    "%is_explicit_cluster",
    "%dynamic_smem_size",
    "%total_smem_size",
};

struct Unknown {  // thrown: something the machine does not know
  std::string name;
  int line;
  std::string message;
};

struct Malformed {  // thrown: text that is not PTX
  std::string message;
};

std::unique_ptr<Module> parse(const std::string& text, int architecture);

}  // namespace machine

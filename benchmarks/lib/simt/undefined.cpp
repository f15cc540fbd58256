// Handlers of -fsanitize=undefined for undefined behaviour in a kernel: misaligned accesses above all, which a
// GPU refuses and most hosts do not. In place of the compiler's own library, which would only print.
#include <cstdint>
#include <string>

#include "machine.h"

namespace {

// The beginning of what every one of these functions is given, and of what the first is given
struct Source {
  const char* file;
  uint32_t line, column;
};
struct Mismatch {
  Source source;
  const void* type;
  unsigned char log_alignment, kind;
};

[[noreturn]] void undefined(const Source& source, const std::string& what) {
  simt::fail("thread " + std::to_string(simt::view.thread) + ", " + text(simt::Place{source.file, int(source.line)}) +
             ": " + what);
}

}  // namespace

extern "C" {

void __ubsan_handle_type_mismatch_v1(Mismatch* mismatch, uintptr_t address) {
  const uintptr_t alignment = uintptr_t(1) << mismatch->log_alignment;
  undefined(mismatch->source, !address              ? "access through a null pointer"
                              : address % alignment ? "address not aligned to " + std::to_string(alignment)
                                                    : "access beyond the object");
}

#define HANDLE(name, what) \
  void __ubsan_handle_##name(Source* source) { undefined(*source, what); }

HANDLE(out_of_bounds, "index outside of the array")
HANDLE(pointer_overflow, "pointer arithmetic overflows")
HANDLE(shift_out_of_bounds, "shift by too many bits, or of a negative number")
HANDLE(add_overflow, "sum of integers overflows")
HANDLE(sub_overflow, "difference of integers overflows")
HANDLE(mul_overflow, "product of integers overflows")
HANDLE(negate_overflow, "negated integer overflows")
HANDLE(divrem_overflow, "division by zero, or overflow")
HANDLE(float_cast_overflow, "floating-point number that the integer cannot hold")
HANDLE(load_invalid_value, "value that is none of its type's")
HANDLE(builtin_unreachable, "end of what must not end")
HANDLE(missing_return, "function without its return value")
HANDLE(nonnull_arg, "null argument")
HANDLE(nonnull_return_v1, "null returned")
HANDLE(invalid_builtin, "zero bits counted")
HANDLE(alignment_assumption, "address less aligned than was promised")
HANDLE(function_type_mismatch, "function of another type")
HANDLE(function_type_mismatch_v1, "function of another type")
HANDLE(vla_bound_not_positive, "array of no size")
}

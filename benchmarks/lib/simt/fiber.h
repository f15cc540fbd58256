// Fibers: stacks that one OS thread switches between without a system call.
#pragma once

#include <cstddef>

#if !defined(__x86_64__) && !defined(__aarch64__) && !defined(SIMT_UCONTEXT)
#define SIMT_UCONTEXT
#endif

#ifdef SIMT_UCONTEXT
#include <ucontext.h>
#endif

namespace simt {

// Where a fiber, or the thread that started the fibers, goes on.
#ifdef SIMT_UCONTEXT
using Context = ucontext_t;
#else
struct Context {
  void* stack_pointer;
};
#endif

// The first switch to `context` calls `entry` on that stack; `entry` must not return.
void prepare(Context& context, char* stack, size_t bytes, void (*entry)());
void switch_context(Context& from, Context& to);

}  // namespace simt

// Tasks handed out in order, one at a time, to however many threads there are.

// One buffer, a piece per slot; on huge pages where there are some, for rows are pages apart (5% of backward). One is kept
// for the next call, unless it is large: new pages cost short sequences more than their products.
struct Scratch {
  static constexpr size_t HEAD = 4096, HUGE_PAGE = 2 << 20, MOST_KEPT = 64 << 20;
  char* data = nullptr;  // a head with its own size comes before
  int64_t bytes_per_slot;

  Scratch(int64_t slots, int64_t bytes) : bytes_per_slot(round_up(bytes, 4096)) {
    const size_t total = HEAD + static_cast<size_t>(slots * bytes_per_slot);
    void* memory = __atomic_exchange_n(&kept, static_cast<void*>(nullptr), __ATOMIC_ACQUIRE);
    if (memory == nullptr || *static_cast<size_t*>(memory) < total) {
      free(memory);
      if (posix_memalign(&memory, HUGE_PAGE, total) != 0) return;
#ifdef MADV_HUGEPAGE
      madvise(memory, total, MADV_HUGEPAGE);
#endif
      *static_cast<size_t*>(memory) = total;
    }
    data = static_cast<char*>(memory) + HEAD;
  }
  ~Scratch() {
    if (data == nullptr) return;
    void* memory = data - HEAD;
    if (*static_cast<size_t*>(memory) <= MOST_KEPT) memory = __atomic_exchange_n(&kept, memory, __ATOMIC_ACQ_REL);
    free(memory);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

 private:
  static inline void* kept = nullptr;
};

// run(task, slot_scratch) for task = 0 .. tasks-1, started in ascending order. False if memory runs out.
template <typename F>
INLINE bool for_each_task(int64_t tasks, int64_t threads, int64_t bytes, Parallel parallel, F run) {
  const int64_t slots = smaller(tasks, threads);
  if (slots == 0) return true;
  const Scratch scratch(slots, bytes);
  if (scratch.data == nullptr) return false;
  struct Context {
    int64_t next, tasks;
    const Scratch& scratch;
    F& run;
  } context{0, tasks, scratch, run};
  parallel(
      slots,
      [](void* opaque, int64_t slot) {
        Context& c = *static_cast<Context*>(opaque);
        for (;;) {
          const int64_t task = __atomic_fetch_add(&c.next, int64_t(1), __ATOMIC_RELAXED);
          if (task >= c.tasks) return;
          c.run(task, c.scratch.data + slot * c.scratch.bytes_per_slot);
        }
      },
      &context);
  return true;
}

// Lets tasks add to shared sums in a fixed order. A task only ever waits for tasks that were started before it.
struct Turns {
  int64_t* turn;

  void wait(int64_t queue, int64_t ticket) const {
    while (__atomic_load_n(turn + queue, __ATOMIC_ACQUIRE) != ticket) sched_yield();
  }
  void pass(int64_t queue, int64_t ticket) const { __atomic_store_n(turn + queue, ticket + 1, __ATOMIC_RELEASE); }
};

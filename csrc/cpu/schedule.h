// How a call is cut into tasks, and tasks handed out in order, one at a time, to however many threads there are.

constexpr int64_t BLOCK_M = 48;            // query rows of a tile at most; a multiple of every register tile's height
constexpr int64_t MAX_ROWS = 64;           // the same of every kind of kernel: bfloat16/schedule.h has another
constexpr int64_t FORWARD_BLOCK_N = 576;   // keys of a tile at most
constexpr int64_t BACKWARD_BLOCK_N = 288;  // keys of a tile of backward at most
constexpr int64_t KEY_GROUP = 96;          // keys that are skipped or taken together
constexpr int64_t RANGE_GROUPS = 24;  // groups of keys that backward takes all rows of a chunk through, then the next
constexpr int64_t MAX_SPAN = 512;     // largest difference of positions within a block of rows

// A tile begins at a multiple of this: whole vectors, and whole register tiles of keys.
constexpr int64_t KEY_STEP = KEY_GROUP / 2;

static_assert(BLOCK_M % PANEL_ROWS == 0 && BLOCK_M % ROW_ROWS == 0, "a block is whole register tiles");
static_assert(KEY_STEP % ROW_ROWS == 0 && KEY_STEP % LANES<float> == 0, "a key step is whole register tiles");

INLINE int64_t round_down(int64_t x, int64_t multiple) { return x / multiple * multiple; }

// The reach of query rows whose own keys are first_own .. last_own: the keys for whose distance rel_key has a row
struct Reach {
  int64_t begin, end;

  Reach(const RelAttention& p, int64_t first_own, int64_t last_own)
      : begin(larger(first_own - p.rel_key.max_distance, 0)),
        end(smaller(last_own - p.rel_key.max_distance + p.rel_len, p.mem_len + p.key_len)) {
    if (end <= begin) begin = end = 0;
  }
};

INLINE int64_t row_index_at(const RelAttention& p, int64_t b, int64_t sorted) {
  return p.rows.order == nullptr ? sorted : p.rows.order[b * p.length + sorted];
}
INLINE int64_t position_at(const RelAttention& p, int64_t b, int64_t sorted) {
  return p.rows.order == nullptr ? sorted : p.rows.position[b * p.length + sorted];
}

template <typename T>
struct Sizes;

// A task: a chunk of the query rows of one head of one sequence, and the keys that they may see.
struct Chunk {
  int64_t index, b, h;
  int64_t begin, end;     // rows sorted by position
  int64_t last_position;  // of its rows
  int64_t first_key;      // that is packed key 0; a multiple of KEY_GROUP
  int64_t keys;
  int64_t key_groups;   // groups of KEY_GROUP keys
  int64_t padded_keys;  // rounded up to whole vectors
  int64_t rel_first;    // row of rel_key that is packed row 0
  int64_t window;       // packed rows of rel_key, with room for a register tile

  template <typename T>
  Chunk(const RelAttention& p, const Sizes<T>& sizes, int64_t task)
      : index(task / p.heads / p.batch), b(task / p.heads % p.batch), h(task % p.heads) {
    begin = index * sizes.chunk_rows;
    end = smaller(begin + sizes.chunk_rows, p.length);
    last_position = position_at(p, b, end - 1);
    const int64_t first_position = position_at(p, b, begin);
    const Reach range(p, p.mem_len + first_position, p.mem_len + last_position);
    first_key = round_down(range.begin, KEY_GROUP);
    keys = range.end - first_key;
    key_groups = (keys + KEY_GROUP - 1) / KEY_GROUP;
    padded_keys = round_up(keys, LANES<T>);
    rel_first = p.rel_key.max_distance - p.mem_len - last_position + first_key;
    window = round_up(keys + last_position - first_position + ROW_ROWS, LANES<T>);
  }
};

// How large things are. Work is cut into chunks of query rows by shape, never by the number of threads: sums are then
// grouped the same way whoever computes them.
template <typename T>
struct Sizes {
  int64_t padded_dim;  // D rounded up to whole vectors
  int64_t chunk_rows, chunks;
  int64_t max_keys = 0;    // of a chunk, whole vectors
  int64_t max_window = 0;  // packed rows of rel_key that one chunk can need
  int64_t run = 1;  // sequences whose chunks of a head a thread takes one after the other, loading what they share once

  // `shares_rel_key`: sequences of the batch have the same rows of rel_key, and one gradient of them
  Sizes(const RelAttention& p, int64_t min_chunk_rows, bool shares_rel_key = false) {
    padded_dim = round_up(p.head_dim, LANES<T>);
    constexpr int64_t enough_tasks = 32;
    const int64_t wanted = p.length * p.batch * p.heads / enough_tasks;
    chunk_rows = round_up(smaller(larger(wanted, min_chunk_rows), 2048), BLOCK_M);
    chunks = (p.length + chunk_rows - 1) / chunk_rows;
    const int64_t sequences = p.rows.order == nullptr ? smaller(p.batch, 1) : p.batch;  // with chunks of their own
    for (int64_t index = 0; p.heads > 0 && index < chunks; ++index)
      for (int64_t b = 0; b < sequences; ++b) {
        const Chunk chunk(p, *this, (index * p.batch + b) * p.heads);
        max_keys = larger(max_keys, chunk.padded_keys);
        max_window = larger(max_window, chunk.window);
      }
    constexpr int64_t enough_runs = 64, enough_rows = 512;
    if (shares_rel_key && p.rows.order == nullptr && chunks == 1)
      run = larger(smaller(p.batch * p.heads / enough_runs, enough_rows / p.length), 1);
  }

  // Whether the sequence is the first, or the last, of its run
  bool starts_run(int64_t b) const { return b % run == 0; }
  bool ends_run(int64_t b, int64_t batch) const { return (b + 1) % run == 0 || b + 1 == batch; }
};

// run(chunk, slot_scratch) for every chunk, runs of them started in ascending order. False if memory runs out.
template <typename T, typename F>
INLINE bool for_each_chunk(const RelAttention& p, const Sizes<T>& sizes, int64_t threads, int64_t bytes,
                           Parallel parallel, F run) {
  const int64_t groups = (p.batch + sizes.run - 1) / sizes.run;
  const int64_t runs = sizes.chunks * groups * p.heads, slots = smaller(runs, threads);
  if (slots == 0) return true;
  const Scratch scratch(slots, bytes);
  if (scratch.data == nullptr) return false;
  struct Context {
    int64_t next, runs, groups;
    const RelAttention& p;
    const Sizes<T>& sizes;
    const Scratch& scratch;
    F& run;
  } context{0, runs, groups, p, sizes, scratch, run};
  parallel(
      slots,
      [](void* opaque, int64_t slot) {
        Context& c = *static_cast<Context*>(opaque);
        for (;;) {
          const int64_t drawn = __atomic_fetch_add(&c.next, int64_t(1), __ATOMIC_RELAXED);
          if (drawn >= c.runs) return;
          const int64_t h = drawn % c.p.heads, group = drawn / c.p.heads % c.groups;
          const int64_t index = drawn / c.p.heads / c.groups, first = group * c.sizes.run;
          for (int64_t b = first; b < smaller(first + c.sizes.run, c.p.batch); ++b)
            c.run(Chunk(c.p, c.sizes, (index * c.p.batch + b) * c.p.heads + h),
                  c.scratch.data + slot * c.scratch.bytes_per_slot);
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

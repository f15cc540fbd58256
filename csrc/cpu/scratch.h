// Sizes of one call and the memory its threads work in.

constexpr int64_t BLOCK_ROWS = 48;     // query rows worked on together; a multiple of every tile height
constexpr int64_t KEY_GROUP = 96;      // keys that are skipped or taken together
constexpr int64_t MAX_SPAN = 512;      // largest difference of positions within a block
constexpr int64_t MARGIN = 16;         // zeros on both sides of a row of dS, at least a tile height
constexpr int64_t FORWARD_KEYS = 576;  // keys per step at most
constexpr int64_t BACKWARD_KEYS = 288;

static_assert(BLOCK_ROWS % PANEL_ROWS == 0 && BLOCK_ROWS % ROW_ROWS == 0, "a block is whole register tiles");
static_assert(KEY_GROUP % ROW_ROWS == 0 && MARGIN >= ROW_ROWS && MARGIN >= PANEL_ROWS, "a key group is whole tiles");

INLINE int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }
INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Hands out aligned pieces of a buffer; with a null base it only counts.
struct Carver {
  char* base;
  int64_t used;

  template <typename T>
  T* take(int64_t count) {
    used = round_up(used, 64);
    T* piece = base == nullptr ? nullptr : reinterpret_cast<T*>(base + used);
    used += count * static_cast<int64_t>(sizeof(T));
    return piece;
  }
};

// What follows from the shapes alone. Work is cut into chunks of query rows by shape, never by the number of threads:
// sums are then grouped the same way whoever computes them.
template <typename T>
struct Sizes {
  int64_t keys;    // M + K
  int64_t groups;  // groups of KEY_GROUP keys
  int64_t keys_padded;
  int64_t width;  // D rounded up to whole vectors
  int64_t chunk_rows, chunks;
  int64_t window;     // rows of rel_key that one chunk can need, with room for whole register tiles
  bool ends_at_zero;  // rel_key has no rows for keys ahead of the query

  Sizes(const RelAttention& p, int64_t least_rows) {
    keys = p.mem_len + p.key_len;
    groups = (keys + KEY_GROUP - 1) / KEY_GROUP;
    keys_padded = groups * KEY_GROUP;
    width = round_up(p.head_dim, LANES<T>);
    constexpr int64_t enough_tasks = 32;
    const int64_t wanted = p.length * p.batch * p.heads / enough_tasks;
    chunk_rows = round_up(smaller(larger(wanted, least_rows), 2048), BLOCK_ROWS);
    chunks = (p.length + chunk_rows - 1) / chunk_rows;
    const int64_t span = p.rows.order == nullptr ? smaller(chunk_rows, p.length) : p.key_len;
    window = round_up(keys_padded + span + 4 * PANEL_WIDTH<T>, PANEL_WIDTH<T>);
    ends_at_zero = p.rel_len == p.rel_key.max_distance + 1;
  }
};

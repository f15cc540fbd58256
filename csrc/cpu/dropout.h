// Dropout: Philox-4x32-10 as xlnet_kernels/dropout.py defines it; 64 columns take the four words of 16 counters.

constexpr int64_t DROPOUT_GROUP = 64;

// Numbers that the factors of `keys` columns need
constexpr int64_t dropout_elements(int64_t keys) { return keys + 2 * DROPOUT_GROUP; }

// 1 / (1 - p) where columns first .. first+count-1 of row i are kept, 0 where they are dropped.
// `factors` has room for dropout_elements(count); returns where column `first` lies in it.
template <typename T>
static const T* dropout_factors(const RelAttention& p, int64_t b, int64_t h, int64_t i, int64_t first, int64_t count,
                                T* factors) {
  const T kept = static_cast<T>(1.0 / (1.0 - p.dropout.p));
  const uint64_t seed = p.dropout.state[0], offset = p.dropout.state[1];
  const int64_t first_head = offset >> 32 & 0xFFFFF, other_heads = offset >> 52;
  const int64_t head = b * (p.heads + other_heads) + h + first_head;
  const int64_t group0 = first / DROPOUT_GROUP, groups = (first + count - 1) / DROPOUT_GROUP - group0 + 1;
  for (int64_t group = group0; group < group0 + groups; ++group) {
    uint32_t c0[16], c1[16], c2[16], c3[16];
    for (int l = 0; l < 16; ++l) {
      c0[l] = static_cast<uint32_t>(group * 16 + l);
      c1[l] = static_cast<uint32_t>(i);
      c2[l] = static_cast<uint32_t>(head);
      c3[l] = static_cast<uint32_t>(offset);
    }
    uint32_t key0 = static_cast<uint32_t>(seed);
    uint32_t key1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u) {
      for (int l = 0; l < 16; ++l) {
        const uint64_t a = static_cast<uint64_t>(c0[l]) * 0xD2511F53u, b = static_cast<uint64_t>(c2[l]) * 0xCD9E8D57u;
        c0[l] = static_cast<uint32_t>(b >> 32) ^ c1[l] ^ key0;
        c1[l] = static_cast<uint32_t>(b);
        c2[l] = static_cast<uint32_t>(a >> 32) ^ c3[l] ^ key1;
        c3[l] = static_cast<uint32_t>(a);
      }
    }
    T* to = factors + (group - group0) * DROPOUT_GROUP;
    for (int l = 0; l < 16; ++l) {
      to[l] = c0[l] >= p.dropout.threshold ? kept : T(0);
      to[16 + l] = c1[l] >= p.dropout.threshold ? kept : T(0);
      to[32 + l] = c2[l] >= p.dropout.threshold ? kept : T(0);
      to[48 + l] = c3[l] >= p.dropout.threshold ? kept : T(0);
    }
  }
  return factors + (first - group0 * DROPOUT_GROUP);
}

// Probabilities of row i against keys first .. first+count-1, dropped out
template <typename T>
static void apply_dropout(const RelAttention& p, int64_t b, int64_t h, int64_t i, int64_t first, int64_t count,
                          T* factors, T* P) {
  if (p.dropout.p == 0 || count == 0) return;
  const T* kept = dropout_factors(p, b, h, i, first, count, factors);
  for (int64_t j = 0; j < count; ++j) P[j] *= kept[j];
}

// Every way of csrc/cuda/shift.cuh and csrc/cuda/sm90/shift.cuh, for test_shift.py.
#include "cuda/sm90/shift.cuh"

namespace xlnet_kernels::cuda {

enum Way : int { DEFINITION, KNOWN_SIXTEEN, KNOWN_WINDOW, KNOWN_HALVES, FOUND_SIXTEEN, FOUND_WINDOW, FOUND_HALVES };

struct Shift {
  const float* band;  // 64 rows of 128 columns
  const int* shifts;  // of each row; -1: not served
  float* scores;      // 64 rows of 64 columns, added to or, where the way does not add, overwritten
  int way;
};

// Four warps, each with 16 rows as products leave them.
KERNEL shift_rows(Shift s) {
  const Lane lane = this_lane();
  const int first_row = 16 * lane.warp + lane.g;
  const auto load = [&](float (*tiles)[4], const float* from, int width, int column, int count) {
    for (int n = 0; n < count; ++n)
      for (int i = 0; i < 4; ++i) {
        const int at = column + 8 * n + 2 * lane.t + i % 2;
        tiles[n][i] = at < width ? from[(first_row + i / 2 * 8) * width + at] : NAN;
      }
  };
  const auto load_band = [&](float (*tiles)[4], int column, int count) { load(tiles, s.band, 128, column, count); };
  const int shifts[2] = {s.shifts[first_row], s.shifts[first_row + 8]};
  float score[8][4];
  WindowHalf lower, upper;
  load(score, s.scores, 64, 0, 8);
  load_band(lower, 0, 8);
  load_band(upper, 64, 8);
  Offered carried[2];
  const KnownShift known(lane.id);
  FoundShift found(lane.id);
  found.find(shifts, lane.id);
  switch (s.way) {
    case DEFINITION:
      for (int n = 0; n < 8; ++n)
        for (int i = 0; i < 4; ++i)
          if (shifts[i / 2] >= 0)
            score[n][i] +=
                shifted_column(s.band + (first_row + i / 2 * 8) * 128, shifts[i / 2], 8 * n + 2 * lane.t + i % 2);
      break;
    case KNOWN_SIXTEEN:
      for (int n = 0; n < 8; n += 2) {
        Sixteen near, far;
        load_band(near, 16 * (3 - lane.warp) + 8 * n, 2);
        load_band(far, 16 * (3 - lane.warp) + 8 * n + 16, 2);
        add_known(score + n, near, far, known_shift(lane.id));
      }
      break;
    case KNOWN_WINDOW:
      known.add_window(score, lower, upper, lane.warp);
      break;
    case KNOWN_HALVES:
      known.add_lower(score, lower, carried, lane.warp);
      known.add_upper(score, upper, carried, lane.warp);
      break;
    case FOUND_SIXTEEN: {
      BandSlices<64> slices;
      slices.find(shifts, lane.id);
      slices.for_each([&](int r) { return shifts[r]; }, true, lane.id,
                      [&](const BandSlice& slice) {
                        for (int n = 0; n < 8; n += 2) {
                          Sixteen near, far;
                          load_band(near, slice.begin + 8 * n, 2);
                          load_band(far, slice.begin + 8 * n + 16, 2);
                          add_found(score + n, near, far, slice.shift);
                        }
                      });
      break;
    }
    case FOUND_WINDOW:
      found.add_window(score, lower, upper, lane.warp);
      found.hide_others(score);
      break;
    case FOUND_HALVES:
      found.take_lower(score, lower);
      found.take_upper(score, upper);
      found.hide_others(score);
      break;
    default:
      break;
  }
  for (int n = 0; n < 8; ++n)
    for (int i = 0; i < 4; ++i) s.scores[(first_row + i / 2 * 8) * 64 + 8 * n + 2 * lane.t + i % 2] = score[n][i];
}

}  // namespace xlnet_kernels::cuda

extern "C" const char* run_shift(xlnet_kernels::cuda::Shift s) {
  return xlnet_kernels::cuda::launch(xlnet_kernels::cuda::shift_rows, {1, 1, 1}, 128, 0, nullptr, s);
}

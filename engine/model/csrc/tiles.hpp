// Small products: a few rows of activations with a few panels of a matrix, summed in registers.
//
// Path: matmul.hpp -> here -> amx.hpp where the CPU has it. Each element is summed over the columns
// in ascending order whatever the shape of the tile, so a row of a product does not depend on its
// batch; AMX, which sums in another order, is left out when that is asked for.
#pragma once

#include <utility>

#include "amx.hpp"
#include "packed.hpp"

namespace qd {

constexpr int MOST_ROWS = 8;    // activation rows of a tile in registers
constexpr int MOST_PANELS = 6;  // panels of a task
constexpr int FEW_ROWS = 4;  // up to here a float tile has 6 panels, beyond 3: 24 sums either way
constexpr int AHEAD = 2048;  // bytes that a tile of several rows prefetches: measured on Zen 4

// sums[rows][panels][16] of activation rows first_row.. with consecutive panels, `stride` bytes
// apart.
using Tile = void (*)(const Activations&, int first_row, const char* panel, size_t stride,
                      float* sums);

template <int ROWS, int PANELS>
void store_sums(const __m512 (&sum)[ROWS][PANELS], float* sums) {
  for (int r = 0; r < ROWS; ++r)
    for (int p = 0; p < PANELS; ++p) _mm512_storeu_ps(sums + (r * PANELS + p) * LANES, sum[r][p]);
}

template <int ROWS, int PANELS>
void float_tile(const Activations& x, int first_row, const char* panel, size_t stride,
                float* sums) {
  __m512 sum[ROWS][PANELS];
  const float* rows[ROWS];
  for (int r = 0; r < ROWS; ++r) rows[r] = x.row<float>(first_row + r);
  for (auto& line : sum)
    for (__m512& value : line) value = _mm512_setzero_ps();
  for (int k = 0; k < x.columns; ++k) {
    __m512 weight[PANELS];
#pragma GCC unroll 6
    for (int p = 0; p < PANELS; ++p) {
      const char* at = panel + static_cast<size_t>(p) * stride + static_cast<size_t>(k) * 64;
      if (ROWS > 1) _mm_prefetch(at + AHEAD, _MM_HINT_T0);
      weight[p] = _mm512_loadu_ps(at);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const __m512 value = _mm512_set1_ps(rows[r][k]);
#pragma GCC unroll 6
      for (int p = 0; p < PANELS; ++p) sum[r][p] = _mm512_fmadd_ps(weight[p], value, sum[r][p]);
    }
  }
  store_sums<ROWS, PANELS>(sum, sums);
}

template <int ROWS, int PANELS>
void bf16_tile(const Activations& x, int first_row, const char* panel, size_t stride, float* sums) {
  __m512 sum[ROWS][PANELS];
  const int32_t* rows[ROWS];
  for (int r = 0; r < ROWS; ++r)
    rows[r] = reinterpret_cast<const int32_t*>(x.row<bf16>(first_row + r));
  for (auto& line : sum)
    for (__m512& value : line) value = _mm512_setzero_ps();
  for (int pair = 0; pair < x.columns / 2; ++pair) {
    __m512i weight[PANELS];
#pragma GCC unroll 6
    for (int p = 0; p < PANELS; ++p) {
      const char* at = panel + static_cast<size_t>(p) * stride + static_cast<size_t>(pair) * 64;
      if (ROWS > 1) _mm_prefetch(at + AHEAD, _MM_HINT_T0);
      weight[p] = _mm512_loadu_si512(at);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const __m512i values = _mm512_set1_epi32(rows[r][pair]);
#pragma GCC unroll 6
      for (int p = 0; p < PANELS; ++p) sum[r][p] = dot_pairs(sum[r][p], weight[p], values);
    }
  }
  store_sums<ROWS, PANELS>(sum, sums);
}

// The codes of one group: register i holds input columns 4i..4i+3 of the 16 rows, as unsigned
// bytes.
template <Kind KIND>
void unpack_group(const char* codes, __m512i (&bytes)[8]) {
  if (KIND == INT8) {
    for (int i = 0; i < 8; ++i) bytes[i] = _mm512_loadu_si512(codes + i * 64);
    return;
  }
  const __m512i low = _mm512_set1_epi8(0x0F);
  for (int i = 0; i < 4; ++i) {
    const __m512i both = _mm512_loadu_si512(codes + i * 64);
    bytes[2 * i] = _mm512_and_si512(both, low);
    bytes[2 * i + 1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
  }
}

template <Kind KIND, int ROWS>
void quantised_tile(const Activations& x, int first_row, const char* panel, size_t, float* sums) {
  constexpr size_t STEP = 64 + (KIND == INT4 ? GROUP * PANEL / 2 : GROUP * PANEL);
  __m512 sum[ROWS][1];
  const int32_t* rows[ROWS];
  const float* scales[ROWS];
  const float* code_sums[ROWS];
  for (int r = 0; r < ROWS; ++r) {
    rows[r] = reinterpret_cast<const int32_t*>(x.row<int8_t>(first_row + r));
    scales[r] = x.scales + x.group(first_row + r);
    code_sums[r] = x.sums + x.group(first_row + r);
    sum[r][0] = _mm512_setzero_ps();
  }
  for (int g = 0; g < x.columns / GROUP; ++g, panel += STEP) {
    const __m512 scale =
        _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(panel)));
    const __m512 minimum =
        _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(panel + 32)));
    __m512i codes[8];
    for (size_t line = 0; ROWS > 1 && line < STEP; line += 64)
      _mm_prefetch(panel + AHEAD + line, _MM_HINT_T0);
    unpack_group<KIND>(panel + 64, codes);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      __m512i even = _mm512_setzero_si512();
      __m512i odd = _mm512_setzero_si512();
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        even = dot_bytes(even, codes[2 * i], _mm512_set1_epi32(rows[r][g * 8 + 2 * i]));
        odd = dot_bytes(odd, codes[2 * i + 1], _mm512_set1_epi32(rows[r][g * 8 + 2 * i + 1]));
      }
      const __m512 dot = _mm512_cvtepi32_ps(_mm512_add_epi32(even, odd));
      sum[r][0] =
          _mm512_fmadd_ps(dot, _mm512_mul_ps(scale, _mm512_set1_ps(scales[r][g])), sum[r][0]);
      sum[r][0] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(code_sums[r][g]), sum[r][0]);
    }
  }
  store_sums<ROWS, 1>(sum, sums);
}

template <int ROWS>
Tile float_tile_of(Kind kind, int panels) {
  static constexpr Tile FLOATS[MOST_PANELS] = {float_tile<ROWS, 1>, float_tile<ROWS, 2>,
                                               float_tile<ROWS, 3>, float_tile<ROWS, 4>,
                                               float_tile<ROWS, 5>, float_tile<ROWS, 6>};
  static constexpr Tile HALVES[MOST_PANELS] = {bf16_tile<ROWS, 1>, bf16_tile<ROWS, 2>,
                                               bf16_tile<ROWS, 3>, bf16_tile<ROWS, 4>,
                                               bf16_tile<ROWS, 5>, bf16_tile<ROWS, 6>};
  return (kind == FLOAT32 ? FLOATS : HALVES)[panels - 1];
}

template <int... ROWS>
Tile tile_of(Kind kind, int rows, int panels, std::integer_sequence<int, ROWS...>) {
  static constexpr Tile FOUR_BITS[] = {quantised_tile<INT4, ROWS + 1>...};
  static constexpr Tile EIGHT_BITS[] = {quantised_tile<INT8, ROWS + 1>...};
  if (quantised(kind)) return (kind == INT4 ? FOUR_BITS : EIGHT_BITS)[rows - 1];
  using Of = Tile (*)(Kind, int);
  static constexpr Of FLOATS[] = {float_tile_of<ROWS + 1>...};
  return FLOATS[rows - 1](kind, panels);
}

// A tile and its size; `height` is the rows of sums that it writes.
struct Shape {
  Tile tile;
  int rows;
  int panels;
  int height;
};

// The best tile for a corner of a product that is still to do.
inline Shape shape_of(const Activations& x, int rows, int panels) {
  if (amx::wanted(x)) {
    const int most = std::min(rows, 2 * amx::ROWS), wide = std::min(panels, 2);
    return {wide == 2 ? amx::tile<2> : amx::tile<1>, most, wide,
            (most + amx::ROWS - 1) / amx::ROWS * amx::ROWS};
  }
  const int high = std::min(rows, MOST_ROWS);
  const int width = quantised(x.kind) ? 1 : high > FEW_ROWS ? MOST_PANELS / 2 : MOST_PANELS;
  const int wide = std::min(panels, width);
  return {tile_of(x.kind, high, wide, std::make_integer_sequence<int, MOST_ROWS>{}), high, wide,
          high};
}

}  // namespace qd

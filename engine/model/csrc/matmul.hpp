// Packed matrices and the products of activations with them.
//
// Path: layer.hpp -> here. A matrix [rows, columns] is stored in panels of 16 rows so that one
// register holds one (or, for bf16, a pair of) input columns of all 16 rows. Each element of a
// product is summed over the columns in ascending order, whatever the number of activation rows or
// threads, so a row of the result does not depend on its batch.
#pragma once

#include <algorithm>
#include <utility>

#include "pool.hpp"
#include "simd.hpp"

namespace qd {

enum Kind : int32_t { FLOAT32 = 0, BFLOAT16 = 1, INT4 = 2, INT8 = 3 };

constexpr int PANEL = LANES;    // rows of a panel
constexpr int GROUP = 32;       // columns that share a scale and a minimum, for INT4 and INT8
constexpr int MOST_ROWS = 8;    // activation rows of a tile
constexpr int MOST_PANELS = 6;  // panels of a task
constexpr int FEW_ROWS = 4;  // up to here a float tile has 6 panels, beyond 3: 24 sums either way
constexpr int AHEAD = 2048;  // bytes that a tile of several rows prefetches: measured on Zen 4

inline bool quantised(Kind kind) { return kind == INT4 || kind == INT8; }

// Columns with the padding that a kind needs.
inline int padded_columns(Kind kind, int columns) {
  const int multiple = quantised(kind) ? GROUP : 2;
  return (columns + multiple - 1) / multiple * multiple;
}

// Bytes of one panel. Quantised panels hold, per group, 16 fp16 scales, 16 fp16 minima and the
// codes.
inline size_t panel_bytes(Kind kind, int columns) {
  const size_t padded = static_cast<size_t>(padded_columns(kind, columns));
  switch (kind) {
    case FLOAT32:
      return padded * PANEL * 4;
    case BFLOAT16:
      return padded * PANEL * 2;
    case INT4:
      return padded / GROUP * (64 + GROUP * PANEL / 2);
    case INT8:
      return padded / GROUP * (64 + GROUP * PANEL);
  }
  return 0;
}

struct Matrix {
  const char* data;
  const float* bias;  // [rows], or null
  int32_t kind;
  int32_t rows;
  int32_t columns;
  int32_t padding;

  Kind form() const { return static_cast<Kind>(kind); }
  int panels() const { return (rows + PANEL - 1) / PANEL; }
  const char* panel(int index) const {
    return data + panel_bytes(form(), columns) * static_cast<size_t>(index);
  }
};

// Activations [rows, columns] in the form that a kind of matrix multiplies.
struct Activations {
  Kind kind;
  int rows;
  int columns;    // padded
  void* data;     // float, bf16 or int8
  float* scales;  // [rows, columns / GROUP], quantised kinds only
  float* sums;    // likewise: scale times the sum of the codes

  template <class T>
  T* row(int index) const {
    return static_cast<T*>(data) + static_cast<size_t>(index) * static_cast<size_t>(columns);
  }
  size_t group(int index) const {
    return static_cast<size_t>(index) * static_cast<size_t>(columns / GROUP);
  }
};

// ---------------------------------------------------------------- activations

// One row of x [columns], scaled by `scale` and, if given, by `weight` [columns], into `out`.
inline void prepare_row(const float* x, const float* weight, float scale, int columns,
                        const Activations& out, int row) {
  const __m512 factor = _mm512_set1_ps(scale);
  const auto load = [&](int at) {
    const __mmask16 live = at < columns ? first_lanes(columns - at) : 0;
    __m512 value = _mm512_mul_ps(_mm512_maskz_loadu_ps(live, x + at), factor);
    return weight ? _mm512_mul_ps(value, _mm512_maskz_loadu_ps(live, weight + at)) : value;
  };
  if (out.kind == FLOAT32) {
    for (int at = 0; at < out.columns; at += LANES)
      _mm512_mask_storeu_ps(out.row<float>(row) + at, first_lanes(out.columns - at), load(at));
    return;
  }
  if (out.kind == BFLOAT16) {
    for (int at = 0; at < out.columns; at += LANES)
      _mm256_mask_storeu_epi16(out.row<bf16>(row) + at, first_lanes(out.columns - at),
                               narrow(load(at)));
    return;
  }
  for (int at = 0; at < out.columns; at += GROUP) {
    const __m512 low = load(at);
    const __m512 high = load(at + LANES);
    const float largest =
        _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high)));
    const __m512 inverse = _mm512_set1_ps(largest > 0.0f ? 127.0f / largest : 0.0f);
    const __m512i low_codes = _mm512_cvtps_epi32(_mm512_mul_ps(low, inverse));
    const __m512i high_codes = _mm512_cvtps_epi32(_mm512_mul_ps(high, inverse));
    int8_t* codes = out.row<int8_t>(row) + at;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), _mm512_cvtepi32_epi8(low_codes));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + LANES), _mm512_cvtepi32_epi8(high_codes));
    const size_t group = out.group(row) + static_cast<size_t>(at / GROUP);
    out.scales[group] = largest / 127.0f;
    out.sums[group] =
        out.scales[group] *
        static_cast<float>(_mm512_reduce_add_epi32(_mm512_add_epi32(low_codes, high_codes)));
  }
}

// 1 / sqrt(mean(x^2) + epsilon) over [columns].
inline float norm_scale(const float* x, int columns, float epsilon) {
  __m512 sum = _mm512_setzero_ps();
  for (int at = 0; at < columns; at += LANES) {
    const __m512 value = _mm512_maskz_loadu_ps(first_lanes(columns - at), x + at);
    sum = _mm512_fmadd_ps(value, value, sum);
  }
  return 1.0f / std::sqrt(_mm512_reduce_add_ps(sum) / static_cast<float>(columns) + epsilon);
}

// ---------------------------------------------------------------- tiles

// sums[ROWS][PANELS][16] of activation rows first_row.. with consecutive panels.
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

// ---------------------------------------------------------------- products

enum Finish { STORE, ADD, GATE_SILU, GATE_GELU };

// Where the sums go. GATE: panels alternate between gate and up, and out [rows, matrix rows / 2]
// gets activation(gate) * up. ADD: out += sums. Bias comes first, then the cap.
struct Output {
  float* data;
  int stride;
  Finish finish;
  float cap;
};

inline void finish_panel(const Matrix& w, int panel, __m512 sums, const Output& out, int row) {
  const int first = panel * PANEL;
  const __mmask16 live = first_lanes(w.rows - first);
  if (w.bias) sums = _mm512_add_ps(sums, _mm512_maskz_loadu_ps(live, w.bias + first));
  float* to = out.data + static_cast<size_t>(row) * static_cast<size_t>(out.stride) + first;
  if (out.finish == ADD) sums = _mm512_add_ps(sums, _mm512_maskz_loadu_ps(live, to));
  _mm512_mask_storeu_ps(to, live, soft_cap(sums, out.cap));
}

inline void finish_gated(const Matrix& w, int panel, __m512 gate, __m512 up, const Output& out,
                         int row) {
  if (w.bias) {
    gate = _mm512_add_ps(gate, _mm512_loadu_ps(w.bias + panel * PANEL));
    up = _mm512_add_ps(up, _mm512_loadu_ps(w.bias + (panel + 1) * PANEL));
  }
  const int first = panel / 2 * PANEL;
  float* to = out.data + static_cast<size_t>(row) * static_cast<size_t>(out.stride) + first;
  const __m512 active = out.finish == GATE_SILU ? silu(gate) : gelu_tanh(gate);
  _mm512_mask_storeu_ps(to, first_lanes(out.stride - first), _mm512_mul_ps(active, up));
}

// Rows first_row..last_row with `panels` panels from `panel` on; for GATE both are even.
inline void multiply_block(const Activations& x, const Matrix& w, const Output& out, int first_row,
                           int last_row, int panel, int panels) {
  alignas(64) float sums[MOST_ROWS * MOST_PANELS * LANES];
  const size_t stride = panel_bytes(w.form(), w.columns);
  const bool gated = out.finish == GATE_SILU || out.finish == GATE_GELU;
  for (int row = first_row; row < last_row; row += MOST_ROWS) {
    const int rows = std::min(MOST_ROWS, last_row - row);
    const int width = quantised(x.kind) ? 1 : rows > FEW_ROWS ? MOST_PANELS / 2 : MOST_PANELS;
    for (int p = 0; p < panels; p += width) {
      const Tile tile = tile_of(x.kind, rows, std::min(width, panels - p),
                                std::make_integer_sequence<int, MOST_ROWS>{});
      tile(x, row, w.panel(panel + p), stride, sums + p * rows * LANES);
    }
    const auto at = [&](int r,
                        int p) {  // tiles one after the other, each [rows][panels of the tile]
      const int first = p / width * width;
      return _mm512_load_ps(
          sums + (first * rows + r * std::min(width, panels - first) + p - first) * LANES);
    };
    for (int r = 0; r < rows; ++r) {
      if (gated) {
        for (int p = 0; p < panels; p += 2)
          finish_gated(w, panel + p, at(r, p), at(r, p + 1), out, row + r);
      } else {
        for (int p = 0; p < panels; ++p) finish_panel(w, panel + p, at(r, p), out, row + r);
      }
    }
  }
}

// out = x * w^T for all rows; tasks are blocks of panels, and of rows where there are many.
inline void multiply(Pool& pool, const Activations& x, const Matrix& w, const Output& out) {
  const bool gated = out.finish == GATE_SILU || out.finish == GATE_GELU;
  const int wanted = 2 * pool.threads();
  int width = MOST_PANELS;
  while (width > 2 && (w.panels() + width - 1) / width < wanted) width -= 2;
  if (!gated && width == 2 && w.panels() < 2 * wanted) width = 1;
  const int blocks = (w.panels() + width - 1) / width;
  const int splits = blocks >= 2 * wanted ? 1 : std::clamp(x.rows / 64, 1, 2 * wanted);
  const int rows = ((x.rows + splits - 1) / splits + 7) / 8 * 8;
  const int chunks = (x.rows + rows - 1) / rows;
  pool.run(blocks * chunks, [&](int task) {
    const int panel = task / chunks * width;
    const int first = task % chunks * rows;
    multiply_block(x, w, out, first, std::min(x.rows, first + rows), panel,
                   std::min(width, w.panels() - panel));
  });
}

}  // namespace qd

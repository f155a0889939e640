// Products of activations with packed matrices, on all threads.
//
// Path: layer.hpp -> here -> tiles.hpp.
#pragma once

#include "pool.hpp"
#include "tiles.hpp"

namespace qd {

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
  alignas(64) float sums[2 * amx::ROWS * MOST_PANELS * LANES];
  const size_t stride = panel_bytes(w.form(), w.columns);
  const bool gated = out.finish == GATE_SILU || out.finish == GATE_GELU;
  for (int row = first_row, rows; row < last_row; row += rows) {
    const Shape full = shape_of(x, last_row - row, panels);
    rows = full.rows;
    for (int p = 0; p < panels; p += full.panels) {
      const Shape shape = shape_of(x, rows, std::min(full.panels, panels - p));
      shape.tile(x, row, w.panel(panel + p), stride, sums + p * full.height * LANES);
    }
    const auto at = [&](int r, int p) {  // tiles one after the other, each [height][its panels]
      const int first = p / full.panels * full.panels, wide = std::min(full.panels, panels - first);
      return _mm512_load_ps(sums + (first * full.height + r * wide + p - first) * LANES);
    };
    for (int r = 0; r < rows; ++r) {
      for (int p = 0; gated && p < panels; p += 2)
        finish_gated(w, panel + p, at(r, p), at(r, p + 1), out, row + r);
      for (int p = 0; !gated && p < panels; ++p) finish_panel(w, panel + p, at(r, p), out, row + r);
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
  constexpr int MULTIPLE = 2 * amx::ROWS;  // whole tiles of either kind
  const int rows = ((x.rows + splits - 1) / splits + MULTIPLE - 1) / MULTIPLE * MULTIPLE;
  const int chunks = (x.rows + rows - 1) / rows;
  pool.run(blocks * chunks, [&](int task) {
    const int panel = task / chunks * width;
    const int first = task % chunks * rows;
    multiply_block(x, w, out, first, std::min(x.rows, first + rows), panel,
                   std::min(width, w.panels() - panel));
  });
}

}  // namespace qd

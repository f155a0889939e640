// Intel's matrix unit for bf16 products of many rows; empty on CPUs without it.
//
// Path: tiles.hpp -> here. A packed bf16 panel is what TDPBF16PS wants as its second operand: 16
// pairs of columns of 16 rows are 1 KiB. With QD_EMULATE_AMX the instructions are functions, so
// that the rest can be tested on any CPU.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

#include "packed.hpp"

#ifdef QD_EMULATE_AMX
#include "amx_emulation.hpp"
#endif

namespace qd::amx {

constexpr int ROWS = 16;     // of a tile register
constexpr int COLUMNS = 32;  // bf16 values of a row of it

#if defined(__AMX_BF16__) || defined(QD_EMULATE_AMX)
constexpr int FEWEST_ROWS = 16;  // below, the weights are read no faster and AVX-512 will do
constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;  // arch/x86/include/uapi

inline std::atomic<bool>& enabled() {
  static std::atomic<bool> value{false};
  return value;
}

// Asks the kernel for the registers' memory; the permission is the process's.
inline void enable() {
#ifdef QD_EMULATE_AMX
  enabled().store(true);
#else
  enabled().store(syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0);
#endif
}

inline bool wanted(const Activations& x) {
  return x.kind == BFLOAT16 && x.rows >= FEWEST_ROWS && x.columns % COLUMNS == 0 &&
         enabled().load(std::memory_order_relaxed);
}

// All eight registers have 16 rows of 64 bytes.
struct alignas(64) Palette {
  uint8_t id = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Up to 32 rows with PANELS panels: sums [16 or 32][PANELS][16]. Rows beyond the last are computed
// from whatever lies behind it (the buffer of activations is large enough) and never used.
template <int PANELS>
void tile(const Activations& x, int first_row, const char* panel, size_t stride, float* sums) {
  static const Palette palette;
  _tile_loadconfig(&palette);
  const bool tall = x.rows - first_row > ROWS;
  const size_t row_bytes = static_cast<size_t>(x.columns) * sizeof(bf16);
  const bf16* upper = x.row<bf16>(first_row);
  const bf16* lower = x.row<bf16>(tall ? first_row + ROWS : first_row);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int k = 0; k < x.columns; k += COLUMNS) {
    const char* weights = panel + static_cast<size_t>(k / 2) * 64;
    _tile_loadd(4, upper + k, row_bytes);
    _tile_loadd(6, weights, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (PANELS > 1) {
      _tile_loadd(7, weights + stride, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (tall) {
      _tile_loadd(5, lower + k, row_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if (PANELS > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  constexpr size_t SUM_BYTES = PANELS * LANES * sizeof(float);
  _tile_stored(0, sums, SUM_BYTES);
  if (PANELS > 1) _tile_stored(1, sums + LANES, SUM_BYTES);
  if (tall) {
    float* below = sums + ROWS * PANELS * LANES;
    _tile_stored(2, below, SUM_BYTES);
    if (PANELS > 1) _tile_stored(3, below + LANES, SUM_BYTES);
  }
  _tile_release();
}

#else
inline void enable() {}
inline bool wanted(const Activations&) { return false; }
template <int PANELS>
void tile(const Activations&, int, const char*, size_t, float*) {}
#endif

}  // namespace qd::amx

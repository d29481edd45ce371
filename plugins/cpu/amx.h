/* bf16 tiles in the matrix registers of Intel's processors (AMX): 32 rows by one panel, 32 inputs an instruction.

   A panel is packed as the instruction takes its second operand. Each row's sum adds the pairs of inputs in their order,
   whatever the other rows: so these bits are a row's own too, but they are not those of AVX512-BF16. One or the other
   is taken for all numbers of rows of a product, by its size. */
#pragma once

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

#include "vector.h"

#define AMX_ROWS 32
/* Inputs of one instruction. */
#define AMX_DEPTH 32

/* Whether Linux lends the registers, which a process has to ask for once: ARCH_REQ_XCOMP_PERM of XTILEDATA. */
static int amx_lent;

static __attribute__((constructor)) void ask_for_amx(void) { amx_lent = syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

INLINE int takes_amx(int type, long in) { return amx_lent && type == BF16 && in % AMX_DEPTH == 0; }

/* Rows of the tiles of this thread; 0: its registers are free, as others that use them expect. */
static __thread int amx_shaped;

static void amx_shape(int rows) {
    if (amx_shaped == rows) return;
    struct { uint8_t palette, start, unused[14]; uint16_t bytes[16]; uint8_t rows[16]; } shape = {.palette = 1};
    const int first = rows < 16 ? rows : 16, rest = rows - first;
    /* sums of the first rows by both halves of a panel and of the rest, x of the first and the rest, both halves */
    const int parts[8] = {first, first, rest, rest, first, rest, 16, 16};
    for (int i = 0; i < 8; i++) {
        shape.rows[i] = (uint8_t)parts[i];
        shape.bytes[i] = parts[i] ? 64 : 0;
    }
    _tile_loadconfig(&shape);
    amx_shaped = rows;
}

static void amx_free(void) {
    if (amx_shaped) _tile_release();
    amx_shaped = 0;
}

/* x: [rows, stride] bf16, `rows` up to AMX_ROWS; panel: [in / 2][32][2]; sum: [rows, 32]. */
static void amx_tile(int rows, const char *x, long stride, const char *panel, long in, float *sum) {
    amx_shape(rows);
    stride *= 2;
    _tile_zero(0);
    _tile_zero(1);
    if (rows > 16) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (long k = 0; k < in; k += AMX_DEPTH, x += 64, panel += 2048) {
        _tile_loadd(4, x, stride);
        _tile_loadd(6, panel, 128);
        _tile_loadd(7, panel + 64, 128);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (rows > 16) {
            _tile_loadd(5, x + 16 * stride, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sum, 128);
    _tile_stored(1, sum + 16, 128);
    if (rows > 16) {
        _tile_stored(2, sum + 16 * 32, 128);
        _tile_stored(3, sum + 16 * 32 + 16, 128);
    }
}
#else
#define AMX_ROWS TILE_ROWS
INLINE int takes_amx(int type, long in) { return (void)type, (void)in, 0; }
static void amx_free(void) {}
static void amx_tile(int rows, const char *x, long stride, const char *panel, long in, float *sum) {
    (void)rows, (void)x, (void)stride, (void)panel, (void)in, (void)sum;
}
#endif

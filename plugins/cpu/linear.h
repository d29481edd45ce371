/* y = x Wᵀ + b for any number of rows, each row's bits the same whatever the number.

   W [out, in] is packed in panels of 32 outputs, so that a panel is read from memory in order, once:

       F32, F16   [out / 32][in][32]
       BF16       [out / 32][in / 2][32][2]        pairs, as the dot products of AVX512-BF16 and Arm take them

   A tile is as many rows as the registers hold, by one panel. It keeps its sums in registers and adds the inputs in
   their order: so neither the tile's rows nor the panel's thread can change a sum. Rows are fp32, or bf16 for BF16
   weights. */
#pragma once

#include <stdlib.h>
#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "vector.h"

/* The threads of a pass: OpenMP's, which PyTorch has loaded already, so that its operators and these kernels share one
   team a calling thread and never wait for each other's. The functions are given by address: no compiler flag or library
   of OpenMP is needed. Each thread runs the whole pass on its share of every layer, with a barrier between phases. */
/* A thread's part in a pass. */
struct share {
    int thread, threads;
};

typedef void (*job)(void *arguments, const struct share *share);

/* GOMP_parallel, GOMP_barrier, omp_get_thread_num, omp_get_num_threads; NULL: one thread. */
struct openmp {
    void (*parallel)(void (*run)(void *), void *arguments, unsigned threads, unsigned flags);
    void (*barrier)(void);
    int (*thread)(void);
    int (*threads)(void);
};
static struct openmp openmp;

void d2sd_use_openmp(const struct openmp *given) { openmp = *given; }

/* Wait until every thread of the pass is here. */
static inline void barrier(const struct share *share) {
    if (share->threads > 1) openmp.barrier();
}

/* [first, last) of `count` things for this thread. */
static inline void divide(long count, const struct share *share, long *first, long *last) {
    *first = count * share->thread / share->threads;
    *last = count * (share->thread + 1) / share->threads;
}

struct started {
    job run;
    void *arguments;
};

static void on_thread(void *arguments) {
    const struct started *started = arguments;
    const struct share share = {openmp.thread(), openmp.threads()}; /* OpenMP may give fewer than it was asked for */
    started->run(started->arguments, &share);
}

/* Run `run` on up to `threads` threads, this one among them; back when all have finished. */
static void run_pass(job run, void *arguments, int threads) {
    if (threads == 1 || !openmp.parallel) {
        const struct share alone = {0, 1};
        run(arguments, &alone);
        return;
    }
    struct started started = {run, arguments};
    openmp.parallel(on_thread, &started, (unsigned)threads, 0);
}

#define PANEL 32
#define PARTS (PANEL / WIDTH)
/* Of 32 registers 24 are sums, or 16 beside eight of weights where a register holds four; of 16 twelve. */
#if defined(__AVX512F__)
#define TILE_ROWS 12
#elif defined(__aarch64__)
#define TILE_ROWS 2
#else
#define TILE_ROWS 3
#endif

/* --- bf16 tiles in the matrix registers of Intel's processors (AMX): 32 rows by one panel, 32 inputs an instruction ---

   A panel is packed as the instruction takes its second operand. Each row's sum adds the pairs of inputs in their order,
   whatever the other rows: so these bits are a row's own too, but they are not those of AVX512-BF16. One or the other
   is taken for all numbers of rows of a product, by its size. */
#if defined(__AMX_BF16__) && defined(__linux__)
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

#define MOST_ROWS (AMX_ROWS > TILE_ROWS ? AMX_ROWS : TILE_ROWS)
/* Rows that stay in the second-level cache while the panels go by. */
#define BLOCK_ROWS 96

struct linear {
    const void *weight; /* packed */
    const float *bias;  /* [out] or NULL */
    long in, out;       /* `out` a multiple of PANEL, `in` even for BF16; both padded with zeros */
    int type;
};

INLINE long input_size(int type) { return type == BF16 ? 2 : 4; }
INLINE long even(long n) { return n + (n & 1); }

/* `rows` and `type` are constants where this is inlined. x: [rows, stride]; sum: [rows, PANEL]. */
INLINE void tile(const int rows, const int type, const char *x, long stride, const char *panel, long in, float *sum) {
    native sums[12][PARTS];
    UNROLL for (int m = 0; m < rows; m++)
        UNROLL for (int i = 0; i < PARTS; i++) sums[m][i] = (native){0};
    const long step = type == BF16 ? 2 : 1, line = PANEL * step * type_size(type);
    stride *= input_size(type);
    for (long k = 0; k < in; k += step, panel += line, x += step * input_size(type)) {
        __builtin_prefetch(panel + 16 * line);
        if (line > 64) __builtin_prefetch(panel + 16 * line + 64);
        if (type != BF16) {
            native w[PARTS];
            UNROLL for (int i = 0; i < PARTS; i++) w[i] = load_native(type, panel + i * (line / PARTS));
            UNROLL for (int m = 0; m < rows; m++) {
                const native value = *(const float *)(x + m * stride) - (native){0};
                UNROLL for (int i = 0; i < PARTS; i++) sums[m][i] = fma_native(value, w[i], sums[m][i]);
            }
            continue;
        }
        native_bits w[PARTS];
        UNROLL for (int i = 0; i < PARTS; i++) w[i] = *(const native_bits *)(panel + i * (line / PARTS));
        UNROLL for (int m = 0; m < rows; m++) {
            uint32_t pair;
            memcpy(&pair, x + m * stride, 4);
#ifdef __AVX512BF16__
            const __m512bh both = (__m512bh)_mm512_set1_epi32((int)pair);
            UNROLL for (int i = 0; i < PARTS; i++)
                sums[m][i] = (native)_mm512_dpbf16_ps((__m512)sums[m][i], both, (__m512bh)w[i]);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
            const bfloat16x8_t both = vreinterpretq_bf16_u32(vdupq_n_u32(pair));
            UNROLL for (int i = 0; i < PARTS; i++)
                sums[m][i] = (native)vbfdotq_f32(
                    (float32x4_t)sums[m][i], vreinterpretq_bf16_u32((uint32x4_t)w[i]), both);
#else
            const uint32_t bits[2] = {pair << 16, pair & 0xffff0000u};
            float even, odd;
            memcpy(&even, bits, 4);
            memcpy(&odd, bits + 1, 4);
            const native evens = even - (native){0}, odds = odd - (native){0};
            UNROLL for (int i = 0; i < PARTS; i++) {
                sums[m][i] = fma_native(evens, (native)(w[i] << 16), sums[m][i]);
                sums[m][i] = fma_native(odds, (native)(w[i] & 0xffff0000u), sums[m][i]);
            }
#endif
        }
    }
    UNROLL for (int m = 0; m < rows; m++)
        UNROLL for (int i = 0; i < PARTS; i++) *(native *)(sum + m * PANEL + i * WIDTH) = sums[m][i];
}

INLINE void tile_of(int rows, const int type, const char *x, long stride, const char *panel, long in, float *sum) {
    switch (rows) {
#define CASE(n) case n: if (n <= TILE_ROWS) tile(n, type, x, stride, panel, in, sum); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
    }
}

/* The sums of a tile's rows of x and panel `number` of a layer: [rows, PANEL]. */
static __attribute__((noinline)) void
multiply(const struct linear *layer, const void *x, long stride, int rows, long number, float *sum) {
    const char *panel = (const char *)layer->weight + number * layer->in * PANEL * type_size(layer->type);
    if (takes_amx(layer->type, layer->in)) amx_tile(rows, x, stride, panel, layer->in, sum);
    else if (layer->type == F32) tile_of(rows, F32, x, stride, panel, layer->in, sum);
    else if (layer->type == BF16) tile_of(rows, BF16, x, stride, panel, layer->in, sum);
    else tile_of(rows, F16, x, stride, panel, layer->in, sum);
}

/* Rows of the next tile, of `left` rows in tiles of up to `most`: as even as possible. */
INLINE int tile_rows(long left, long most) {
    const long tiles = (left + most - 1) / most;
    return (int)((left + tiles - 1) / tiles);
}

/* What becomes of a tile's sums. */
typedef void (*finish)(void *to, const float *sum, const float *gate, long row, int rows, long column);

/* This thread's share of the panels, tile by tile. With `gated`, panels alternate between gate and up. */
static void each_tile(
    const struct linear *layer, const void *x, long stride, long rows, int gated, finish finish, void *to,
    const struct share *share) {
    float sum[MOST_ROWS * PANEL], gate[MOST_ROWS * PANEL];
    const long most = takes_amx(layer->type, layer->in) ? AMX_ROWS : TILE_ROWS;
    long first, last;
    divide(layer->out / PANEL / (gated ? 2 : 1), share, &first, &last);
    for (long block = 0; block < rows; block += BLOCK_ROWS) {
        const long end = block + BLOCK_ROWS < rows ? block + BLOCK_ROWS : rows;
        for (long panel = first; panel < last; panel++) {
            for (long row = block; row < end;) {
                const int count = tile_rows(end - row, most);
                const char *at = (const char *)x + row * stride * input_size(layer->type);
                if (gated) multiply(layer, at, stride, count, 2 * panel, gate);
                multiply(layer, at, stride, count, gated ? 2 * panel + 1 : panel, sum);
                finish(to, sum, gate, row, count, panel * PANEL);
                row += count;
            }
        }
    }
    amx_free();
}

/* The plainest end of a sum: a column of rows. */
struct output {
    const float *bias; /* or NULL */
    float *rows;
    long stride, size; /* columns of `rows`, and how many of them are real */
    int add;           /* to what is there */
};

static void put_sums(void *to, const float *sum, const float *gate, long row, int rows, long column) {
    const struct output *output = to;
    const long many = output->size - column < PANEL ? output->size - column : PANEL;
    for (int m = 0; m < rows; m++) {
        float *out = output->rows + (row + m) * output->stride + column;
        for (long n = 0; n < many; n++) {
            const float value = sum[m * PANEL + n] + (output->bias ? output->bias[column + n] : 0);
            out[n] = output->add ? out[n] + value : value;
        }
    }
}

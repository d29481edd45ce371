/* The gated delta rule by its recurrence, and the convolution in front of it.

   A state is walked along a tree depth first: it is copied where several children follow, so a row's bits depend on the
   committed state and on its path alone, and memory on how often paths fork, not on how many rows there are.
   Specification: `d2sd.plugins.delta_rule.reference`. */
#pragma once

#include "linear.h"
#include "vector.h"

#include <stdlib.h>

struct delta_rule {
    long layers, batch, rows, keys, heads, key_size, size; /* L, B, M, Hk, Hv, Dk, Dv */
    long slot_count, type;
    const char *q, *k, *v;  /* [L, M, H, D]; q NULL: no outputs */
    const float *g, *beta;  /* [L, M, Hv] */
    float *states;          /* [L, P, Hv, Dk, Dv] */
    const int64_t *slots;   /* [B] */
    const int64_t *starts;  /* [B + 1], first row of each request */
    const uint8_t *mask;    /* [B, T, T] of a tree, whose states are not written; NULL: the next two */
    const int64_t *path;    /* [B, width], rows of a request from its start; NULL: all its rows */
    const int64_t *count;   /* [B], rows of each path */
    long width;
    char *out;              /* [M, Hv, Dv] of the type, written unless q is NULL */
};

/* A row of a walk: it goes on from the last row's state, or from the committed one, or from a copy. */
enum { LAST = 0, COMMITTED = -1 };
struct step {
    int32_t row, from, keep; /* numbers of copies count from 1; keep 0: none */
};

struct walk {
    struct step *step; /* of all requests, one after the other */
    long *begin;       /* [B + 1] */
    float *q, *k;      /* [steps, Hk, Dk] fp32, normed */
    long copies;
};

/* [T], the last ancestor of each row, or -1. */
static void find_parents(const uint8_t *mask, long rows, int32_t *parent) {
    for (long row = 0; row < rows; row++) {
        parent[row] = (int32_t)row - 1;
        while (parent[row] >= 0 && !mask[row * rows + parent[row]]) parent[row]--;
    }
}

/* The rows of a tree depth first, children in their order, into `step`; the number of copies that they need. */
static long plan_tree(const uint8_t *mask, long rows, long start, struct step *step) {
    int32_t parent[rows], first[rows + 1], next[rows], level[rows];
    long most = 0, done = 0;
    find_parents(mask, rows, parent);
    for (long i = 0; i <= rows; i++) first[i] = -1;
    for (long row = rows - 1; row >= 0; row--) { /* roots are the children of entry 0 */
        next[row] = first[parent[row] + 1];
        first[parent[row] + 1] = (int32_t)row;
    }
    int32_t before = -1;
    for (int32_t row = first[0]; row >= 0;) {
        const int32_t p = parent[row], child = first[row + 1];
        const int forked = p >= 0 && next[first[p + 1]] >= 0, forks = child >= 0 && next[child] >= 0;
        level[row] = (p < 0 ? 0 : level[p]) + forked;
        const int32_t from = p < 0 ? COMMITTED : p == before ? LAST : level[row];
        step[done++] = (struct step){(int32_t)(start + row), from, forks ? level[row] + 1 : 0};
        if (forks && level[row] + 1 > most) most = level[row] + 1;
        before = row;
        while (child < 0 && row >= 0 && next[row] < 0) row = parent[row];
        row = child >= 0 ? child : row < 0 ? -1 : next[row];
    }
    return most;
}

static void plan(const struct delta_rule *d, struct walk *walk) {
    long done = 0;
    for (long b = 0; b < d->batch; b++) {
        const long start = d->starts[b], rows = d->starts[b + 1] - start;
        walk->begin[b] = done;
        if (d->mask) {
            const long copies = plan_tree(d->mask + b * rows * rows, rows, start, walk->step + done);
            if (copies > walk->copies) walk->copies = copies;
            done += rows;
            continue;
        }
        if (d->path && !d->slots[b]) continue; /* padding's slot is not written, and there are no outputs */
        const long count = d->path ? d->count[b] : rows;
        for (long n = 0; n < count; n++) {
            const long row = start + (d->path ? d->path[b * d->width + n] : n);
            walk->step[done++] = (struct step){(int32_t)row, n ? LAST : COMMITTED, 0};
        }
    }
    walk->begin[d->batch] = done;
}

static void put_normed(int type, const char *x, long offset, float scale, float *out, long size) {
    float squares = 0;
    for (long i = 0; i < size; i++) out[i] = get(type, x, offset + i);
    for (long i = 0; i < size; i++) squares += out[i] * out[i];
    const float factor = 1.0f / sqrtf(squares + 1e-6f) * scale;
    for (long i = 0; i < size; i++) out[i] *= factor;
}

struct advance {
    const struct delta_rule *rule;
    const struct walk *walk;
    long layer;
};

#define COLUMNS 4 /* vectors of a state that one walk carries: with 128 keys 32 KB, which the first cache holds */

/* Columns of one head's state through the walk of a request. `state` has room for them and for their copies. */
INLINE void walk_columns(const struct advance *advance, long b, long head, long column, int parts, float *state) {
    const struct delta_rule *d = advance->rule;
    const struct walk *walk = advance->walk;
    const long size = parts * LANES, whole = d->key_size * size, key_head = head / (d->heads / d->keys);
    float *pool = d->states + ((advance->layer * d->slot_count + d->slots[b]) * d->heads + head) * d->key_size * d->size;
    for (long n = walk->begin[b]; n < walk->begin[b + 1]; n++) {
        const struct step *step = walk->step + n;
        const long at = (advance->layer * d->rows + step->row) * d->heads + head;
        const float *k = walk->k + (n * d->keys + key_head) * d->key_size;
        const f32x16 gate = splat(expf(d->g[at])), beta = splat(d->beta[at]);
        f32x16 sum[COLUMNS] = {0}, delta[COLUMNS];
        if (step->from == COMMITTED) {
            for (long i = 0; i < d->key_size; i++)
                memcpy(state + i * size, pool + i * d->size + column, size * sizeof *state);
        } else if (step->from != LAST) {
            memcpy(state, state + step->from * whole, whole * sizeof *state);
        }
        for (long i = 0; i < d->key_size; i++) {
            UNROLL for (int p = 0; p < parts; p++) {
                f32x16 *x = (f32x16 *)(state + i * size + p * LANES);
                *x *= gate;
                sum[p] = fma16(splat(k[i]), *x, sum[p]);
            }
        }
        UNROLL for (int p = 0; p < parts; p++) {
            const long value = (at * d->size + column + p * LANES) * type_size((int)d->type);
            delta[p] = beta * (load16((int)d->type, d->v + value) - sum[p]);
            sum[p] = splat(0);
        }
        const float *q = d->q ? walk->q + (n * d->keys + key_head) * d->key_size : k;
        for (long i = 0; i < d->key_size; i++) {
            UNROLL for (int p = 0; p < parts; p++) {
                f32x16 *x = (f32x16 *)(state + i * size + p * LANES);
                *x = fma16(splat(k[i]), delta[p], *x);
                sum[p] = fma16(splat(q[i]), *x, sum[p]);
            }
        }
        if (d->q) store((int)d->type, d->out, at * d->size + column, (const float *)sum, size);
        if (step->keep) memcpy(state + step->keep * whole, state, whole * sizeof *state);
    }
    if (d->mask || !d->slots[b] || walk->begin[b] == walk->begin[b + 1]) return;
    for (long i = 0; i < d->key_size; i++) memcpy(pool + i * d->size + column, state + i * size, size * sizeof *state);
}

static void advance_states(void *arguments, const struct share *share) {
    const struct advance *advance = arguments;
    const struct delta_rule *d = advance->rule;
    const struct walk *walk = advance->walk;
    long first, last;
    divide(walk->begin[d->batch] * d->keys, share, &first, &last);
    for (long item = first; item < last; item++) {
        const long row = advance->layer * d->rows + walk->step[item / d->keys].row;
        const long from = (row * d->keys + item % d->keys) * d->key_size, to = item * d->key_size;
        put_normed((int)d->type, d->k, from, 1, walk->k + to, d->key_size);
        if (d->q) put_normed((int)d->type, d->q, from, 1 / sqrtf((float)d->key_size), walk->q + to, d->key_size);
    }
    barrier(share);
    const long parts = d->size % (COLUMNS * LANES) ? 1 : COLUMNS, tiles = d->size / (parts * LANES);
    void *state;
    if (posix_memalign(&state, 64, (1 + walk->copies) * d->key_size * parts * LANES * sizeof(float))) abort();
    divide(d->batch * d->heads * tiles, share, &first, &last);
    for (long item = first; item < last; item++) {
        const long b = item / (d->heads * tiles), head = item / tiles % d->heads, column = item % tiles * parts * LANES;
        if (parts == COLUMNS) walk_columns(advance, b, head, column, COLUMNS, state);
        else walk_columns(advance, b, head, column, 1, state);
    }
    free(state);
}

void d2sd_delta_rule(const struct delta_rule *d, int threads) {
    const long steps = d->path ? d->batch * d->width : d->rows, numbers = steps * d->keys * d->key_size;
    struct walk walk = {.copies = 0};
    walk.step = malloc((steps + 1) * sizeof *walk.step);
    walk.begin = malloc((d->batch + 1) * sizeof *walk.begin);
    walk.k = malloc((numbers + 1) * sizeof *walk.k);
    walk.q = d->q ? malloc((numbers + 1) * sizeof *walk.q) : walk.k;
    if (!walk.step || !walk.begin || !walk.k || !walk.q) abort();
    plan(d, &walk);
    for (long layer = 0; layer < d->layers; layer++) {
        struct advance advance = {d, &walk, layer};
        run_pass(advance_states, &advance, threads);
    }
    if (d->q) free(walk.q);
    free(walk.k);
    free(walk.begin);
    free(walk.step);
}

struct convolution {
    long batch, rows, channels, taps, type; /* B, M, C, W */
    long silu;                              /* whether the result is the silu of the sum */
    const char *x;                          /* [M, C] */
    const float *weight, *bias;             /* [W, C], [C] or NULL */
    const float *past;                      /* [B, W - 1, C], what was committed */
    const int64_t *starts;                  /* [B + 1] */
    const uint8_t *mask;                    /* [B, T, T], or NULL: a row follows the one before */
    char *out;                              /* [M, C] */
    int32_t *parent;                        /* [M] for this call, in its request, or -1 */
};

static void convolve(void *arguments, const struct share *share) {
    const struct convolution *c = arguments;
    const long bytes = type_size((int)c->type);
    long first, last, b = 0;
    divide(c->rows, share, &first, &last);
    for (long row = first; row < last; row++) {
        const char *from[c->taps];
        int old[c->taps];
        while (row >= c->starts[b + 1]) b++;
        for (long tap = c->taps - 1, at = row - c->starts[b]; tap >= 0; tap--) {
            old[tap] = at < 0; /* -1 is the last committed input */
            from[tap] = at < 0 ? (const char *)(c->past + (b * (c->taps - 1) + c->taps - 1 + at) * c->channels)
                               : c->x + (c->starts[b] + at) * c->channels * bytes;
            at = at < 0 ? at - 1 : c->parent[c->starts[b] + at];
        }
        for (long channel = 0; channel < c->channels; channel += LANES) {
            f32x16 sum = splat(0);
            for (long tap = 0; tap < c->taps; tap++) {
                const int type = old[tap] ? F32 : (int)c->type;
                const f32x16 x = load16(type, from[tap] + channel * type_size(type));
                sum = sum + x * *(const f32x16 *)(c->weight + tap * c->channels + channel);
            }
            if (c->bias) sum = sum + *(const f32x16 *)(c->bias + channel);
            if (c->silu) sum = silu16(sum);
            store((int)c->type, c->out, row * c->channels + channel, (const float *)&sum, LANES);
        }
    }
}

void d2sd_convolution(const struct convolution *c, int threads) {
    for (long b = 0; b < c->batch; b++) {
        const long start = c->starts[b], rows = c->starts[b + 1] - start;
        if (c->mask) find_parents(c->mask + b * rows * rows, rows, c->parent + start);
        else
            for (long row = 0; row < rows; row++) c->parent[start + row] = (int32_t)row - 1;
    }
    run_pass(convolve, (void *)c, threads);
}

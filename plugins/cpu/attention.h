/* Attention of one row and the query heads of one K/V head: over the committed context, then over the new rows it may
   see. Keys come in the order of their positions, and each sum is made in that order: a row's result is the same whether
   a key is in a page or among the new rows, whatever else is computed with it, however a prompt was cut.

   The new rows a row sees are listed by ascending number. In a tree and in a chain that is by position. In a prompt it
   sees all up to itself. A window leaves out those in front of it: they are not read, and have no place in the sums. */
#pragma once

#include "vector.h"

/* Query heads that share a pass over K or V: their sums fit in registers. */
#define HEADS 4
#define MOST_SIZE 512

struct keys {
    const char *pages; /* of the layer, [P, Z, Hkv, D] */
    const char *rows;  /* [T, Hkv, D], of the request, or with `seen` of the pass */
    const int64_t *table;
    long page_size, first, context; /* positions in pages, from `first` on, at most `context` */
    const int32_t *seen; /* numbers of new rows, or NULL: the first ones */
    long count;
    long heads, head; /* K/V heads, and the one to read */
    int type;
};

/* K or V of `many` tokens that lie `stride` elements apart: scores [many] of each head. */
INLINE void score(
    const int size, const int type, const float *q, int heads, const char *k, long stride, long many, float *scores,
    long room, float scale) {
    long j = 0;
#ifdef __AVX512F__ /* sixteen keys: their products are added across lanes together, which else takes as long as they do */
    for (; j + LANES <= many; j += LANES, k += LANES * stride * type_size(type)) {
        f32x16 parts[HEADS][4];
        for (int b = 0; b < 4; b++) {
            f32x16 sums[HEADS][4];
            UNROLL for (int i = 0; i < 4; i++) {
                const char *key = k + (4 * i + b) * stride * type_size(type);
                f32x16 x = load16(type, key);
                UNROLL for (int g = 0; g < heads; g++) sums[g][i] = *(const f32x16 *)(q + g * size) * x;
                UNROLL for (int d = LANES; d < size; d += LANES) {
                    x = load16(type, key + d * type_size(type));
                    UNROLL for (int g = 0; g < heads; g++)
                        sums[g][i] = fma16(*(const f32x16 *)(q + g * size + d), x, sums[g][i]);
                }
            }
            UNROLL for (int g = 0; g < heads; g++) parts[g][b] = quarters(sums[g]);
        }
        UNROLL for (int g = 0; g < heads; g++)
            *(f32x16 *)(scores + g * room + j) = sums16(parts[g]) * splat(scale);
    }
#endif
    for (; j < many; j++, k += stride * type_size(type))
        for (int g = 0; g < heads; g++) {
            f32x16 sum = *(const f32x16 *)(q + g * size) * load16(type, k);
            UNROLL for (int d = LANES; d < size; d += LANES)
                sum = fma16(*(const f32x16 *)(q + g * size + d), load16(type, k + d * type_size(type)), sum);
            scores[g * room + j] = sum16(sum) * scale;
        }
}

INLINE void weigh(
    const int size, const int heads, const int type, const float *weights, long room, const char *v, long stride,
    long many, float *out) {
    f32x16 sums[HEADS * MOST_SIZE / LANES];
    const int vectors = size / LANES;
    UNROLL for (int i = 0; i < heads * vectors; i++) sums[i] = *(f32x16 *)(out + i * LANES);
    for (long j = 0; j < many; j++, v += stride * type_size(type)) {
        UNROLL for (int d = 0; d < vectors; d++) {
            const f32x16 value = load16(type, v + d * LANES * type_size(type));
            UNROLL for (int g = 0; g < heads; g++)
                sums[g * vectors + d] = fma16(splat(weights[g * room + j]), value, sums[g * vectors + d]);
        }
    }
    UNROLL for (int i = 0; i < heads * vectors; i++) *(f32x16 *)(out + i * LANES) = sums[i];
}

/* Call `USE(at, stride, many, offset)` for every run of keys. */
#define EACH_RUN(keys, size, USE)                                                                                      \
    do {                                                                                                               \
        const long stride_ = (keys)->heads * (size), element_ = type_size((keys)->type), first_ = (keys)->first;       \
        for (long done_ = first_, run_; done_ < (keys)->context; done_ += run_) {                                      \
            const long place_ = done_ % (keys)->page_size, left_ = (keys)->context - done_;                            \
            const long slot_ = (keys)->table[done_ / (keys)->page_size] * (keys)->page_size + place_;                  \
            const char *at_ = (keys)->pages + (slot_ * stride_ + (keys)->head * (size)) * element_;                    \
            run_ = left_ < (keys)->page_size - place_ ? left_ : (keys)->page_size - place_;                            \
            USE(at_, stride_, run_, done_ - first_);                                                                   \
        }                                                                                                              \
        const char *rows_ = (keys)->rows + (keys)->head * (size) * element_;                                           \
        const long old_ = (keys)->context - first_;                                                                    \
        if (!(keys)->seen) USE(rows_, stride_, (keys)->count, old_);                                                   \
        else                                                                                                           \
            for (long i_ = 0; i_ < (keys)->count; i_++)                                                                \
                USE(rows_ + (keys)->seen[i_] * stride_ * element_, stride_, 1, old_ + i_);                             \
    } while (0)

/* q, out: [heads, size] with heads <= HEADS. `room` floats of `scores` a head, at least the keys and LANES more. A sink
   is a score of each head that has no value; NULL: there are none. */
INLINE void attend(
    const int size, const int heads, const int type, const float *q, const struct keys *k, const struct keys *v,
    const float *sinks, float *scores, long room, float *out) {
    const long many = k->context - k->first + k->count;
    const float scale = 1.0f / sqrtf((float)size);
#define SCORE(at, stride, run, offset) score(size, type, q, heads, at, stride, run, scores + (offset), room, scale)
    EACH_RUN(k, size, SCORE);
#undef SCORE
    float total[HEADS];
    for (int g = 0; g < heads; g++) {
        float *of_head = scores + g * room, most = sinks ? sinks[g] : -INFINITY;
        f32x16 largest = splat(most), sum = splat(0);
        long from = 0;
        for (; from + LANES <= many; from += LANES) {
            const f32x16 x = *(f32x16 *)(of_head + from);
            largest = select16(x > largest, x, largest);
        }
        for (int lane = 0; lane < LANES; lane++) most = largest[lane] > most ? largest[lane] : most;
        for (; from < many; from++) most = of_head[from] > most ? of_head[from] : most;
        for (long j = 0; j < many; j += LANES) { /* lane i adds the positions i, i + 16, ... */
            f32x16 *weights = (f32x16 *)(of_head + j);
            *weights = exp16(*weights - splat(most));
            for (long past = many - j; past < LANES; past++) of_head[j + past] = 0;
            sum += *weights;
        }
        total[g] = sum16(sum);
        if (sinks) total[g] += exp16(splat(sinks[g] - most))[0];
    }
    memset(out, 0, heads * size * sizeof *out);
#define WEIGH(at, stride, run, offset) weigh(size, heads, type, scores + (offset), room, at, stride, run, out)
    EACH_RUN(v, size, WEIGH);
#undef WEIGH
    for (int g = 0; g < heads; g++)
        for (int d = 0; d < size; d += LANES) *(f32x16 *)(out + g * size + d) /= splat(total[g]);
}

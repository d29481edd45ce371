/* Rows of the target's text, as a drafter's layers keep them: keys, normed and rotated, and values of all its layers.

   Specification: `Drafter.context_keys_values`, which rounds more often. */
#pragma once

#include "linear.h"
#include "norms.h"

struct context {
    long rows, hidden, layers, heads, head_dim, type; /* C, E, L, Hkv, D */
    double eps;
    const struct linear *product;  /* keys of all layers, then their values */
    const float *norm, *k_norm;    /* [E], and [L, D] or NULL */
    const float *x, *cos, *sin;    /* [C, E] and [C, D] */
    char *input;                   /* [C, E], of two bytes or four a number, overwritten */
    float *sums;                   /* [C, 2 L Hkv D], overwritten */
    void *k, *v;                   /* [L, C, Hkv D], written */
};

static void keys_values(void *arguments, const struct share *share) {
    const struct context *c = arguments;
    const long kv = c->heads * c->head_dim, width = 2 * c->layers * kv, stride = even(c->hidden);
    float normed[stride];
    long first, last;
    divide(c->rows, share, &first, &last);
    normed[stride - 1] = 0;
    for (long row = first; row < last; row++) {
        rms_norm(c->x + row * c->hidden, c->norm, (float)c->eps, normed, c->hidden);
        store(c->type == BF16 ? BF16 : F32, c->input, row * stride, normed, stride);
    }
    barrier(share);
    struct output output = {c->product->bias, c->sums, width, width, 0};
    each_tile(c->product, c->input, stride, c->rows, 0, put_sums, &output, share);
    barrier(share);
    for (long row = first; row < last; row++) {
        float *k = c->sums + row * width, *v = k + width / 2;
        for (long layer = 0; layer < c->layers; layer++, k += kv, v += kv) {
            for (float *head = k; head < k + kv; head += c->head_dim) {
                if (c->k_norm) rms_norm(head, c->k_norm + layer * c->head_dim, (float)c->eps, head, c->head_dim);
                rotate(head, c->cos + row * c->head_dim, c->sin + row * c->head_dim, c->head_dim);
            }
            store((int)c->type, c->k, (layer * c->rows + row) * kv, k, kv);
            store((int)c->type, c->v, (layer * c->rows + row) * kv, v, kv);
        }
    }
}

void d2sd_keys_values(const struct context *c, int threads) { run_pass(keys_values, (void *)c, threads); }

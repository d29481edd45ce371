/* The drafts of a step, besides the drafters' layers: keys and values of the text that the target has read, then from
   logits to candidates, and what each is worth behind its parent; and a copy of a request's own earlier text.

   Specifications: `Drafter.context_keys_values`, which rounds more often, `d2sd.plugins.choice.reference.likeliest`,
   `d2sd.plugins.pair_scores.reference` and `d2sd.plugins.lookup.reference`. */
#pragma once

#include "linear.h"
#include "vector.h"

#include <stdlib.h>

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

struct likeliest {
    long count, size, width;
    const float *logits;  /* [count, size] */
    int64_t *index;       /* [count, width], written, as are the next */
    float *logit, *total; /* [count, width] and [count] */
};

/* The largest of `x`, best first, of equals the first. */
static void take_largest(const float *x, long size, long width, float *logit, int64_t *index) {
    const long step = 4 * LANES;
    long count = 0;
    for (long start = 0; start < size; start += step) {
        const long end = start + step < size ? start + step : size;
        if (count == width && end - start == step) { /* few blocks have one that is large enough */
            i32x16 any = (i32x16)splat(0);
            const f32x16 least = splat(logit[width - 1]);
            UNROLL for (int part = 0; part < 4; part++) any |= *(const f32x16 *)(x + start + part * LANES) > least;
            int found = 0;
            UNROLL for (int lane = 0; lane < LANES; lane++) found |= any[lane];
            if (!found) continue;
        }
        for (long i = start; i < end; i++) {
            if (count == width && !(x[i] > logit[width - 1])) continue;
            long at = count < width ? count++ : width - 1;
            for (; at && x[i] > logit[at - 1]; at--) logit[at] = logit[at - 1], index[at] = index[at - 1];
            logit[at] = x[i], index[at] = i;
        }
    }
}

/* log sum e^x, where `most` is the largest; NaN where a number is NaN or `most` is infinite. */
static float log_sum(const float *x, long size, float most) {
    const f32x16 shift = splat(most);
    f32x16 all = splat(0);
    long i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES) { /* sums of sums: a thousand terms in a row would round too often */
        f32x16 few = exp16(*(const f32x16 *)(x + i) - shift);
        UNROLL for (int part = 1; part < 4; part++) few += exp16(*(const f32x16 *)(x + i + part * LANES) - shift);
        all += few;
    }
    float rest[4 * LANES];
    for (long left = 0; left < 4 * LANES; left++) rest[left] = i + left < size ? x[i + left] : -INFINITY;
    if (i < size)
        UNROLL for (int part = 0; part < 4; part++) all += exp16(*(const f32x16 *)(rest + part * LANES) - shift);
    return most + logf(sum16(all));
}

static void likeliest_rows(void *arguments, const struct share *share) {
    const struct likeliest *l = arguments;
    long first, last;
    divide(l->count, share, &first, &last);
    for (long row = first; row < last; row++) {
        const float *x = l->logits + row * l->size;
        float *logit = l->logit + row * l->width;
        take_largest(x, l->size, l->width, logit, l->index + row * l->width);
        const float total = l->total[row] = log_sum(x, l->size, logit[0]);
        for (long m = 0; total != total && m < l->width; m++) logit[m] = total;
    }
}

void d2sd_likeliest(const struct likeliest *l, int threads) {
    run_pass(likeliest_rows, (void *)l, l->count < threads ? (int)l->count : threads);
}

struct pairs {
    long blocks, slots, size, width, rank, length; /* B K, S, M, of these the best, R, G */
    long each, before_type, behind_type, slot_type, mask; /* `before` has a row for each parent; the mask's id */
    const int64_t *tokens, *shown;         /* [B K, S, M], [B K, G] */
    const float *logprob, *temperature;    /* [B K, S, M], [B K] */
    const void *before, *behind, *of_slot; /* [V, R] or [B K, S, 1 + M, R]; [V, R]; [B K, S, R] or NULL */
    int64_t *best;                         /* [B K, S, width], written, as are the next */
    float *best_logprob, *best_table;      /* and [B K, S, 1 + width, width], or NULL */
};

static float log_sum_few(const float *x, long count) {
    float most = -INFINITY, sum = 0;
    for (long i = 0; i < count; i++) most = x[i] > most ? x[i] : most;
    if (most == -INFINITY) return most;
    for (long i = 0; i < count; i++) sum += expf(x[i] - most);
    return most + logf(sum);
}

INLINE float log_add(float a, float b) {
    const float most = a > b ? a : b, least = a > b ? b : a;
    return most + log1pf(expf(least - most));
}

/* Log-probabilities of candidates with what is added to them, of which nothing may be: then they stay. */
static void normalise(const float *logprob, float *added, long size, float rest) {
    int any = 0;
    for (long m = 0; m < size; m++) any |= added[m] != 0;
    if (!any) {
        memcpy(added, logprob, size * sizeof *added);
        return;
    }
    for (long m = 0; m < size; m++) {
        const float score = logprob[m] + added[m];
        added[m] = score - score == 0 ? score : -INFINITY;
    }
    const float total = log_add(rest, log_sum_few(added, size));
    for (long m = 0; m < size; m++) added[m] -= total;
}

/* Row `number` of a table [., R], times `factor` where there is one, as fp32. */
static void wide_row(const void *table, long type, int64_t number, long rank, const float *factor, float *out) {
    for (long r = 0; r < rank; r++) out[r] = get((int)type, table, number * rank + r);
    for (long r = 0; factor && r < rank; r++) out[r] *= factor[r];
}

static float inner(const float *a, const float *b, long size) {
    f32x16 sum = splat(0);
    float rest = 0;
    long i = 0;
    for (; i + LANES <= size; i += LANES) sum = fma16(*(const f32x16 *)(a + i), *(const f32x16 *)(b + i), sum);
    for (; i < size; i++) rest += a[i] * b[i];
    return sum16(sum) + rest;
}

/* What candidates [M] of one slot are worth behind each parent: [1 + M, M]. */
static void table_of_slot(const struct pairs *p, long block, long slot, float *memory, float *table) {
    const long size = p->size, rank = p->rank, row = block * p->slots + slot;
    const int64_t *tokens = p->tokens + row * size, shown = p->shown[block * p->length + slot];
    const float *logprob = p->logprob + row * size, heat = p->temperature[block] > 0 ? p->temperature[block] : 1;
    float *factor = p->of_slot ? memory : NULL, *parent = memory + rank, *behind = parent + rank;
    if (factor) wide_row(p->of_slot, p->slot_type, row, rank, NULL, factor);
    for (long m = 0; m < size; m++) wide_row(p->behind, p->behind_type, tokens[m], rank, NULL, behind + m * rank);
    const float known = expf(log_sum_few(logprob, size)), rest = log1pf(-(known < 1 - 1e-6f ? known : 1 - 1e-6f));
    const int is_known = shown != p->mask;
    for (long from = 0; from <= size; from++, table += size) {
        if (is_known && from) {
            memcpy(table, table - size, size * sizeof *table);
            continue;
        }
        const int64_t token = is_known || !slot ? shown : tokens[from - 1 - size];
        memset(table, 0, size * sizeof *table);
        if (is_known || from) {
            wide_row(p->before, p->before_type, p->each ? row * (1 + size) + from : token, rank, factor, parent);
            for (long m = 0; m < size; m++) table[m] = inner(parent, behind + m * rank, rank) / heat;
        }
        normalise(logprob, table, size, rest);
    }
}

/* The best of a block's candidates along the walk, best first, and what each is worth behind each. */
static void condition(const struct pairs *p, long block, float *memory) {
    const long size = p->size, width = p->width;
    float *table = memory + (2 + size) * p->rank;
    int order[size], before[size];
    long taken = 0;
    for (long slot = 0; slot < p->slots; slot++) {
        const long row = block * p->slots + slot;
        table_of_slot(p, block, slot, memory, table);
        const float *walk = table + taken * size;
        for (int m = 0; m < size; m++) { /* sorted by insertion: equals keep their order */
            int at = m;
            for (; at && walk[m] > walk[order[at - 1]]; at--) order[at] = order[at - 1];
            order[at] = m;
        }
        for (long m = 0; m < width; m++) {
            p->best[row * width + m] = p->tokens[row * size + order[m]];
            p->best_logprob[row * width + m] = walk[order[m]];
        }
        for (long from = 0; p->best_table && from <= width; from++) {
            const long parent = from ? 1 + (slot ? before : order)[from - 1] : 0;
            float *to = p->best_table + (row * (1 + width) + from) * width;
            for (long m = 0; m < width; m++) to[m] = table[parent * size + order[m]];
        }
        taken = 1 + order[0];
        memcpy(before, order, sizeof before);
    }
}

static void condition_blocks(void *arguments, const struct share *share) {
    const struct pairs *p = arguments;
    long first, last;
    divide(p->blocks, share, &first, &last);
    if (first == last) return;
    float *memory = malloc(((2 + p->size) * p->rank + (1 + p->size) * p->size) * sizeof *memory);
    if (!memory) abort();
    for (long block = first; block < last; block++) condition(p, block, memory);
    free(memory);
}

void d2sd_condition(const struct pairs *p, int threads) {
    run_pass(condition_blocks, (void *)p, p->blocks < threads ? (int)p->blocks : threads);
}

struct search {
    long batch, slots, width, page_size, table_width; /* B, S, M, Z */
    long longest, lengths, supports;
    const int64_t *pages, *table, *context_len, *anchor; /* [P, Z], [B, M], [B], [B] */
    const int64_t *first_tokens;                         /* [B, S, M] */
    const float *first_logprob, *scores, *temperature;   /* [2, lengths, supports + 2, S], [B] */
    const int64_t *length_from;                          /* [lengths], ascending */
    const float *support_to;                             /* [supports], ascending */
    int64_t *tokens, *length;                            /* [B, S], [B], written, as is the next */
    float *logprob;                                      /* [B, S] */
};

/* The place of the latest of the longest matches of a text's end, and its length; 0: none. */
static long match(const int64_t *text, long size, long longest, long *at) {
    const int64_t *end = text + size - 1;
    long best = 0;
    for (long place = size - 2; place >= 0 && best < longest; place--) {
        if (text[place] != *end || (best && (place < best || text[place - best] != end[-best]))) continue;
        long length = 1;
        while (length < longest && length <= place && text[place - length] == end[-length]) length++;
        if (length > best) best = length, *at = place;
    }
    return best;
}

void d2sd_copy(const struct search *c) {
    long most = 0;
    for (long b = 0; b < c->batch; b++) most = c->context_len[b] > most ? c->context_len[b] : most;
    int64_t *text = malloc((most + 1) * sizeof *text);
    if (!text) abort();
    for (long b = 0; b < c->batch; b++) {
        const long size = c->context_len[b] + 1, entries = c->lengths * (c->supports + 2) * c->slots;
        for (long place = 0; place < size - 1; place += c->page_size) {
            const long page = c->table[b * c->table_width + place / c->page_size], left = size - 1 - place;
            memcpy(text + place, c->pages + page * c->page_size, (left < c->page_size ? left : c->page_size) * sizeof *text);
        }
        text[size - 1] = c->anchor[b];
        long at = 0, entry = 0;
        const long length = c->length[b] = match(text, size, c->longest, &at);
        while (entry + 1 < c->lengths && length >= c->length_from[entry + 1]) entry++;
        const float weight = c->temperature[b] < 0 ? 0 : c->temperature[b] > 1 ? 1 : c->temperature[b];
        for (long s = 0; s < c->slots; s++) {
            const int64_t token = length ? text[at + 1 + s % (size - 1 - at)] : 0;
            const int64_t *proposed = c->first_tokens + (b * c->slots + s) * c->width;
            const float *says = c->first_logprob + (b * c->slots + s) * c->width;
            float known = -INFINITY;
            for (long m = 0; m < c->width; m++)
                if (proposed[m] == token && says[m] > known) known = says[m];
            long support = known > -INFINITY;
            if (support)
                while (support <= c->supports && known > c->support_to[support - 1]) support++;
            const float *from = c->scores + (entry * (c->supports + 2) + support) * c->slots + s;
            c->tokens[b * c->slots + s] = token;
            c->logprob[b * c->slots + s] = length ? *from + weight * (from[entries] - *from) : -INFINITY;
        }
    }
    free(text);
}

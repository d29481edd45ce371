/* Draft trees, acceptance and committed K/V: what a decode step does besides products, without an operator a level.

   Specifications: `d2sd.plugins.trees.reference`, `d2sd.plugins.kv_pages.reference`. */
#pragma once

#include "vector.h"

#include <stdlib.h>

struct growth {
    long batch, slots, width, branches, nodes; /* B, S, M, K, N */
    const int64_t *anchor;                     /* [B] */
    const int64_t *tokens;                     /* [B, S, M] of the first pass */
    const float *logprob;
    const int64_t *branch_tokens;              /* [B, K, S] */
    const int64_t *prefix_len;                 /* [B, K] */
    const int64_t *second_tokens;              /* [B, K, S, M] */
    const float *second_logprob;
    int64_t *token, *parent, *depth, *branch_id; /* [B, N], written like all below */
    float *score;
    uint8_t *valid;
    uint8_t *mask;                             /* [B, N, N] */
};

/* A child that may become a node; `state` is the pass that drafted it: 0 the first, k the k-th branch. */
struct child {
    float score;
    int depth, parent, rank;
};

/* Among equals: upper levels first, then in the order of the parents and of the candidates. */
static int before(const struct child *a, const struct child *b) {
    if (a->score != b->score) return a->score > b->score;
    if (a->depth != b->depth) return a->depth < b->depth;
    return a->parent != b->parent ? a->parent < b->parent : a->rank < b->rank;
}

static void push(struct child *heap, long *count, struct child child) {
    long at = (*count)++;
    for (; at && before(&child, &heap[(at - 1) / 2]); at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
    heap[at] = child;
}

static struct child pop(struct child *heap, long *count) {
    const struct child best = heap[0], last = heap[--*count];
    long at = 0;
    for (long next; (next = 2 * at + 1) < *count; at = next) {
        if (next + 1 < *count && before(&heap[next + 1], &heap[next])) next++;
        if (!before(&heap[next], &last)) break;
        heap[at] = heap[next];
    }
    heap[at] = last;
    return best;
}

static void grow_one(const struct growth *g, long b, struct child *heap, int *state, uint64_t *passed) {
    const long n = g->nodes, draft = g->slots * g->width;
    int64_t *token = g->token + b * n, *parent = g->parent + b * n, *depth = g->depth + b * n;
    int64_t *branch_id = g->branch_id + b * n;
    float *score = g->score + b * n;
    uint8_t *mask = g->mask + b * n * n;
    long waiting = 0, node = 0;
    struct child child = {0};
    for (;;) {
        const long slot = child.depth - 1, source = node ? state[child.parent] : 0;
        if (node) {
            const long at = slot * g->width + child.rank;
            token[node] = source ? g->second_tokens[(b * g->branches + source - 1) * draft + at] : g->tokens[b * draft + at];
            memcpy(mask + node * n, mask + child.parent * n, n);
        } else {
            token[0] = g->anchor[b];
            memset(mask, 0, n);
        }
        parent[node] = child.parent, depth[node] = child.depth, branch_id[node] = source, score[node] = child.score;
        g->valid[b * n + node] = mask[node * n + node] = 1;
        /* A path is continued by the first branch whose prefix ends here, or else by the pass that drafted its end. */
        state[node] = (int)source;
        passed[node] = node ? 0 : ~0ull;
        int enters = 0;
        for (long k = 0; node && k < g->branches; k++) {
            const long at = b * g->branches + k;
            if (!(passed[child.parent] >> k & 1) || g->branch_tokens[at * g->slots + slot] != token[node]) continue;
            passed[node] |= 1ull << k;
            if (!enters && g->prefix_len[at] == child.depth) enters = 1, state[node] = (int)k + 1;
        }
        const long from = state[node];
        const float *logprob = from ? g->second_logprob + (b * g->branches + from - 1) * draft : g->logprob + b * draft;
        for (long m = 0; child.depth < g->slots && m < g->width; m++) {
            const float sum = child.score + logprob[child.depth * g->width + m];
            if (sum > -INFINITY) push(heap, &waiting, (struct child){sum, child.depth + 1, (int)node, (int)m});
        }
        if (++node == n || !waiting) break;
        child = pop(heap, &waiting);
    }
    for (; node < n; node++) { /* padding attends to itself */
        token[node] = parent[node] = depth[node] = branch_id[node] = 0;
        score[node] = -INFINITY;
        g->valid[b * n + node] = 0;
        memset(mask + node * n, 0, n);
        mask[node * n + node] = 1;
    }
}

/* The `nodes` likeliest nodes of every request; at most 64 branches. */
void d2sd_grow(const struct growth *g) {
    struct child *heap = malloc(g->nodes * (g->width * sizeof *heap + sizeof(int) + sizeof(uint64_t)) + 64);
    if (!heap) abort();
    uint64_t *passed = (uint64_t *)(((uintptr_t)(heap + g->nodes * g->width) + 7) & ~(uintptr_t)7);
    for (long b = 0; b < g->batch; b++) grow_one(g, b, heap, (int *)(passed + g->nodes), passed);
    free(heap);
}

struct acceptance {
    long batch, nodes, longest; /* B, N, G */
    const int64_t *tokens, *parent, *depth, *branch_id, *chosen; /* [B, N] */
    const uint8_t *valid;
    int64_t *path, *count, *out, *branch; /* [B, G], [B], [B, G], [B], written */
};

/* The path of nodes whose tokens the target chose at their parents. */
void d2sd_accept(const struct acceptance *a) {
    for (long b = 0; b < a->batch; b++) {
        const long at = b * a->nodes;
        int64_t *path = a->path + b * a->longest;
        uint8_t on[a->nodes];
        long last = 0, count = 0;
        memset(path, 0, a->longest * sizeof *path);
        for (long i = 0; i < a->nodes; i++) {
            const long parent = a->parent[at + i];
            on[i] = a->valid[at + i] && (!i || (on[parent] && a->tokens[at + i] == a->chosen[at + parent]));
            if (on[i]) path[a->depth[at + i]] = last = i, count++;
        }
        a->count[b] = count;
        a->branch[b] = a->branch_id[at + last];
        for (long g = 0; g < a->longest; g++) a->out[b * a->longest + g] = a->chosen[at + path[g]];
    }
}

/* The first of the largest of each row [count, size]; NaN is larger than any number. */
void d2sd_argmax(const float *x, long count, long size, int64_t *out) {
    for (long row = 0; row < count; row++, x += size) {
        f32x16 most = splat(-INFINITY);
        i32x16 nan = (i32x16)splat(0);
        long i = 0;
        for (; i + LANES <= size; i += LANES) {
            const f32x16 here = *(const f32x16 *)(x + i);
            most = select16(here > most, here, most);
            nan |= here != here;
        }
        float best = -INFINITY;
        int any_nan = 0;
        for (int lane = 0; lane < LANES; lane++) best = most[lane] > best ? most[lane] : best, any_nan |= nan[lane];
        for (; i < size; i++) best = x[i] > best ? x[i] : best, any_nan |= x[i] != x[i];
        long found = 0;
        while (any_nan ? x[found] == x[found] : x[found] != best) found++;
        out[row] = found;
    }
}

struct commit {
    long layers, batch, count, bytes; /* L, B, N, and Hkv D elements of a row in bytes */
    const char *k, *v;                /* [L, B, T, bytes], with these strides in bytes */
    long k_strides[3], v_strides[3];
    char *k_pages, *v_pages;          /* [L, P, Z, bytes] */
    long pages, page_size, table_width;
    const int64_t *table, *positions, *path; /* [B, M], [B, N], [B, N] or NULL */
    const uint8_t *keep;              /* [B, N] */
};

/* Rows of a pass into the pages of their requests. */
void d2sd_write_pages(const struct commit *c) {
    for (long b = 0; b < c->batch; b++)
        for (long n = 0; n < c->count; n++) {
            const long at = b * c->count + n, block = c->positions[at] / c->page_size;
            if (!c->keep[at] || block >= c->table_width) continue;
            const long row = c->path ? c->path[at] : n;
            long to = (c->table[b * c->table_width + block] * c->page_size + c->positions[at] % c->page_size) * c->bytes;
            for (long l = 0; l < c->layers; l++, to += c->pages * c->page_size * c->bytes) {
                memcpy(c->k_pages + to, c->k + l * c->k_strides[0] + b * c->k_strides[1] + row * c->k_strides[2], c->bytes);
                memcpy(c->v_pages + to, c->v + l * c->v_strides[0] + b * c->v_strides[1] + row * c->v_strides[2], c->bytes);
            }
        }
}

/* Draft trees, acceptance and committed K/V: what a decode step does besides products, without an operator a level.

   Specifications: `d2sd.plugins.trees.reference`, `d2sd.plugins.kv_pages.reference`. */
#pragma once

#include "vector.h"

#include <stdlib.h>

/* A row of candidates a branch; at the root one row, `kept` and `prefix_len` are NULL. */
struct source {
    long rows, width, lane, parents, follows; /* K, M, P: 1, or any and M */
    const int64_t *tokens;                    /* [B, K, S, M] */
    const float *table;                       /* [B, K, S, P, M] */
    const int64_t *kept;                      /* [B, K, S] */
    const int64_t *prefix_len;                /* [B, K] */
};

struct growth {
    long batch, slots, sources, nodes; /* B, S, N */
    const struct source *source;
    const int64_t *anchor;                       /* [B] */
    int64_t *token, *parent, *depth, *branch_id; /* [B, N], written like all below */
    float *score;
    uint8_t *valid;
    uint8_t *mask; /* [B, N, N] */
};

/* Of one request. */
struct row {
    const int64_t *tokens, *kept;
    const float *table;
    long width, lane, parents, follows, prefix_len;
};

/* A child that may become a node; `rank` among those of its parent, `candidate` among those of its row. */
struct child {
    float score;
    int depth, parent, rank, row, candidate;
    int64_t token;
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

/* What a row says of its candidates behind a node, of which it tells its own apart. */
static const float *logprobs(const struct row *rows, int row, const struct child *node) {
    const struct row *r = rows + row;
    const long above = r->parents > 1 && node->depth && node->row == row ? 1 + node->candidate : 0;
    return r->table + (node->depth * r->parents + above) * r->width;
}

/* Whether another lane proposes the token as well, and finds it likelier; of equals the earlier lane's stays. */
static int loses(const struct row *rows, const int *state, long lanes, long lane, const struct child *node, int64_t token,
                 float logprob) {
    for (long rival = 0; rival < lanes; rival++) {
        if (rival == lane || state[rival] < 0) continue;
        const long width = rows[state[rival]].width;
        const int64_t *tokens = rows[state[rival]].tokens + node->depth * width;
        const float *its = logprobs(rows, state[rival], node);
        for (long m = 0; m < width; m++)
            if (tokens[m] == token && (lane < rival ? its[m] > logprob : !(logprob > its[m]))) return 1;
    }
    return 0;
}

static void grow_one(const struct growth *g, const struct row *rows, long count, long b, struct child *heap,
                     uint64_t *passed, int *state) {
    const long n = g->nodes, lanes = rows[count - 1].lane + 1;
    int64_t *token = g->token + b * n, *parent = g->parent + b * n, *depth = g->depth + b * n;
    int64_t *branch_id = g->branch_id + b * n;
    float *score = g->score + b * n;
    uint8_t *mask = g->mask + b * n * n;
    long waiting = 0, node = 0;
    struct child child = {.token = g->anchor[b]};
    for (;; child = pop(heap, &waiting)) {
        token[node] = child.token, parent[node] = child.parent, depth[node] = child.depth;
        branch_id[node] = child.row, score[node] = child.score;
        if (node) memcpy(mask + node * n, mask + child.parent * n, n);
        else memset(mask, 0, n);
        g->valid[b * n + node] = mask[node * n + node] = 1;
        /* In each lane a path is continued by the first row whose prefix ends here, or else by that of its parent. */
        int *own = state + node * lanes;
        for (long lane = 0; lane < lanes; lane++) {
            own[lane] = node ? state[child.parent * lanes + lane] : -1;
            const struct row *row = rows + own[lane];
            if (own[lane] >= 0 && row->follows && row->tokens[(child.depth - 1) * row->width] != child.token) own[lane] = -1;
        }
        passed[node] = node ? 0 : ~0ull;
        for (long r = count - 1; r >= 0; r--) {
            if (!node && !rows[r].kept) own[rows[r].lane] = r;
            if (!node || !rows[r].kept || !(passed[child.parent] >> r & 1)) continue;
            if (rows[r].kept[child.depth - 1] != child.token) continue;
            passed[node] |= 1ull << r;
            if (rows[r].prefix_len == child.depth) own[rows[r].lane] = r;
        }
        int rank = 0;
        for (long lane = 0; child.depth < g->slots && lane < lanes; lane++) {
            if (own[lane] < 0) continue;
            const long width = rows[own[lane]].width;
            const int64_t *tokens = rows[own[lane]].tokens + child.depth * width;
            const float *logprob = logprobs(rows, own[lane], &child);
            for (long m = 0; m < width; m++, rank++) {
                const float sum = child.score + logprob[m];
                if (!(sum > -INFINITY) || loses(rows, own, lanes, lane, &child, tokens[m], logprob[m])) continue;
                push(heap, &waiting, (struct child){sum, child.depth + 1, node, rank, own[lane], m, tokens[m]});
            }
        }
        if (++node == n || !waiting) break;
    }
    for (; node < n; node++) { /* padding attends to itself */
        token[node] = parent[node] = depth[node] = branch_id[node] = 0;
        score[node] = -INFINITY;
        g->valid[b * n + node] = 0;
        memset(mask + node * n, 0, n);
        mask[node * n + node] = 1;
    }
}

/* The `nodes` likeliest nodes of every request; at most 64 rows. */
void d2sd_grow(const struct growth *g) {
    struct row rows[64];
    long width = 0, lanes = g->source[g->sources - 1].lane + 1;
    for (long s = 0; s < g->sources; s++) width += g->source[s].width;
    char *memory = malloc(g->nodes * (width * sizeof(struct child) + sizeof(uint64_t) + lanes * sizeof(int)));
    if (!memory) abort();
    uint64_t *passed = (uint64_t *)(memory + g->nodes * width * sizeof(struct child));
    for (long b = 0; b < g->batch; b++) {
        long count = 0;
        for (const struct source *s = g->source; s < g->source + g->sources; s++)
            for (long k = b * s->rows; k < (b + 1) * s->rows; k++) {
                const long draft = k * g->slots * s->width;
                rows[count++] = (struct row){s->tokens + draft, s->kept ? s->kept + k * g->slots : NULL,
                                             s->table + draft * s->parents, s->width, s->lane, s->parents,
                                             s->follows, s->kept ? s->prefix_len[k] : 0};
            }
        grow_one(g, rows, count, b, (struct child *)memory, passed, (int *)(passed + g->nodes));
    }
    free(memory);
}

struct acceptance {
    long batch, nodes, longest; /* B, N, G */
    const int64_t *tokens, *parent, *depth, *branch_id, *chosen; /* [B, N] */
    const uint8_t *valid;
    const int64_t *rows; /* [B], leading nodes that may be accepted, the root always; or NULL */
    int64_t *path, *count, *out, *branch; /* [B, G], [B], [B, G], [B], written */
};

/* The path of nodes whose tokens the target chose at their parents. */
void d2sd_accept(const struct acceptance *a) {
    for (long b = 0; b < a->batch; b++) {
        const long at = b * a->nodes, rows = a->rows ? a->rows[b] : a->nodes;
        int64_t *path = a->path + b * a->longest;
        uint8_t on[a->nodes];
        long last = 0, count = 0;
        memset(path, 0, a->longest * sizeof *path);
        for (long i = 0; i < a->nodes; i++) {
            const long parent = a->parent[at + i];
            on[i] = a->valid[at + i];
            if (i) on[i] &= i < rows && on[parent] && a->tokens[at + i] == a->chosen[at + parent];
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

/* The transformer layers of a target or drafter on a CPU: x [M, E] through all layers in one call. The M rows of B
   requests lie one behind the other: T each, or as many as a prompt has.

   Residual stream and sums are fp32. What a linear layer reads is fp32, or bf16 for BF16 weights; keys, values, features
   and the last hidden states have the weights' type. Structures mirror `d2sd.plugins.cpu.library`. */

#if defined(__aarch64__) && !defined(__clang__)
#pragma GCC optimize("no-gcse") /* on vectors of four registers this pass takes most of a minute, and finds nothing */
#endif

#include "attention.h"
#include "delta.h"
#include "drafts.h"
#include "linear.h"
#include "trees.h"

/* Belongs to a model, and grows to what its largest pass needs. */
struct memory {
    void *at;
    size_t bytes;
};

static char *at_least(struct memory *memory, size_t bytes) {
    if (memory->bytes < bytes) {
        free(memory->at);
        if (posix_memalign(&memory->at, 64, bytes)) abort();
        memory->bytes = bytes;
    }
    return memory->at;
}

void d2sd_free(struct memory *memory) {
    free(memory->at);
    memory->at = NULL;
    memory->bytes = 0;
}

struct layer {
    const float *input_norm, *post_norm, *q_norm, *k_norm, *branch_norm, *sinks; /* the last four may be NULL */
    long view;             /* number of the view by which it attends */
    struct linear qkv;     /* outputs q, padded to a panel, then k and v */
    struct linear o;
    struct linear gate_up; /* panels of gate and up in turns; without weights: the caller has the feed-forward network */
    struct linear down;
};

struct body {
    long layers, hidden, intermediate, heads, kv_heads, head_dim;
    long type;
    const float *norm;
    const struct layer *layer;
    double eps;
};

/* What rows see: the same for all layers of one window. */
struct view {
    const uint8_t *mask;   /* [B, T, T] with these strides, the last one 1; NULL: a row sees those before it */
    long mask_batch, mask_row;
    const int64_t *first;  /* [M], the first position that each row sees; NULL: 0. The mask bounds new rows too */
    const int64_t *table;  /* [B, M], of pages; in front of all rows' `first` any numbers */
    long table_width;
    const float *cos, *sin; /* [M, D] */
};

struct pass {
    long batch, rows;      /* B, and T: the most rows that a request has */
    const int64_t *starts; /* [B + 1], first row of each request, and M; with `joined` [2 B + 1]: behind all others come
                              each request's rows that join */
    float *x;              /* [M, E], overwritten */
    const struct view *view;
    long views;
    const char *const *k_pages, *const *v_pages; /* [L], of [P, Z, Hkv, D]; layers may differ in P */
    long page_size;
    const int64_t *context; /* [B] */
    void *k, *v;           /* [L, M, Hkv, D], written */
    const int64_t *aux;    /* ascending numbers of layers whose outputs are features */
    long aux_count;
    void *features;        /* [M, n E], written */
    void *hidden;          /* [M, E], normed, written */
    long begin, end;       /* the layers to run: of those before `end` the last one alone may lack a feed-forward network.
                              If it does, `hidden` is what that network reads, and x goes on behind its attention */
    long from;             /* the layer with whose rows `k`, `v` and `joined` begin */
    const struct layer *joined; /* the attention of rows that join; NULL: there are none */
    long own;              /* rows of the mask before those of rows that join */
};

struct run {
    const struct body *body;
    const struct pass *pass;
    long width, stride;    /* of qkv and of inputs to linear layers, in elements */
    char *input;           /* [M, stride] of what the next linear layer reads */
    float *qkv;            /* [M, width] */
    float *branch;         /* [M, E], where layers have a branch norm */
    int32_t *part;         /* [M], of each row: its request, and B more where it joins */
    int32_t *seen, *count; /* [views, M, T] and [views, M]: the new rows that a row sees; NULL without masks */
    float *scores;         /* a share of `room` * HEADS a thread */
    long room;
};

INLINE long parts(const struct pass *pass) { return pass->joined ? 2 * pass->batch : pass->batch; }
INLINE long all_rows(const struct pass *pass) { return pass->starts[parts(pass)]; }
/* The layer whose attention the rows of a part have. */
INLINE const struct layer *attention_of(const struct run *run, long number, long part) {
    const struct pass *pass = run->pass;
    return part < pass->batch ? run->body->layer + number : pass->joined + number - pass->from;
}
INLINE long whole_panels(long n) { return (n + PANEL - 1) / PANEL * PANEL; }

/* Store a row for a linear layer to read. */
INLINE void put_input(const struct run *run, long row, long column, const float *x, long count) {
    store(run->body->type == BF16 ? BF16 : F32, run->input, row * run->stride + column, x, count);
}

static void norm_rows(const struct run *run, const float *weight, const struct share *share) {
    const long size = run->body->hidden;
    float normed[size];
    long first, last;
    divide(all_rows(run->pass), share, &first, &last);
    for (long row = first; row < last; row++) {
        rms_norm(run->pass->x + row * size, weight, (float)run->body->eps, normed, size);
        put_input(run, row, 0, normed, size);
    }
}

/* Adds what attention made to the residual stream, normalized. */
static void add_normed(const struct run *run, const float *weight, const struct share *share) {
    const long size = run->body->hidden;
    float normed[size];
    long first, last;
    divide(all_rows(run->pass), share, &first, &last);
    for (long row = first; row < last; row++) {
        rms_norm(run->branch + row * size, weight, (float)run->body->eps, normed, size);
        for (long i = 0; i < size; i++) run->pass->x[row * size + i] += normed[i];
    }
}

static void silu_times(void *to, const float *up, const float *gate, long row, int rows, long column) {
    const struct run *run = to;
    const long left = run->body->intermediate - column;
    float product[PANEL];
    for (int m = 0; m < rows; m++) {
        for (int half = 0; half < PANEL; half += LANES) {
            const f32x16 g = *(f32x16 *)(gate + m * PANEL + half), u = *(f32x16 *)(up + m * PANEL + half);
            *(f32x16 *)(product + half) = silu16(g) * u;
        }
        put_input(run, row + m, column, product, left < PANEL ? left : PANEL);
    }
}

/* A product of attention, of `own` rows and of those that join. */
static void each_attention_tile(
    const struct run *run, const struct linear *own, const struct linear *joined, float *rows, long stride, int add,
    const struct share *share) {
    const long count = run->pass->starts[run->pass->batch];
    struct output output = {own->bias, rows, stride, stride, add};
    each_tile(own, run->input, run->stride, count, 0, put_sums, &output, share);
    if (!joined) return;
    struct output behind = {joined->bias, rows + count * stride, stride, stride, add};
    each_tile(joined, run->input + count * run->stride * input_size(joined->type), run->stride,
              all_rows(run->pass) - count, 0, put_sums, &behind, share);
}

/* --- phases of a layer --- */

/* Norms and rotates the heads of this thread's rows; stores their keys and values. */
static void heads_of_rows(const struct run *run, long number, const struct share *share) {
    const struct body *body = run->body;
    const struct pass *pass = run->pass;
    const long size = body->head_dim, kv = body->kv_heads * size, all = all_rows(pass);
    const long keys = whole_panels(body->heads * size);
    long first, last;
    divide(all, share, &first, &last);
    for (long row = first; row < last; row++) {
        const struct layer *layer = attention_of(run, number, run->part[row]);
        const struct view *view = pass->view + body->layer[number].view;
        float *q = run->qkv + row * run->width, *k = q + keys;
        for (long h = 0; h < body->heads + body->kv_heads; h++) {
            float *head = h < body->heads ? q + h * size : k + (h - body->heads) * size;
            const float *weight = h < body->heads ? layer->q_norm : layer->k_norm;
            if (weight) rms_norm(head, weight, (float)body->eps, head, size);
            rotate(head, view->cos + row * size, view->sin + row * size, size);
        }
        const long line = (number - pass->from) * all + row;
        store((int)body->type, pass->k, line * kv, k, kv);
        store((int)body->type, pass->v, line * kv, k + kv, kv);
    }
}

INLINE void attend_some(
    int heads, const int size, const int type, const float *q, const struct keys *k, const struct keys *v,
    const float *sinks, float *scores, long room, float *out) {
    switch (heads) {
    case 1: attend(size, 1, type, q, k, v, sinks, scores, room, out); break;
    case 2: attend(size, 2, type, q, k, v, sinks, scores, room, out); break;
    case 3: attend(size, 3, type, q, k, v, sinks, scores, room, out); break;
    default: attend(size, 4, type, q, k, v, sinks, scores, room, out);
    }
}

static __attribute__((noinline)) void attend_heads(
    int heads, int size, int type, const float *q, const struct keys *k, const struct keys *v, const float *sinks,
    float *scores, long room, float *out) {
#define USE(SIZE, TYPE) \
    if (size == SIZE && type == TYPE) { attend_some(heads, SIZE, TYPE, q, k, v, sinks, scores, room, out); return; }
    USE(64, F32) USE(64, BF16) USE(128, F32) USE(128, BF16)
#undef USE
    attend(size, heads, type, q, k, v, sinks, scores, room, out);
}

static void attend_rows(const struct run *run, long number, const struct share *share) {
    const struct body *body = run->body;
    const struct pass *pass = run->pass;
    const struct view *view = pass->view + body->layer[number].view;
    const long size = body->head_dim, group = body->heads / body->kv_heads, all = all_rows(pass);
    const long row_bytes = body->kv_heads * size * type_size(body->type);
    const long at_once = size <= 64 ? HEADS : size <= 128 ? 2 : 1;
    float *scores = run->scores + share->thread * HEADS * run->room, out[HEADS * MOST_SIZE];
    long first, last;
    divide(all * body->kv_heads, share, &first, &last);
    for (long item = first; item < last; item++) {
        const long part = run->part[item / body->kv_heads], b = part % pass->batch;
        const long start = pass->starts[part], rows = pass->starts[part + 1] - start;
        const struct layer *layer = attention_of(run, number, part);
        const long h = (item - start * body->kv_heads) / rows, row = start + (item - start * body->kv_heads) % rows;
        const long context = pass->context[b], bound = view->first ? view->first[row] : 0;
        const long first = bound < context ? bound : context, line = (view - pass->view) * all + row;
        const long skipped = run->seen ? 0 : bound - first; /* rows of a prompt's chunk in front of the window */
        const long base = ((number - pass->from) * all + (run->seen ? 0 : start + skipped)) * row_bytes;
        struct keys k = {
            .pages = pass->k_pages[number],
            .rows = (const char *)pass->k + base,
            .table = view->table + b * view->table_width, .page_size = pass->page_size,
            .first = first, .context = context,
            .seen = run->seen ? run->seen + line * pass->rows : NULL,
            .count = run->seen ? run->count[line] : row - start + 1 - skipped,
            .heads = body->kv_heads, .head = h, .type = (int)body->type,
        };
        struct keys v = k;
        v.pages = pass->v_pages[number];
        v.rows = (const char *)pass->v + base;
        for (long done = 0; done < group; done += at_once) {
            const long heads = group - done < at_once ? group - done : at_once, column = (h * group + done) * size;
            attend_heads((int)heads, (int)size, (int)body->type, run->qkv + row * run->width + column, &k, &v,
                         layer->sinks ? layer->sinks + h * group + done : NULL, scores, run->room, out);
            put_input(run, row, column, out, heads * size);
        }
    }
}

static void list_seen(const struct run *run, const struct share *share) {
    const struct pass *pass = run->pass;
    const long all = all_rows(pass);
    long first, last;
    divide(pass->views * all, share, &first, &last);
    for (long line = first; line < last; line++) {
        const struct view *view = pass->view + line / all;
        const long row = line % all, part = run->part[row], b = part % pass->batch;
        const long at = row - pass->starts[part] + (part < pass->batch ? 0 : pass->own);
        const uint8_t *mask = view->mask + b * view->mask_batch + at * view->mask_row;
        int32_t *seen = run->seen + line * pass->rows, count = 0;
        for (long other = b; other < parts(pass); other += pass->batch, mask += pass->own)
            for (long start = pass->starts[other], u = 0; u < pass->starts[other + 1] - start; u++)
                if (mask[u]) seen[count++] = (int32_t)(start + u);
        run->count[line] = count;
    }
}

static void forward(void *arguments, const struct share *share) {
    const struct run *run = arguments;
    const struct body *body = run->body;
    const struct pass *pass = run->pass;
    const long all = all_rows(pass), hidden = body->hidden;
    long aux = 0, first, last;
    divide(all, share, &first, &last);
    if (run->seen) list_seen(run, share);
    const float *norm = body->norm;
    while (aux < pass->aux_count && pass->aux[aux] < pass->begin) aux++;
    for (long number = pass->begin; number < pass->end; number++) {
        const struct layer *layer = body->layer + number;
        const struct layer *joined = pass->joined ? pass->joined + number - pass->from : NULL;
        struct output down = {layer->down.bias, pass->x, hidden, hidden, 1};
        norm_rows(run, layer->input_norm, share);
        barrier(share);
        each_attention_tile(run, &layer->qkv, joined ? &joined->qkv : NULL, run->qkv, run->width, 0, share);
        barrier(share);
        heads_of_rows(run, number, share);
        barrier(share);
        attend_rows(run, number, share);
        barrier(share);
        const int normed_branch = layer->branch_norm != NULL;
        each_attention_tile(run, &layer->o, joined ? &joined->o : NULL, normed_branch ? run->branch : pass->x, hidden,
                            !normed_branch, share);
        barrier(share);
        if (normed_branch) {
            add_normed(run, layer->branch_norm, share);
            barrier(share);
        }
        if (!layer->gate_up.weight) {
            norm = layer->post_norm;
            break;
        }
        norm_rows(run, layer->post_norm, share);
        barrier(share);
        /* The product is written where nothing is read any more: into the second half of the inputs. */
        struct run second = *run;
        second.input += all * run->stride * input_size(layer->down.type);
        each_tile(&layer->gate_up, run->input, run->stride, all, 1, silu_times, &second, share);
        barrier(share);
        each_tile(&layer->down, second.input, run->stride, all, 0, put_sums, &down, share);
        barrier(share);
        if (aux < pass->aux_count && pass->aux[aux] == number) {
            for (long row = first; row < last; row++)
                store((int)body->type, pass->features, (row * pass->aux_count + aux) * hidden, pass->x + row * hidden,
                      hidden);
            aux++;
        }
    }
    float normed[hidden];
    for (long row = first; row < last; row++) {
        rms_norm(pass->x + row * hidden, norm, (float)body->eps, normed, hidden);
        store((int)body->type, pass->hidden, row * hidden, normed, hidden);
    }
}

/* A pass that works in `memory`, the first `first` bytes of which are the caller's. */
static struct run run_of(
    const struct body *body, const struct pass *pass, struct memory *memory, long first, int threads) {
    const long all = all_rows(pass);
    long longest = 0;
    for (long b = 0; b < pass->batch; b++) longest = pass->context[b] > longest ? pass->context[b] : longest;
    struct run run = {.body = body, .pass = pass, .room = longest + pass->rows + LANES};
    const long lines = pass->view->mask ? pass->views * all : 0, seen = lines * (pass->rows + 1) * 4;
    char *at = at_least(memory, first + seen + all * 4 + threads * HEADS * run.room * 4) + first;
    run.part = (int32_t *)at;
    run.count = lines ? (int32_t *)(at + all * 4) : NULL;
    run.seen = lines ? run.count + lines : NULL;
    run.scores = (float *)(at + all * 4 + seen);
    for (long part = 0; part < parts(pass); part++)
        for (long row = pass->starts[part]; row < pass->starts[part + 1]; row++) run.part[row] = (int32_t)part;
    return run;
}

/* Layers of a body, on up to `threads` threads. */
void d2sd_layers(const struct body *body, const struct pass *pass, struct memory *memory, int threads) {
    const long all = all_rows(pass), size = body->head_dim, width = body->layer[0].qkv.out;
    long widest = body->hidden > body->intermediate ? body->hidden : body->intermediate;
    if (widest < body->heads * size) widest = body->heads * size;
    const long stride = even(widest), inputs = 2 * all * stride * 4, qkv = all * width * 4;
    const long branch = body->layer[0].branch_norm ? all * body->hidden * 4 : 0;
    struct run run = run_of(body, pass, memory, inputs + qkv + branch, threads);
    run.stride = stride;
    run.width = width;
    run.input = memory->at;
    if (body->type == BF16) memset(run.input, 0, inputs); /* an odd last column is read as a pair */
    run.qkv = (float *)(run.input + inputs);
    run.branch = (float *)(run.input + inputs + qkv);
    run_pass(forward, &run, threads);
}

static void attend_alone(void *run, const struct share *share) {
    if (((const struct run *)run)->seen) list_seen(run, share);
    barrier(share);
    attend_rows(run, 0, share);
}

/* The attention of one layer, by itself: q [M, Hq D] and the keys and values in `pass` -> heads [M, Hq D], of bf16 for a
   BF16 body and of fp32 otherwise. */
void d2sd_attend(
    const struct body *body, const struct pass *pass, float *q, void *heads, struct memory *memory, int threads) {
    struct run run = run_of(body, pass, memory, 0, threads);
    run.width = run.stride = body->heads * body->head_dim;
    run.qkv = q;
    run.input = heads;
    run_pass(attend_alone, &run, threads);
}

struct product {
    const struct linear *layer;
    const void *x;
    long stride, rows;
    struct output output;
};

static void product(void *arguments, const struct share *share) {
    struct product *one = arguments;
    each_tile(one->layer, one->x, one->stride, one->rows, 0, put_sums, &one->output, share);
}

/* out [rows, size] = x [rows, stride] W^T + b; `size` may cut off the padding of the outputs. */
void d2sd_linear(const struct linear *layer, const void *x, long stride, long rows, float *out, long size, int threads) {
    struct product one = {layer, x, stride, rows, {layer->bias, out, size, size, 0}};
    run_pass(product, &one, threads);
}

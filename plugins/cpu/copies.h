/* A copy of a request's own earlier text. Specification: `d2sd.plugins.lookup.reference`. */
#pragma once

#include "vector.h"

#include <stdlib.h>

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

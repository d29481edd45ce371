/* The memory that a pass works in. */
#pragma once

#include <stdlib.h>

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

/* The threads of a pass: OpenMP's, which PyTorch has loaded already, so that its operators and these kernels share one
   team a calling thread and never wait for each other's. The functions are given by address: no compiler flag or library
   of OpenMP is needed. Each thread runs the whole pass on its share of every layer, with a barrier between phases. */
#pragma once

#include <stdlib.h>

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

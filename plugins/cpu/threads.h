/* The threads that run a pass: each runs the whole of it on its share of every layer, with a barrier between the
   phases. One pass runs at a time; the threads sleep between passes. */
#pragma once

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

/* A thread's part in a pass. */
struct share {
    int thread, threads;
    int sense; /* of the barrier */
};

typedef void (*job)(void *arguments, struct share *share);

static struct {
    pthread_mutex_t pass; /* held while a pass runs */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    pid_t owner; /* a forked child has none of these threads */
    int started; /* threads, the caller not counted */
    job run;
    void *arguments;
    int threads;
    atomic_uint number; /* of the pass */
    atomic_int arrived, sense, left;
} pool = {.pass = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static inline void relax(int spins) {
    if (spins > 4096) sched_yield(); /* more threads than cores: let the others arrive */
#ifdef __x86_64__
    else _mm_pause();
#endif
}

/* Wait until every thread of the pass is here. */
static inline void barrier(struct share *share) {
    if (share->threads == 1) return;
    int sense = share->sense = !share->sense;
    if (atomic_fetch_add(&pool.arrived, 1) == share->threads - 1) {
        atomic_store(&pool.arrived, 0);
        atomic_store(&pool.sense, sense);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&pool.sense, memory_order_acquire) != sense; spins++) relax(spins);
}

/* [first, last) of `count` things for this thread. */
static inline void divide(long count, const struct share *share, long *first, long *last) {
    *first = count * share->thread / share->threads;
    *last = count * (share->thread + 1) / share->threads;
}

static void *work(void *argument) {
    int thread = (int)(intptr_t)argument;
    unsigned done = atomic_load(&pool.number) - 1; /* the pass that started this thread is its first */
    for (;;) {
        for (int spins = 0; atomic_load(&pool.number) == done && spins < 2048; spins++) relax(spins);
        if (atomic_load(&pool.number) == done) {
            pthread_mutex_lock(&pool.lock);
            while (atomic_load(&pool.number) == done) pthread_cond_wait(&pool.wake, &pool.lock);
            pthread_mutex_unlock(&pool.lock);
        }
        done = atomic_load(&pool.number);
        if (thread < pool.threads) {
            struct share share = {thread, pool.threads, atomic_load(&pool.sense)};
            pool.run(pool.arguments, &share);
        }
        atomic_fetch_sub(&pool.left, 1);
    }
    return NULL;
}

/* Run `run` on `threads` threads, this one among them; back when all have finished. The caller holds `pool.pass`. */
static void run_pass(job run, void *arguments, int threads) {
    if (pool.owner != getpid()) {
        pool.owner = getpid();
        pool.started = 0;
        pthread_mutex_init(&pool.lock, NULL);
        pthread_cond_init(&pool.wake, NULL);
    }
    pthread_mutex_lock(&pool.lock);
    int fresh = 0;
    while (pool.started + fresh < threads - 1) fresh++;
    pool.run = run;
    pool.arguments = arguments;
    pool.threads = threads;
    atomic_store(&pool.left, pool.started + fresh);
    atomic_fetch_add(&pool.number, 1);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    for (; fresh; fresh--) {
        pthread_t made;
        if (pthread_create(&made, NULL, work, (void *)(intptr_t)(pool.started + 1))) abort();
        pthread_detach(made);
        pool.started++;
    }
    struct share share = {0, threads, atomic_load(&pool.sense)};
    run(arguments, &share);
    for (int spins = 0; atomic_load(&pool.left); spins++) relax(spins);
}

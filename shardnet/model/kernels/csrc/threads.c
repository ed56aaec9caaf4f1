/* Items of a job on the threads of torch's OpenMP library, which kernels/library.py finds: a second pool of threads
 * would wait for the same cores.
 *
 * GNU's library has GOMP_parallel. Intel's and LLVM's has it too, but for Windows; there this file calls what compilers
 * call for `#pragma omp parallel`.
 */

#include <stdatomic.h>
#include <stddef.h>

#include "linear.h"

struct job {
    work_function work;
    const void *argument;
    _Atomic int64_t next;
    int64_t n_items, piece;
};

static void take_pieces(void *argument) {
    struct job *job = argument;
    int64_t begin;
    while ((begin = atomic_fetch_add(&job->next, 1) * job->piece) < job->n_items) {
        int64_t end = begin + job->piece;
        job->work(job->argument, begin, end < job->n_items ? end : job->n_items);
    }
}

void shardnet_parallel_for(const struct team *team, work_function work, const void *argument, int64_t n_items,
                           int64_t piece) {
    struct job job = {.work = work, .argument = argument, .n_items = n_items, .piece = piece};
    if (!team->parallel || team->n_threads < 2 || n_items <= piece) {
        work(argument, 0, n_items);
        return;
    }
    atomic_init(&job.next, 0);
    team->parallel(take_pieces, &job, (unsigned)team->n_threads, 0);
}

/* --- libiomp5md.dll: kmp.h of LLVM's openmp has these structs and functions */

struct place {
    int32_t reserved_1, flags, reserved_2, reserved_3;
    const char *source; /* ;file;function;line;column;; */
};
typedef void (*region_function)(int32_t *number, int32_t *number_in_team, void (*)(void *), void *);

static struct place here = {.flags = 2, .source = ";shardnet;threads.c;0;0;;"}; /* 2: by a compiler */
static void (*fork_call)(struct place *, int32_t n_arguments, region_function, ...);
static void (*push_n_threads)(struct place *, int32_t number, int32_t n_threads);
static int32_t (*number_of_thread)(struct place *);

static void run_region(int32_t *number, int32_t *number_in_team, void (*function)(void *), void *argument) {
    (void)number, (void)number_in_team;
    function(argument);
}

/* What GOMP_parallel does. */
static void fork_and_join(void (*function)(void *), void *argument, unsigned n_threads, unsigned flags) {
    (void)flags;
    push_n_threads(&here, number_of_thread(&here), (int32_t)n_threads); /* of the next region */
    fork_call(&here, 2, run_region, function, argument);
}

/* Takes __kmpc_fork_call, __kmpc_push_num_threads and __kmpc_global_thread_num, always the same ones, and returns a
 * function that runs others on several threads by them. */
parallel_function shardnet_parallel_by_kmpc(void *fork, void *push, void *number) {
    fork_call = (void (*)(struct place *, int32_t, region_function, ...))fork;
    push_n_threads = (void (*)(struct place *, int32_t, int32_t))push;
    number_of_thread = (int32_t(*)(struct place *))number;
    return fork_and_join;
}

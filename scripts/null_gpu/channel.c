// How ranks meet in shared memory, wait for one another with a deadline, and notice that one is gone.
#define _GNU_SOURCE
#include "nccl.h"
#include <fcntl.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

static double deadline(void) { // seconds
    const char *value = getenv("NULL_GPU_DEADLINE");
    return value ? atof(value) : 120;
}

// The first text stays: what follows a failure are its consequences.
int fail(Communicator *communicator, int error, const char *format, ...) {
    atomic_store(&communicator->shared->failed, 1);
    if (!*communicator->error) {
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(communicator->error, sizeof communicator->error, format, arguments);
        va_end(arguments);
        say("NCCL, rank %d of %d: %s", communicator->rank, communicator->num_ranks, communicator->error);
    }
    return error;
}

Wait start_wait(void) { return (Wait){now() + deadline(), 0}; }

int pause_for(Communicator *communicator, Wait *wait, int awaited_rank, const char *what) {
    Rank *awaited = &communicator->shared->ranks[awaited_rank];
    if (++wait->turns < 100) return sched_yield(), 0;
    usleep(wait->turns < 1000 ? 50 : 1000);
    if (wait->turns % 64) return 0;
    int pid = atomic_load(&awaited->pid);
    // NCCL on GPUs does not notice it, and waits on.
    int notices_an_end = !getenv("NULL_GPU_WAITS_FOR_LOST_RANKS");
    if (notices_an_end && pid && process_start(pid) != awaited->start)
        return fail(communicator, NCCL_REMOTE_ERROR, "rank %d (process %d) has ended before the %s", awaited_rank, pid,
                    what);
    if (atomic_load(&communicator->shared->failed))
        return fail(communicator, NCCL_REMOTE_ERROR, "another rank has failed before the %s", what);
    if (now() > wait->until)
        return fail(communicator, NCCL_REMOTE_ERROR, "rank %d did not come to the %s within %g s (NULL_GPU_DEADLINE)",
                    awaited_rank, what, deadline());
    return 0;
}

char *chunk_of(Communicator *communicator, int rank, int parity) {
    return (char *)(communicator->shared + 1) + (2ul * rank + parity) * CHUNK;
}

Mail *mail(Communicator *communicator, int from, int to) {
    Mail *mails = (Mail *)chunk_of(communicator, communicator->num_ranks, 0);
    return &mails[from * communicator->num_ranks + to];
}

int barrier(Communicator *communicator, const char *what) {
    uint64_t number = ++communicator->barriers;
    atomic_store(&communicator->shared->ranks[communicator->rank].arrived, number);
    for (int rank = 0; rank < communicator->num_ranks; rank++) {
        Wait wait = start_wait();
        while (atomic_load(&communicator->shared->ranks[rank].arrived) < number) {
            int error = pause_for(communicator, &wait, rank, what);
            if (error) return error;
        }
    }
    return 0;
}

int join(Communicator **joined, const char *name, int num_ranks, int rank) {
    if (num_ranks < 1 || num_ranks > MAX_RANKS || rank < 0 || rank >= num_ranks) return NCCL_INVALID_ARGUMENT;
    Communicator *communicator = calloc(1, sizeof *communicator);
    communicator->num_ranks = num_ranks, communicator->rank = rank, communicator->device = current_device;
    communicator->shared_bytes = sizeof(Shared) + 2ul * CHUNK * num_ranks + sizeof(Mail) * num_ranks * num_ranks;
    snprintf(communicator->name, sizeof communicator->name, "%s", name);
    pthread_mutex_init(&communicator->mutex, NULL);
    char path[128];
    snprintf(path, sizeof path, "/dev/shm/%s", name);
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, communicator->shared_bytes)) return NCCL_SYSTEM_ERROR;
    communicator->shared = mmap(NULL, communicator->shared_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (communicator->shared == MAP_FAILED) return NCCL_SYSTEM_ERROR;
    Rank *own = &communicator->shared->ranks[rank];
    own->start = process_start(getpid());
    atomic_store(&own->pid, getpid());
    int error = barrier(communicator, "start of the communicator");
    unlink(path); // all have it mapped, or nobody may come any more
    *joined = communicator;
    return error;
}

void leave(Communicator *communicator) {
    munmap(communicator->shared, communicator->shared_bytes);
    free(communicator);
}

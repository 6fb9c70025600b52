// NCCL between the processes of one machine. An operation is done when its call returns, in a group when the group
// ends. https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html
#define _GNU_SOURCE
#include "nccl.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef enum { ALL_REDUCE, REDUCE_TO, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, SEND, RECEIVE } Sort;
static const char *const names[] = {"all-reduce",     "reduce",     "broadcast", "all-gather",
                                    "reduce-scatter", "all-to-all", "send",      "receive"};

typedef struct {
    Sort kind;
    const char *from;
    char *to;
    uint64_t count;            // elements as the call gives them
    int type, operation, root; // root: of a broadcast or reduce; the peer of a send or receive
    Communicator *communicator;
    uint64_t moved; // bytes of a send or receive that are done
} Operation;

// Factors of ncclRedOpCreatePreMulSum, by the number of the operation that stands for each.
#define FIRST_CUSTOM 5
#define MAX_CUSTOM 4096
static double factors[MAX_CUSTOM];
static atomic_int num_factors;
EXPORT int ncclRedOpCreatePreMulSum(int *operation, const void *value, int type, int residence,
                                    Communicator *communicator) {
    int index = atomic_fetch_add(&num_factors, 1) % MAX_CUSTOM; // each is used and destroyed at once
    factors[index] = scalar(value, type);
    return *operation = FIRST_CUSTOM + index, 0;
}
EXPORT int ncclRedOpDestroy(int operation, Communicator *communicator) { return 0; }

static bool reduce_chunks(const Operation *operation, char *to, char *const chunks[], size_t bytes) {
    bool custom = operation->operation >= FIRST_CUSTOM;
    double factor = custom ? factors[operation->operation - FIRST_CUSTOM] : 1;
    size_t count = bytes / type_bytes(operation->type);
    return reduce(to, chunks, operation->communicator->num_ranks, count, operation->type,
                  custom ? 0 : operation->operation, factor);
}

// Of the chunk that lies at `offset` of every rank's input: what this rank needs of it goes to its output.
static bool collect(const Operation *operation, uint64_t part, uint64_t offset, uint64_t length, char *const chunks[]) {
    Communicator *communicator = operation->communicator;
    uint64_t own = part * communicator->rank; // where an input that is divided among the ranks has this rank's part
    uint64_t start = offset > own ? offset : own, end = offset + length < own + part ? offset + length : own + part;
    char *parts[MAX_RANKS];
    switch (operation->kind) {
    case ALL_REDUCE: return reduce_chunks(operation, operation->to + offset, chunks, length);
    case REDUCE_TO:
        return operation->root != communicator->rank ||
               reduce_chunks(operation, operation->to + offset, chunks, length);
    case BROADCAST: return memmove(operation->to + offset, chunks[operation->root], length);
    case ALL_GATHER:
        for (int rank = 0; rank < communicator->num_ranks; rank++)
            memmove(operation->to + part * rank + offset, chunks[rank], length);
        return true;
    default: // REDUCE_SCATTER, ALL_TO_ALL
        if (start >= end) return true;
        for (int rank = 0; rank < communicator->num_ranks; rank++) {
            parts[rank] = chunks[rank] + (start - offset);
            if (operation->kind == ALL_TO_ALL)
                memmove(operation->to + part * rank + start - own, parts[rank], end - start);
        }
        return operation->kind == ALL_TO_ALL ||
               reduce_chunks(operation, operation->to + start - own, parts, end - start);
    }
}

// One barrier a chunk: two buffers take turns, and a rank writes into one again after all have read it.
static int run_collective(const Operation *operation) {
    Communicator *communicator = operation->communicator;
    const char *name = names[operation->kind];
    bool divided = operation->kind == REDUCE_SCATTER || operation->kind == ALL_TO_ALL;
    uint64_t part = operation->count * type_bytes(operation->type);
    uint64_t bytes = divided ? part * communicator->num_ranks : part;
    Announcement announcement = {operation->kind, operation->type, operation->operation, operation->root,
                                 operation->count};
    if (announcement.operation > FIRST_CUSTOM) announcement.operation = FIRST_CUSTOM;
    count(COLLECTIVES, 1);
    bool contributes = operation->kind != BROADCAST || operation->root == communicator->rank;
    bool moved = moves(bytes);
    for (uint64_t offset = 0; offset < bytes; offset += CHUNK) {
        uint64_t length = bytes - offset < CHUNK ? bytes - offset : CHUNK;
        int parity = (communicator->barriers + 1) % 2;
        communicator->shared->ranks[communicator->rank].announced[parity] = announcement;
        if (contributes && moved)
            memcpy(chunk_of(communicator, communicator->rank, parity), operation->from + offset, length);
        int error = barrier(communicator, name);
        if (error) return error;
        char *chunks[MAX_RANKS];
        for (int rank = 0; rank < communicator->num_ranks; rank++) {
            Announcement *other = &communicator->shared->ranks[rank].announced[parity];
            if (memcmp(other, &announcement, sizeof announcement))
                return fail(communicator, NCCL_INVALID_USAGE,
                            "%s of %llu elements of type %d, while rank %d does %s of %llu of type %d", name,
                            (unsigned long long)announcement.count, announcement.type, rank, names[other->kind],
                            (unsigned long long)other->count, other->type);
            chunks[rank] = chunk_of(communicator, rank, parity);
        }
        if (moved && !collect(operation, part, offset, length, chunks))
            return fail(communicator, NCCL_INVALID_ARGUMENT, "%s has no reduction for type %d", name, operation->type);
    }
    return 0;
}

// Moves one chunk of a send or receive if the mail allows it. 1: moved, 0: not yet, -1: an error.
static int step_mail(Operation *operation) {
    Communicator *communicator = operation->communicator;
    bool sends = operation->kind == SEND;
    int from = sends ? communicator->rank : operation->root, to = sends ? operation->root : communicator->rank;
    Mail *box = mail(communicator, from, to);
    uint64_t bytes = operation->count * type_bytes(operation->type);
    bool full = atomic_load(&box->written) != atomic_load(&box->read);
    if (full == sends) return 0;
    uint64_t length = bytes - operation->moved < MAIL_CHUNK ? bytes - operation->moved : MAIL_CHUNK;
    if (sends) {
        box->message_bytes = bytes;
        memcpy(box->bytes, operation->from + operation->moved, length);
        atomic_fetch_add(&box->written, 1);
    } else {
        if (box->message_bytes != bytes) {
            fail(communicator, NCCL_INVALID_USAGE, "receive of %llu bytes from rank %d, which sends %llu",
                 (unsigned long long)bytes, from, (unsigned long long)box->message_bytes);
            return -1;
        }
        memcpy(operation->to + operation->moved, box->bytes, length);
        atomic_fetch_add(&box->read, 1);
    }
    operation->moved += length;
    return 1;
}

static bool done(const Operation *operation) {
    return operation->moved == operation->count * type_bytes(operation->type);
}

// Messages between two ranks arrive in order: one waits for those before it.
static bool first_of_its_kind(const Operation *operations, int index) {
    const Operation *own = &operations[index];
    for (const Operation *earlier = operations; earlier < own; earlier++)
        if (earlier->kind == own->kind && earlier->root == own->root && earlier->communicator == own->communicator &&
            !done(earlier))
            return false;
    return true;
}

static int run_mail(Operation *operations, int number) {
    Wait wait = start_wait();
    for (;;) {
        Operation *waiting = NULL;
        bool moved = false;
        for (int index = 0; index < number; index++) {
            Operation *operation = &operations[index];
            if (operation->kind < SEND || done(operation)) continue;
            waiting = operation;
            int step = first_of_its_kind(operations, index) ? step_mail(operation) : 0;
            if (step < 0) return NCCL_INVALID_USAGE;
            moved |= step;
        }
        if (!waiting) return 0;
        if (moved)
            wait = start_wait();
        else {
            int error = pause_for(waiting->communicator, &wait, waiting->root, names[waiting->kind]);
            if (error) return error;
        }
    }
}

static int run(Operation *operations, int number) {
    int error = 0;
    for (int index = 0; index < number && !error; index++) {
        if (operations[index].kind >= SEND) continue;
        pthread_mutex_lock(&operations[index].communicator->mutex);
        error = run_collective(&operations[index]);
        pthread_mutex_unlock(&operations[index].communicator->mutex);
    }
    return error ? error : run_mail(operations, number);
}

// Groups, of each thread.
static _Thread_local int group_depth, num_pending, room_for_pending;
static _Thread_local Operation *pending;

EXPORT int ncclGroupStart(void) { return group_depth++, 0; }
EXPORT int ncclGroupEnd(void) {
    if (group_depth == 0) return NCCL_INVALID_USAGE;
    if (--group_depth) return 0;
    int number = num_pending;
    num_pending = 0;
    return run(pending, number);
}

static int add(Operation operation) {
    if (!type_bytes(operation.type) || operation.root < 0 || operation.root >= operation.communicator->num_ranks)
        return NCCL_INVALID_ARGUMENT;
    if (!group_depth) return run(&operation, 1);
    if (num_pending == room_for_pending)
        pending = realloc(pending, (room_for_pending = 2 * room_for_pending + 16) * sizeof *pending);
    return pending[num_pending++] = operation, 0;
}

EXPORT int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, Communicator *communicator,
                         void *stream) {
    return add((Operation){ALL_REDUCE, from, to, count, type, operation, 0, communicator});
}
EXPORT int ncclReduce(const void *from, void *to, size_t count, int type, int operation, int root,
                      Communicator *communicator, void *stream) {
    return add((Operation){REDUCE_TO, from, to, count, type, operation, root, communicator});
}
EXPORT int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Communicator *communicator,
                         void *stream) {
    return add((Operation){BROADCAST, from, to, count, type, 0, root, communicator});
}
EXPORT int ncclBcast(void *buffer, size_t count, int type, int root, Communicator *communicator, void *stream) {
    return ncclBroadcast(buffer, buffer, count, type, root, communicator, stream);
}
EXPORT int ncclAllGather(const void *from, void *to, size_t count, int type, Communicator *communicator, void *stream) {
    return add((Operation){ALL_GATHER, from, to, count, type, 0, 0, communicator});
}
EXPORT int ncclReduceScatter(const void *from, void *to, size_t count, int type, int operation,
                             Communicator *communicator, void *stream) {
    return add((Operation){REDUCE_SCATTER, from, to, count, type, operation, 0, communicator});
}
EXPORT int ncclAlltoAll(const void *from, void *to, size_t count, int type, Communicator *communicator, void *stream) {
    return add((Operation){ALL_TO_ALL, from, to, count, type, 0, 0, communicator});
}
EXPORT int ncclSend(const void *from, size_t count, int type, int peer, Communicator *communicator, void *stream) {
    return add((Operation){SEND, from, NULL, count, type, 0, peer, communicator});
}
EXPORT int ncclRecv(void *to, size_t count, int type, int peer, Communicator *communicator, void *stream) {
    return add((Operation){RECEIVE, NULL, to, count, type, 0, peer, communicator});
}

// Communicators.
typedef struct {
    char name[128];
} UniqueId;
EXPORT int ncclGetUniqueId(UniqueId *id) {
    static atomic_int last;
    memset(id, 0, sizeof *id);
    snprintf(id->name, 64, "null_gpu_nccl.%d.%llu.%d", getpid(), (unsigned long long)process_start(getpid()),
             atomic_fetch_add(&last, 1));
    return 0;
}
EXPORT int ncclCommInitRank(Communicator **communicator, int num_ranks, UniqueId id, int rank) {
    return join(communicator, id.name, num_ranks, rank);
}
EXPORT int ncclCommInitRankConfig(Communicator **communicator, int num_ranks, UniqueId id, int rank, void *config) {
    return join(communicator, id.name, num_ranks, rank);
}
EXPORT int ncclCommInitRankScalable(Communicator **communicator, int num_ranks, int rank, int num_ids, UniqueId *ids,
                                    void *config) {
    return join(communicator, ids[0].name, num_ranks, rank);
}

// The ranks of one color, in the order of their keys, are a communicator of their own.
EXPORT int ncclCommSplit(Communicator *communicator, int color, int key, Communicator **part, void *config) {
    typedef struct {
        int color, key;
    } Choice;
    Choice own = {color, key}, choices[MAX_RANKS];
    int error = ncclAllGather(&own, choices, sizeof own, 1, communicator, NULL);
    if (error) return error;
    int split = communicator->num_splits++, rank = 0, num_ranks = 0;
    *part = NULL;
    if (color < 0) return 0; // NCCL_SPLIT_NOCOLOR: this rank is in none
    for (int other = 0; other < communicator->num_ranks; other++) {
        if (choices[other].color != color) continue;
        num_ranks++;
        rank += choices[other].key < key || (choices[other].key == key && other < communicator->rank);
    }
    char name[96];
    snprintf(name, sizeof name, "%.64s.%d.%d", communicator->name, split, color);
    return join(part, name, num_ranks, rank);
}

EXPORT int ncclCommFinalize(Communicator *communicator) { return 0; }
EXPORT int ncclCommDestroy(Communicator *communicator) { return leave(communicator), 0; }
EXPORT int ncclCommAbort(Communicator *communicator) { // another thread may wait in it, so its memory stays
    atomic_store(&communicator->shared->failed, 1);
    return 0;
}
EXPORT int ncclCommCount(const Communicator *communicator, int *number) { return *number = communicator->num_ranks, 0; }
EXPORT int ncclCommUserRank(const Communicator *communicator, int *rank) { return *rank = communicator->rank, 0; }
EXPORT int ncclCommCuDevice(const Communicator *communicator, int *device) { return *device = communicator->device, 0; }
EXPORT int ncclCommGetAsyncError(Communicator *communicator, int *error) {
    return *error = atomic_load(&communicator->shared->failed) ? NCCL_REMOTE_ERROR : 0, 0;
}
EXPORT const char *ncclGetLastError(Communicator *communicator) { return communicator ? communicator->error : ""; }
EXPORT const char *ncclGetErrorString(int error) {
    return error == NCCL_REMOTE_ERROR ? "remote process exited or there was a network error"
           : error                    ? "NCCL error"
                                      : "no error";
}
EXPORT int ncclGetVersion(int *version) { return *version = 22907, 0; }
EXPORT int ncclMemAlloc(void **pointer, size_t bytes) { return allocate(pointer, bytes, DEVICE); }
EXPORT int ncclMemFree(void *pointer) { return release(pointer); }

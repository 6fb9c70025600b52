// A communicator of the null GPU's NCCL: one file in shared memory, which all its ranks map.
#pragma once
#include "null_gpu.h"
#include <pthread.h>
#include <stdatomic.h>

#define MAX_RANKS 64
#define CHUNK (1u << 20)      // bytes of a rank that one step of a collective moves
#define MAIL_CHUNK (1u << 16) // bytes that one step of a send moves

enum { NCCL_SYSTEM_ERROR = 2, NCCL_INVALID_ARGUMENT = 4, NCCL_INVALID_USAGE = 5, NCCL_REMOTE_ERROR = 6 };

// What a rank is about to do. All ranks must announce the same, else one of them is in another collective.
typedef struct {
    int kind, type, operation, root;
    uint64_t count;
} Announcement;

typedef struct {
    atomic_int pid;
    uint64_t start;
    atomic_ulong arrived;      // at how many barriers this rank has been
    Announcement announced[2]; // by the barrier's parity, as the chunks
} Rank;

typedef struct {
    atomic_ulong written, read; // chunks; the mail is full where they differ
    uint64_t message_bytes;     // of the whole message that the chunk belongs to
    char bytes[MAIL_CHUNK];
} Mail;

typedef struct {
    atomic_int failed;
    Rank ranks[MAX_RANKS];
} Shared;

typedef struct Communicator {
    Shared *shared;
    size_t shared_bytes;
    int num_ranks, rank, device, num_splits;
    uint64_t barriers;
    char name[96], error[256];
    pthread_mutex_t mutex; // one operation at a time
} Communicator;

// channel.c. Each returns 0 or an NCCL error, whose text is then in communicator->error.
int join(Communicator **communicator, const char *name, int num_ranks, int rank);
void leave(Communicator *communicator);
int barrier(Communicator *communicator, const char *what);
int fail(Communicator *communicator, int error, const char *format, ...);
char *chunk_of(Communicator *communicator, int rank, int parity);
Mail *mail(Communicator *communicator, int from, int to);

// A wait for other ranks: start one, then call pause_for until what it waits for is there or it returns an error.
typedef struct {
    double until;
    unsigned turns;
} Wait;
Wait start_wait(void);
int pause_for(Communicator *communicator, Wait *wait, int awaited_rank, const char *what);

// reduce.c
size_t type_bytes(int type); // 0 for a type that NCCL does not have
// Elementwise over the ranks, added in float32 (float64, 64-bit integers) and rounded once; factor for PreMulSum.
bool reduce(void *out, char *const inputs[], int num_inputs, size_t count, int type, int operation, double factor);
double scalar(const void *value, int type);

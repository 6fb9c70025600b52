// What the parts of the null GPU share: devices.c, memory.c, runtime.c, driver.c, nvml.c, nccl*.c.
// The signatures are CUDA's, NCCL's and NVML's with plain types (an enum is an int, a handle a pointer), so that gcc
// alone builds them; properties.c alone needs CUDA's headers.
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_DEVICES 16

// Errors, in CUDA's numbers; those of the driver are the same.
enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    MAP_FAILED_ERROR = 205,
    ALREADY_MAPPED = 208,
    INVALID_KERNEL = 98,
    HOST_MEMORY_ALREADY_REGISTERED = 712,
    NOT_SUPPORTED = 801,
};

// devices.c: the devices, as all processes with the same NULL_GPU_NAME see them.
int physical_devices(void);                  // NULL_GPU_COUNT
int visible_devices(void);                   // how many of them CUDA_VISIBLE_DEVICES shows
int physical_device(int ordinal);            // the physical index of a visible device, -1 where there is none
uint64_t device_bytes(void);                 // NULL_GPU_BYTES, the size of each device
uint64_t device_used(int device);            // bytes that all living processes hold
bool take_bytes(int device, uint64_t bytes); // false where they do not fit
void return_bytes(int device, uint64_t bytes);
uint64_t process_start(int pid); // in clock ticks since boot, 0 for a process that has ended or waits to be reaped
bool numbers(void);              // NULL_GPU_NUMBERS=1: what nobody computes is an error, every copy is made
void say(const char *format, ...); // a line to stderr and to the file NULL_GPU_LOG, since Ray keeps stderr to itself
int unanswered(const char *name, int error); // a call that does nothing: 0, or `error` where numbers count

// memory.c: the memory that this process has from CUDA.
typedef enum { DEVICE = 2, PINNED = 1, RESERVED = 4 } Kind;
typedef struct {
    char *start;
    uint64_t bytes;
    Kind kind;
    int device; // physical
    int file;   // the memfd that another process may open, -1 without one
} Region;
extern _Thread_local int current_device; // the visible ordinal
int usable(void);                        // SUCCESS, or why this process cannot use CUDA
int allocate(void **pointer, uint64_t bytes, Kind kind);
int release(void *pointer);
bool remember(Region region);                     // false where a region is known that overlaps it
bool forget(const void *pointer, Region *region); // the region that starts there, which it removes
bool find(const void *pointer, Region *region);   // the region that holds the byte

// What was done, of this process; null_gpu_count(name) reads it from Python.
typedef enum {
    STREAM_SYNCHRONIZES,
    EVENT_SYNCHRONIZES,
    DEVICE_SYNCHRONIZES,
    BLOCKING_COPIES,
    COPIES,
    COPIED_BYTES,
    LAUNCHES,
    PINNED_ALLOCATIONS,
    DEVICE_ALLOCATIONS,
    COLLECTIVES,
    UNANSWERED,
    NUM_COUNTERS
} Counter;
void count(Counter counter, long amount);

// runtime.c, for the others too.
int device_attribute(int attribute);
bool moves(size_t bytes); // whether a copy of that size is made or only counted

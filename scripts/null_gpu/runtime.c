// The CUDA runtime (libcudart). Streams and events are numbers: what is asked for is done before the call returns.
// What is not here is a stub that build.py generates. https://docs.nvidia.com/cuda/cuda-runtime-api
#define _GNU_SOURCE
#include "null_gpu.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static _Thread_local int last_error;
static int result(int error) { return error ? last_error = error : SUCCESS; }

EXPORT int cudaGetLastError(void) {
    int error = last_error;
    return last_error = SUCCESS, error;
}
EXPORT int cudaPeekAtLastError(void) { return last_error; }

EXPORT const char *cudaGetErrorString(int error) {
    switch (error) {
    case SUCCESS: return "no error";
    case INVALID_VALUE: return "invalid argument";
    case OUT_OF_MEMORY: return "out of memory";
    case NOT_INITIALIZED: return "initialization error: CUDA was used before this process was forked";
    case NO_DEVICE: return "no CUDA-capable device is detected";
    case INVALID_DEVICE: return "invalid device ordinal";
    case INVALID_CONTEXT: return "invalid device context";
    case MAP_FAILED_ERROR: return "mapping of buffer object failed";
    case INVALID_KERNEL: return "the null GPU has no kernels: stderr names the one that was launched";
    case NOT_SUPPORTED: return "operation not supported by the null GPU: stderr names the call";
    }
    return "unknown error";
}
EXPORT const char *cudaGetErrorName(int error) {
    return error == OUT_OF_MEMORY ? "cudaErrorMemoryAllocation" : "cudaError";
}

// Devices.
EXPORT int cudaGetDeviceCount(int *devices) {
    int error = usable();
    *devices = error ? 0 : visible_devices();
    return result(error);
}
EXPORT int cudaGetDevice(int *device) { return *device = current_device, SUCCESS; }
EXPORT int cudaSetDevice(int device) {
    int error = usable();
    if (!error && physical_device(device) < 0) error = INVALID_DEVICE;
    if (!error) current_device = device;
    return result(error);
}
EXPORT int cudaDeviceGetPCIBusId(char *text, int length, int device) {
    snprintf(text, length, "0000:%02x:00.0", physical_device(device) + 1);
    return SUCCESS;
}
EXPORT int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, SUCCESS; }
EXPORT int cudaDeviceCanAccessPeer(int *can, int device, int peer) { return *can = 0, SUCCESS; }
EXPORT int cudaDriverGetVersion(int *version) { return *version = 13000, SUCCESS; }
EXPORT int cudaRuntimeGetVersion(int *version) { return *version = 13000, SUCCESS; }

// Numbers of cudaDeviceAttr, and those of an H100 SXM; what is not listed is 0.
static const int attributes[][2] = {
    {1, 1024},       {2, 1024},      {3, 1024},
    {4, 64},                                       // threads of a block, and by dimension
    {5, 2147483647}, {6, 65535},     {7, 65535},   // blocks of a grid
    {8, 49152},      {81, 233472},   {97, 232448}, // shared memory of a block, a multiprocessor, a block that asks
    {10, 32},        {12, 65536},    {82, 65536},  // warp, registers of a block and a multiprocessor
    {13, 1980000},   {36, 2619000},  {37, 5120},   // kHz of the clock and the memory, bits of its bus
    {16, 132},       {39, 2048},     {106, 32},
    {111, 1024}, // multiprocessors, their threads and blocks, reserved shared memory
    {31, 1},         {38, 50 << 20}, {40, 3},
    {41, 1}, // concurrent kernels, L2 cache, copy engines, one address space
    {75, 9},         {76, 0},        {83, 1},
    {95, 1},         {102, 1}, // capability, managed, cooperative launch, virtual memory
};
int device_attribute(int attribute) {
    for (size_t index = 0; index < sizeof attributes / sizeof *attributes; index++)
        if (attributes[index][0] == attribute) return attributes[index][1];
    return 0;
}
EXPORT int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    return *value = device_attribute(attribute), SUCCESS;
}

// Memory.
EXPORT int cudaMalloc(void **pointer, size_t bytes) { return result(allocate(pointer, bytes, DEVICE)); }
EXPORT int cudaMallocAsync(void **pointer, size_t bytes, void *stream) { return cudaMalloc(pointer, bytes); }
EXPORT int cudaFree(void *pointer) { return result(release(pointer)); }
EXPORT int cudaFreeAsync(void *pointer, void *stream) { return cudaFree(pointer); }
EXPORT int cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    return result(allocate(pointer, bytes, PINNED));
}
EXPORT int cudaMallocHost(void **pointer, size_t bytes) { return cudaHostAlloc(pointer, bytes, 0); }
EXPORT int cudaFreeHost(void *pointer) { return cudaFree(pointer); }
EXPORT int cudaHostGetDevicePointer(void **device, void *host, unsigned flags) { return *device = host, SUCCESS; }

EXPORT int cudaHostRegister(void *pointer, size_t bytes, unsigned flags) {
    if (!remember((Region){pointer, bytes, PINNED, 0, -1})) return result(HOST_MEMORY_ALREADY_REGISTERED);
    count(PINNED_ALLOCATIONS, 1);
    return SUCCESS;
}
EXPORT int cudaHostUnregister(void *pointer) {
    Region region;
    return result(forget(pointer, &region) ? SUCCESS : INVALID_VALUE);
}

EXPORT int cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    int error = usable();
    if (error) return result(error);
    uint64_t used = device_used(physical_device(current_device));
    *total = device_bytes();
    *free_bytes = used < *total ? *total - used : 0;
    return SUCCESS;
}

typedef struct {
    int type, device;
    void *device_pointer, *host_pointer;
    long reserved[8];
} PointerAttributes;
EXPORT int cudaPointerGetAttributes(PointerAttributes *attributes, const void *pointer) {
    Region region;
    *attributes = (PointerAttributes){0}; // memory that CUDA does not know
    if (!find(pointer, &region)) return SUCCESS;
    *attributes = (PointerAttributes){region.kind == PINNED ? 1 : 2, 0, (void *)pointer};
    if (region.kind == PINNED) attributes->host_pointer = (void *)pointer;
    for (int ordinal = 0; ordinal < visible_devices(); ordinal++)
        if (physical_device(ordinal) == region.device) attributes->device = ordinal;
    return SUCCESS;
}

// Without numbers memory is never filled, so what is larger than NULL_GPU_LARGEST_COPY, 64 MiB, is counted and not moved.
bool moves(size_t bytes) {
    static atomic_size_t largest = 0;
    if (!largest) largest = getenv("NULL_GPU_LARGEST_COPY") ? strtoull(getenv("NULL_GPU_LARGEST_COPY"), NULL, 10) : 64u << 20;
    return numbers() || bytes <= largest;
}

static bool pageable(const void *pointer) {
    Region region;
    return !find(pointer, &region);
}

static int copy(void *to, const void *from, size_t bytes, bool blocking) {
    count(COPIES, 1);
    count(COPIED_BYTES, bytes);
    if (blocking || pageable(to) || pageable(from)) count(BLOCKING_COPIES, 1);
    if (moves(bytes)) memmove(to, from, bytes);
    return SUCCESS;
}
EXPORT int cudaMemcpy(void *to, const void *from, size_t bytes, int kind) { return copy(to, from, bytes, true); }
EXPORT int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
    return copy(to, from, bytes, false); // from or to pageable memory it waits, whatever its name says
}
EXPORT int cudaMemcpyPeerAsync(void *to, int device, const void *from, int peer, size_t bytes, void *stream) {
    return copy(to, from, bytes, false);
}
EXPORT int cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                             size_t height, int kind, void *stream) {
    count(COPIES, 1);
    count(COPIED_BYTES, width * height);
    if (pageable(to) || pageable(from)) count(BLOCKING_COPIES, 1);
    if (moves(width * height))
        for (size_t row = 0; row < height; row++)
            memmove((char *)to + row * to_pitch, (char *)from + row * from_pitch, width);
    return SUCCESS;
}
EXPORT int cudaMemset(void *to, int value, size_t bytes) {
    if (moves(bytes)) memset(to, value, bytes);
    return SUCCESS;
}
EXPORT int cudaMemsetAsync(void *to, int value, size_t bytes, void *stream) { return cudaMemset(to, value, bytes); }

// Streams and events.
static int new_handle(void **handle) {
    static atomic_long last = 0x1000;
    return *handle = (void *)atomic_fetch_add(&last, 16), SUCCESS;
}
EXPORT int cudaStreamCreate(void **stream) { return new_handle(stream); }
EXPORT int cudaStreamCreateWithFlags(void **stream, unsigned flags) { return new_handle(stream); }
EXPORT int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) { return new_handle(stream); }
EXPORT int cudaStreamDestroy(void *stream) { return SUCCESS; }
EXPORT int cudaStreamGetPriority(void *stream, int *priority) { return *priority = 0, SUCCESS; }
EXPORT int cudaStreamQuery(void *stream) { return SUCCESS; }
EXPORT int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) { return SUCCESS; }
EXPORT int cudaStreamSynchronize(void *stream) { return count(STREAM_SYNCHRONIZES, 1), SUCCESS; }
EXPORT int cudaDeviceSynchronize(void) { return count(DEVICE_SYNCHRONIZES, 1), SUCCESS; }
EXPORT int cudaStreamIsCapturing(void *stream, int *status) { return *status = 0, SUCCESS; }
EXPORT int cudaStreamGetCaptureInfo(void *stream, int *status, void *id, void *graph, void *nodes, void *edges,
                                    size_t *number) {
    if (number) *number = 0;
    return *status = 0, SUCCESS;
}
EXPORT int cudaThreadExchangeStreamCaptureMode(int *mode) { return SUCCESS; }
EXPORT int cudaEventCreate(void **event) { return new_handle(event); }
EXPORT int cudaEventCreateWithFlags(void **event, unsigned flags) { return new_handle(event); }
EXPORT int cudaEventDestroy(void *event) { return SUCCESS; }
EXPORT int cudaEventRecord(void *event, void *stream) { return SUCCESS; }
EXPORT int cudaEventRecordWithFlags(void *event, void *stream, unsigned flags) { return SUCCESS; }
EXPORT int cudaEventQuery(void *event) { return SUCCESS; }
EXPORT int cudaEventSynchronize(void *event) { return count(EVENT_SYNCHRONIZES, 1), SUCCESS; }
EXPORT int cudaEventElapsedTime(float *milliseconds, void *start, void *end) { return *milliseconds = 1, SUCCESS; }
EXPORT int cudaIpcGetEventHandle(void *handle, void *event) { return memset(handle, 0, 64), SUCCESS; }
typedef struct {
    char bytes[64];
} IpcEventHandle;
EXPORT int cudaIpcOpenEventHandle(void **event, IpcEventHandle handle) { return new_handle(event); }

EXPORT int cudaLaunchHostFunc(void *stream, void (*function)(void *), void *argument) {
    return function(argument), SUCCESS;
}
EXPORT int cudaStreamAddCallback(void *stream, void (*function)(void *, int, void *), void *argument, unsigned flags) {
    return function(stream, SUCCESS, argument), SUCCESS;
}
EXPORT int cudaProfilerStart(void) { return SUCCESS; }
EXPORT int cudaProfilerStop(void) { return SUCCESS; }
EXPORT int cudaDeviceReset(void) { return SUCCESS; }

// Kernels. A library registers each with its name when it is loaded.
static struct Kernel {
    const void *function;
    const char *name;
} *kernels;
static size_t num_kernels, room_for_kernels;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

EXPORT void __cudaRegisterFunction(void **library, const void *function, char *device_function, const char *name,
                                   int limit, void *thread, void *block, void *block_size, void *grid_size, int *warp) {
    pthread_mutex_lock(&mutex);
    if (num_kernels == room_for_kernels) {
        room_for_kernels = room_for_kernels ? 2 * room_for_kernels : 4096;
        kernels = realloc(kernels, room_for_kernels * sizeof *kernels);
    }
    kernels[num_kernels++] = (struct Kernel){function, name};
    pthread_mutex_unlock(&mutex);
}
EXPORT void **__cudaRegisterFatBinary(void *binary) {
    static void *library;
    return &library;
}
EXPORT void __cudaRegisterFatBinaryEnd(void **library) {}
EXPORT void __cudaUnregisterFatBinary(void **library) {}
EXPORT void __cudaRegisterVar(void **library, char *variable, char *address, const char *name, int external,
                              size_t size, int constant, int global) {}
EXPORT char __cudaInitModule(void **library) { return 0; }
EXPORT int __cudaGetKernel(void **kernel, const void *function) { return *kernel = (void *)function, SUCCESS; }
EXPORT int cudaGetSymbolAddress(void **address, const void *symbol) {
    static char zeros[1 << 16];
    return *address = zeros, SUCCESS;
}

// With numbers a kernel that nobody computes must not pass for one that ran.
static int launch(const void *function) {
    count(LAUNCHES, 1);
    if (!numbers()) return SUCCESS;
    const char *name = "a kernel without a name";
    pthread_mutex_lock(&mutex);
    for (size_t index = 0; index < num_kernels; index++)
        if (kernels[index].function == function) name = kernels[index].name;
    pthread_mutex_unlock(&mutex);
    say("the kernel %s was launched, which nothing answers with numbers.", name);
    return result(INVALID_KERNEL);
}
typedef struct {
    unsigned x, y, z;
} Size;
EXPORT int cudaLaunchKernel(const void *function, Size grid, Size block, void **arguments, size_t shared,
                            void *stream) {
    return launch(function);
}
EXPORT int __cudaLaunchKernel(const void *function, Size grid, Size block, void **arguments, size_t shared,
                              void *stream) {
    return launch(function);
}
EXPORT int cudaLaunchKernelExC(const void *configuration, const void *function, void **arguments) {
    return launch(function);
}
EXPORT int cudaLaunchCooperativeKernel(const void *function, Size grid, Size block, void **arguments, size_t shared,
                                       void *stream) {
    return launch(function);
}
// The numbers that kernel<<<...>>> leaves for its launch, which reads nothing of them here.
EXPORT unsigned __cudaPushCallConfiguration(Size grid, Size block, size_t shared, void *stream) { return 0; }
EXPORT int __cudaPopCallConfiguration(Size *grid, Size *block, size_t *shared, void *stream) {
    *grid = *block = (Size){1, 1, 1};
    return *shared = 0, *(void **)stream = NULL, SUCCESS;
}
typedef struct {
    size_t shared, constant, local;
    int threads, registers, ptx, binary, cache, dynamic_shared, rest[32];
} FunctionAttributes;
EXPORT int cudaFuncGetAttributes(FunctionAttributes *attributes, const void *function) {
    memset(attributes, 0, offsetof(FunctionAttributes, rest));
    attributes->threads = 1024, attributes->registers = 32, attributes->ptx = attributes->binary = 90;
    attributes->dynamic_shared = device_attribute(97);
    return SUCCESS;
}
EXPORT int cudaFuncSetAttribute(const void *function, int attribute, int value) { return SUCCESS; }
EXPORT int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads,
                                                         size_t shared) {
    return *blocks = 2, SUCCESS;
}
EXPORT int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads,
                                                                  size_t shared, unsigned flags) {
    return *blocks = 2, SUCCESS;
}

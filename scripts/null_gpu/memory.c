// Device memory and pinned memory of this process: both are host memory, mapped when it is first written.
#define _GNU_SOURCE
#include "null_gpu.h"
#include <fcntl.h>
#include <pthread.h>
#include <search.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

_Thread_local int current_device;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static void *regions; // a tree of Region, ordered by address
static uint64_t pinned; // bytes of the host that CUDA gave out, or was shown

// Regions that overlap are equal, so that an address finds the region around it.
static int compare(const void *left, const void *right) {
    const Region *a = left, *b = right;
    if (a->start + a->bytes <= b->start) return -1;
    return b->start + b->bytes <= a->start;
}

bool remember(Region region) {
    Region *kept = malloc(sizeof *kept);
    *kept = region;
    kept->bytes += !kept->bytes;
    pthread_mutex_lock(&mutex);
    Region **found = tsearch(kept, &regions, compare);
    bool is_new = *found == kept;
    if (is_new && kept->kind == PINNED) pinned += kept->bytes;
    pthread_mutex_unlock(&mutex);
    if (!is_new) free(kept);
    return is_new;
}

bool find(const void *pointer, Region *region) {
    Region byte = {.start = (char *)pointer, .bytes = 1};
    pthread_mutex_lock(&mutex);
    Region **found = tfind(&byte, &regions, compare);
    if (found) *region = **found;
    pthread_mutex_unlock(&mutex);
    return found;
}

bool forget(const void *pointer, Region *region) {
    Region byte = {.start = (char *)pointer, .bytes = 1}, *kept = NULL;
    pthread_mutex_lock(&mutex);
    Region **found = tfind(&byte, &regions, compare);
    if (found && (*found)->start == pointer) {
        kept = *found;
        *region = *kept;
        if (region->kind == PINNED) pinned -= region->bytes;
        tdelete(&byte, &regions, compare);
        free(kept);
    }
    pthread_mutex_unlock(&mutex);
    return kept;
}

EXPORT uint64_t null_gpu_pinned(void) { return pinned; }

// As with CUDA, a process that was forked after the first use cannot use it.
int usable(void) {
    static int user;
    if (!user) user = getpid();
    if (user != getpid()) return NOT_INITIALIZED;
    return visible_devices() ? SUCCESS : NO_DEVICE;
}

int allocate(void **pointer, uint64_t bytes, Kind kind) {
    *pointer = NULL;
    int error = usable(), device = physical_device(current_device);
    if (error) return error;
    if (kind == DEVICE && !take_bytes(device, bytes)) return OUT_OF_MEMORY;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *start = mmap(NULL, bytes + !bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (start == MAP_FAILED) {
        if (kind == DEVICE) return_bytes(device, bytes);
        return OUT_OF_MEMORY;
    }
    if (!remember((Region){start, bytes, kind, device, -1})) { // memory that was freed while it was registered lay there
        munmap(start, bytes + !bytes);
        if (kind == DEVICE) return_bytes(device, bytes);
        return ALREADY_MAPPED;
    }
    count(kind == DEVICE ? DEVICE_ALLOCATIONS : PINNED_ALLOCATIONS, 1);
    *pointer = start;
    return SUCCESS;
}

int release(void *pointer) {
    Region region;
    if (!pointer) return SUCCESS;
    if (!forget(pointer, &region)) return INVALID_VALUE;
    if (region.kind == DEVICE) return_bytes(region.device, region.bytes);
    if (region.file >= 0) close(region.file);
    munmap(region.start, region.bytes);
    return SUCCESS;
}

// CUDA IPC. The first handle of a region puts a memfd in its place, which another process opens below /proc.
typedef struct {
    int pid, file;
    uint64_t bytes, start_of_process;
} Handle; // of cudaIpcMemHandle_t's 64 bytes

static bool share(Region *region) {
    int file = memfd_create("null_gpu", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, region->bytes)) return false;
    void *copy = mmap(NULL, region->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (copy == MAP_FAILED) return false;
    memcpy(copy, region->start, region->bytes);
    munmap(copy, region->bytes);
    int flags = MAP_SHARED | MAP_FIXED;
    if (mmap(region->start, region->bytes, PROT_READ | PROT_WRITE, flags, file, 0) == MAP_FAILED) return false;
    Region before;
    forget(region->start, &before);
    region->file = file;
    remember(*region);
    return true;
}

EXPORT int cudaIpcGetMemHandle(Handle *handle, void *pointer) {
    Region region;
    if (!find(pointer, &region) || region.kind != DEVICE) return INVALID_VALUE;
    if (region.file < 0 && !share(&region)) return NOT_SUPPORTED;
    memset(handle, 0, 64);
    *handle = (Handle){getpid(), region.file, region.bytes, process_start(getpid())};
    return SUCCESS;
}

typedef struct {
    char bytes[64];
} IpcMemHandle;
EXPORT int cudaIpcOpenMemHandle(void **pointer, IpcMemHandle opaque, unsigned flags) {
    Handle handle;
    memcpy(&handle, &opaque, sizeof handle);
    if (handle.pid == getpid()) return INVALID_CONTEXT; // CUDA does not open a handle where it was made
    if (process_start(handle.pid) != handle.start_of_process) return MAP_FAILED_ERROR;
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return MAP_FAILED_ERROR;
    *pointer = mmap(NULL, handle.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (*pointer == MAP_FAILED) return MAP_FAILED_ERROR;
    // Its bytes stay the other process's: RESERVED counts nothing.
    remember((Region){*pointer, handle.bytes, RESERVED, physical_device(current_device), -1});
    return SUCCESS;
}

EXPORT int cudaIpcCloseMemHandle(void *pointer) { return release(pointer); }

// The CUDA driver (libcuda.so.1): what torch and vLLM ask of it, above all virtual memory, with which vLLM sleeps.
// https://docs.nvidia.com/cuda/cuda-driver-api
#define _GNU_SOURCE
#include "null_gpu.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define GRANULARITY (2ul << 20)

EXPORT int cuInit(unsigned flags) { return usable(); }
EXPORT int cuDriverGetVersion(int *version) { return *version = 13000, SUCCESS; }
EXPORT int cuDeviceGetCount(int *devices) { return *devices = visible_devices(), SUCCESS; }
EXPORT int cuDeviceGet(int *device, int ordinal) {
    return *device = ordinal, physical_device(ordinal) < 0 ? INVALID_DEVICE : SUCCESS;
}
EXPORT int cuDeviceGetName(char *name, int length, int device) { return snprintf(name, length, "Null GPU"), SUCCESS; }
EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) {
    return *value = device_attribute(attribute), SUCCESS;
}
EXPORT int cuDeviceTotalMem_v2(size_t *bytes, int device) { return *bytes = device_bytes(), SUCCESS; }
EXPORT int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    extern int cudaMemGetInfo(size_t *, size_t *);
    return cudaMemGetInfo(free_bytes, total);
}
EXPORT int cuGetErrorString(int error, const char **text) {
    extern const char *cudaGetErrorString(int);
    return *text = cudaGetErrorString(error), SUCCESS;
}
EXPORT int cuGetErrorName(int error, const char **text) { return *text = "CUDA_ERROR", SUCCESS; }

// One context for all: its handle is a number.
#define CONTEXT ((void *)0x10)
EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    return *flags = 0, *active = 1, SUCCESS;
}
EXPORT int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = CONTEXT, SUCCESS; }
EXPORT int cuDevicePrimaryCtxRelease_v2(int device) { return SUCCESS; }
EXPORT int cuCtxGetCurrent(void **context) { return *context = CONTEXT, SUCCESS; }
EXPORT int cuCtxSetCurrent(void *context) { return SUCCESS; }
EXPORT int cuCtxPushCurrent_v2(void *context) { return SUCCESS; }
EXPORT int cuCtxPopCurrent_v2(void **context) { return *context = CONTEXT, SUCCESS; }
EXPORT int cuCtxGetDevice(int *device) { return *device = current_device, SUCCESS; }

EXPORT int cuPointerGetAttribute(void *value, int attribute, uint64_t pointer) {
    Region region;
    if (!find((void *)pointer, &region)) return INVALID_VALUE;
    switch (attribute) {
    case 2: return *(unsigned *)value = region.kind == PINNED ? 1 : 2, SUCCESS; // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    case 3: return *(uint64_t *)value = pointer, SUCCESS;                       // CU_POINTER_ATTRIBUTE_DEVICE_POINTER
    case 11: return *(uint64_t *)value = (uint64_t)region.start, SUCCESS;       // CU_POINTER_ATTRIBUTE_RANGE_START_ADDR
    case 12: return *(uint64_t *)value = region.bytes, SUCCESS;                 // CU_POINTER_ATTRIBUTE_RANGE_SIZE
    default: return *(int *)value = 0, SUCCESS;
    }
}

// Virtual memory: an allocation is a memfd, so it keeps its bytes wherever it is mapped.
typedef struct {
    int file, device;
    uint64_t bytes;
} Allocation;

EXPORT int cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int option) {
    return *bytes = GRANULARITY, SUCCESS;
}
EXPORT int cuMemCreate(Allocation **handle, size_t bytes, const int *properties, uint64_t flags) {
    int device = physical_device(properties[3]); // CUmemAllocationProp: type, handle types, location {type, id}
    if (device < 0) return INVALID_DEVICE;
    if (!take_bytes(device, bytes)) return OUT_OF_MEMORY;
    *handle = malloc(sizeof **handle);
    **handle = (Allocation){memfd_create("null_gpu", MFD_CLOEXEC), device, bytes};
    return (*handle)->file < 0 || ftruncate((*handle)->file, bytes) ? OUT_OF_MEMORY : SUCCESS;
}
EXPORT int cuMemRelease(Allocation *handle) {
    return_bytes(handle->device, handle->bytes);
    close(handle->file);
    return free(handle), SUCCESS;
}
EXPORT int cuMemAddressReserve(uint64_t *address, size_t bytes, size_t alignment, uint64_t wish, uint64_t flags) {
    void *start = mmap(NULL, bytes + GRANULARITY, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return OUT_OF_MEMORY;
    *address = ((uint64_t)start + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
    remember((Region){(char *)*address, bytes, RESERVED, physical_device(current_device), -1});
    return SUCCESS;
}
EXPORT int cuMemAddressFree(uint64_t address, size_t bytes) { return release((void *)address); }
EXPORT int cuMemMap(uint64_t address, size_t bytes, size_t offset, Allocation *handle, uint64_t flags) {
    int protection = PROT_READ | PROT_WRITE;
    void *mapped = mmap((void *)address, bytes, protection, MAP_SHARED | MAP_FIXED, handle->file, offset);
    return mapped == MAP_FAILED ? OUT_OF_MEMORY : SUCCESS;
}
EXPORT int cuMemUnmap(uint64_t address, size_t bytes) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    return mmap((void *)address, bytes, PROT_NONE, flags, -1, 0) == MAP_FAILED ? INVALID_VALUE : SUCCESS;
}
EXPORT int cuMemSetAccess(uint64_t address, size_t bytes, const void *access, size_t number) { return SUCCESS; }

EXPORT int cuFuncGetAttribute(int *value, int attribute, void *function) {
    return *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0, SUCCESS; // threads of a block, registers
}

// Functions by name. What is asked for and is not here is named when it is called.
static int missing(void) { return unanswered("a driver function that cuGetProcAddress did not find", NOT_SUPPORTED); }
static void *function_of(const char *name) {
    char versioned[128];
    snprintf(versioned, sizeof versioned, "%s_v2", name);
    void *function = dlsym(RTLD_DEFAULT, versioned);
    if (!function) function = dlsym(RTLD_DEFAULT, name);
    return function ? function : (void *)missing;
}
EXPORT int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    if (status) *status = 0;
    return *function = function_of(name), SUCCESS;
}
EXPORT int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                            unsigned long long flags, int *status) {
    return cuGetProcAddress_v2(name, function, version, flags, status);
}

// NVML (libnvidia-ml.so.1): the physical devices, whatever CUDA_VISIBLE_DEVICES shows of them.
// https://docs.nvidia.com/deploy/nvml-api. A device's handle is its index plus one.
#include "null_gpu.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NVML_INVALID_ARGUMENT = 2, NVML_NOT_SUPPORTED = 3, NVML_NOT_FOUND = 6 };

static unsigned index_of(void *device) { return (uintptr_t)device - 1; }

EXPORT int nvmlInit(void) { return SUCCESS; }
EXPORT int nvmlInit_v2(void) { return SUCCESS; }
EXPORT int nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
EXPORT int nvmlShutdown(void) { return SUCCESS; }
EXPORT const char *nvmlErrorString(int error) { return error == NVML_NOT_SUPPORTED ? "Not Supported" : "Error"; }
EXPORT int nvmlSystemGetDriverVersion(char *text, unsigned length) {
    return snprintf(text, length, "580.95.05"), SUCCESS;
}
EXPORT int nvmlSystemGetNVMLVersion(char *text, unsigned length) { return snprintf(text, length, "13.580"), SUCCESS; }
EXPORT int nvmlSystemGetCudaDriverVersion(int *version) { return *version = 13000, SUCCESS; }
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = 13000, SUCCESS; }

EXPORT int nvmlDeviceGetCount(unsigned *devices) { return *devices = physical_devices(), SUCCESS; }
EXPORT int nvmlDeviceGetCount_v2(unsigned *devices) { return nvmlDeviceGetCount(devices); }
EXPORT int nvmlDeviceGetHandleByIndex(unsigned index, void **device) {
    if (index >= (unsigned)physical_devices()) return NVML_INVALID_ARGUMENT;
    return *device = (void *)(uintptr_t)(index + 1), SUCCESS;
}
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    return nvmlDeviceGetHandleByIndex(index, device);
}
EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) { // GPU-00000001-...: index plus one
    return nvmlDeviceGetHandleByIndex(strtoul(uuid + 4, NULL, 16) - 1, device);
}
EXPORT int nvmlDeviceGetHandleByPciBusId(const char *id, void **device) { // 0000:01:00.0: index plus one
    const char *bus = strchr(id, ':');
    return bus ? nvmlDeviceGetHandleByIndex(strtoul(bus + 1, NULL, 16) - 1, device) : NVML_NOT_FOUND;
}
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) {
    return nvmlDeviceGetHandleByPciBusId(id, device);
}
EXPORT int nvmlDeviceGetIndex(void *device, unsigned *index) { return *index = index_of(device), SUCCESS; }
EXPORT int nvmlDeviceGetMinorNumber(void *device, unsigned *number) { return *number = index_of(device), SUCCESS; }
EXPORT int nvmlDeviceGetName(void *device, char *name, unsigned length) {
    return snprintf(name, length, "Null GPU"), SUCCESS;
}
EXPORT int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) {
    return snprintf(uuid, length, "GPU-%08x-0000-0000-0000-000000000000", index_of(device) + 1), SUCCESS;
}
EXPORT int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    return *major = device_attribute(75), *minor = device_attribute(76), SUCCESS;
}

typedef struct {
    unsigned long long total, free, used;
} Memory;
typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} MemoryV2;
EXPORT int nvmlDeviceGetMemoryInfo(void *device, Memory *memory) {
    uint64_t total = device_bytes(), used = device_used(index_of(device));
    return *memory = (Memory){total, total - used, used}, SUCCESS;
}
EXPORT int nvmlDeviceGetMemoryInfo_v2(void *device, MemoryV2 *memory) {
    uint64_t total = device_bytes(), used = device_used(index_of(device));
    return *memory = (MemoryV2){memory->version, total, 0, total - used, used}, SUCCESS;
}

typedef struct {
    char short_id[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
} PciInfo;
EXPORT int nvmlDeviceGetPciInfo_v3(void *device, PciInfo *info) {
    *info = (PciInfo){.bus = index_of(device) + 1};
    snprintf(info->short_id, sizeof info->short_id, "0000:%02X:00.0", info->bus);
    snprintf(info->bus_id, sizeof info->bus_id, "00000000:%02X:00.0", info->bus);
    return SUCCESS;
}
EXPORT int nvmlDeviceGetPciInfo(void *device, PciInfo *info) { return nvmlDeviceGetPciInfo_v3(device, info); }

// No peer access, as cudaDeviceCanAccessPeer says: 5 is NVML_P2P_STATUS_NOT_SUPPORTED.
EXPORT int nvmlDeviceGetP2PStatus(void *device, void *peer, int kind, int *status) { return *status = 5, SUCCESS; }
EXPORT int nvmlDeviceGetTopologyCommonAncestor(void *device, void *peer, int *level) { return *level = 50, SUCCESS; }
EXPORT int nvmlDeviceGetCpuAffinity(void *device, unsigned words, unsigned long *mask) {
    return memset(mask, 0xff, words * sizeof *mask), SUCCESS;
}
EXPORT int nvmlDeviceGetMemoryAffinity(void *device, unsigned words, unsigned long *mask, int scope) {
    return memset(mask, 0xff, words * sizeof *mask), SUCCESS;
}
EXPORT int nvmlDeviceGetNumaNodeId(void *device, unsigned *node) { return NVML_NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending) { return NVML_NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *number) { return *number = 0, SUCCESS; }
EXPORT int nvmlDeviceGetUtilizationRates(void *device, unsigned *rates) { return rates[0] = rates[1] = 0, SUCCESS; }
EXPORT int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *number, void *list) {
    return *number = 0, SUCCESS;
}
EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *number, void *list) {
    return *number = 0, SUCCESS;
}
EXPORT int nvmlDeviceGetNvLinkState(void *device, unsigned link, int *active) { return *active = 0, SUCCESS; }
EXPORT int nvmlDeviceGetGpuFabricInfo(void *device, void *info) { return NVML_NOT_SUPPORTED; }
// No NVSwitch: nvmlGpuFabricInfoV_t after its version, with the state "not supported", 0.
EXPORT int nvmlDeviceGetGpuFabricInfoV(void *device, unsigned *info) { return memset(info + 1, 0, 32), SUCCESS; }

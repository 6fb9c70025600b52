// The one structure that is too large to write down: built with CUDA's own header, where an environment has it.
#include <cuda_runtime_api.h>
#include "null_gpu.h"
#include <string.h>

#undef cudaGetDeviceProperties
EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    if (physical_device(device) < 0) return cudaErrorInvalidDevice;
    *properties = (struct cudaDeviceProp){
        .name = "Null GPU",
        .totalGlobalMem = device_bytes(),
        .major = device_attribute(cudaDevAttrComputeCapabilityMajor),
        .minor = device_attribute(cudaDevAttrComputeCapabilityMinor),
        .multiProcessorCount = device_attribute(cudaDevAttrMultiProcessorCount),
        .warpSize = device_attribute(cudaDevAttrWarpSize),
        .maxThreadsPerBlock = device_attribute(cudaDevAttrMaxThreadsPerBlock),
        .maxThreadsPerMultiProcessor = device_attribute(cudaDevAttrMaxThreadsPerMultiProcessor),
        .maxBlocksPerMultiProcessor = device_attribute(cudaDevAttrMaxBlocksPerMultiprocessor),
        .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {2147483647, 65535, 65535},
        .sharedMemPerBlock = device_attribute(cudaDevAttrMaxSharedMemoryPerBlock),
        .sharedMemPerBlockOptin = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
        .sharedMemPerMultiprocessor = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor),
        .regsPerBlock = device_attribute(cudaDevAttrMaxRegistersPerBlock),
        .regsPerMultiprocessor = device_attribute(cudaDevAttrMaxRegistersPerMultiprocessor),
        .l2CacheSize = device_attribute(cudaDevAttrL2CacheSize),
        .asyncEngineCount = device_attribute(cudaDevAttrAsyncEngineCount),
        .textureAlignment = 512,
        .unifiedAddressing = 1,
        .concurrentKernels = 1,
        .canMapHostMemory = 1,
        .managedMemory = 1,
        .pciBusID = physical_device(device) + 1,
    };
    properties->uuid.bytes[3] = physical_device(device) + 1; // as NVML writes it
    return cudaSuccess;
}

// Devices, streams, events and launches of the CUDA runtime. Every kernel ends at once and computes nothing.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>
#include <ctime>
#include <unordered_map>

#include "mock.h"

namespace {

thread_local int current_device = 0;
unsigned long long n_launches = 0;
unsigned long long n_waits = 0;
long next_stream = 0x1000;

struct Event {
  double recorded_ms;
};

Event* event_of(cudaEvent_t event) { return reinterpret_cast<Event*>(event); }

int n_devices() { return static_cast<int>(mock_setting("MOCK_DEVICES", 1)); }

// A table of the data sheet of an H100 SXM: compute capability 9.0, 132 multiprocessors.
constexpr int n_multiprocessors = 132;
constexpr int shared_bytes_optin = 232448;

// The kernels of PyTorch that fill a contiguous tensor, and the bytes of an element. Their parameters are the number of
// elements, the value, and the address.
std::unordered_map<const void*, size_t>& fills() {
  static auto* map = new std::unordered_map<const void*, size_t>;
  return *map;
}

// Larger tensors are left as they are, so that what nothing reads stays unmapped.
constexpr size_t filled_bytes = 4096;

size_t filled_element_bytes(const char* kernel) {
  const char* functor = strstr(kernel, "11FillFunctorI");
  if (!functor || !strstr(kernel, "d_elementwise_kernelI")) return 0;  // vectorized_ or unrolled_: not the strided one
  switch (functor[strlen("11FillFunctorI")]) {
    case 'b': case 'a': case 'h': return 1;
    case 's': return 2;
    case 'i': case 'f': return 4;
    case 'l': case 'd': return 8;
    default: return 0;
  }
}

void launch(const void* kernel, void** parameters) {
  mock_count_launch();
  auto fill = fills().find(kernel);
  if (fill == fills().end()) return;
  size_t n = *static_cast<int*>(parameters[0]), element_bytes = fill->second;
  char* address = *static_cast<char**>(parameters[2]);
  for (size_t i = 0; n * element_bytes <= filled_bytes && i < n; i++) {
    memcpy(address + i * element_bytes, parameters[1], element_bytes);
  }
}

// The driver's functions that PyTorch looks up by name.
int primary_context_state(int, unsigned* flags, int* active) {
  if (flags) *flags = 0;
  *active = 1;
  return 0;
}
int pointer_attribute(void* value, int, unsigned long long) {
  *static_cast<int*>(value) = 0;
  return 0;
}
int success() { return 0; }

}  // namespace

int mock_current_device() { return current_device; }
void mock_count_launch() { n_launches++; }
void mock_count_wait() { n_waits++; }
double mock_now_ms() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

extern "C" {

unsigned long long mock_launches() { return n_launches; }
unsigned long long mock_waits() { return n_waits; }

// Devices

cudaError_t cudaGetDeviceCount(int* count) {
  *count = n_devices();
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= n_devices()) return cudaErrorInvalidDevice;
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  size_t free_bytes;
  memset(properties, 0, sizeof *properties);
  strcpy(properties->name, "NVIDIA H100 80GB HBM3");
  cudaMemGetInfo(&free_bytes, &properties->totalGlobalMem);
  properties->major = 9;
  properties->minor = 0;
  properties->multiProcessorCount = n_multiprocessors;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsDim[0] = 1024;
  properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = 65535;
  properties->maxGridSize[2] = 65535;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->maxBlocksPerMultiProcessor = 32;
  properties->regsPerBlock = 65536;
  properties->regsPerMultiprocessor = 65536;
  properties->sharedMemPerBlock = 49152;
  properties->sharedMemPerBlockOptin = shared_bytes_optin;
  properties->sharedMemPerMultiprocessor = 233472;
  properties->totalConstMem = 65536;
  properties->l2CacheSize = 52428800;
  properties->memoryBusWidth = 5120;
  properties->memPitch = 2147483647;
  properties->textureAlignment = 512;
  properties->asyncEngineCount = 3;
  properties->concurrentKernels = 1;
  properties->cooperativeLaunch = 1;
  properties->unifiedAddressing = 1;
  properties->managedMemory = 1;
  properties->canMapHostMemory = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = n_multiprocessors; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = shared_bytes_optin; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    default: *value = 1;
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  snprintf(text, length, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  mock_count_wait();
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}

// Errors

const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "mock";
}
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : "error of the mock";
}

// Events

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = reinterpret_cast<cudaEvent_t>(new Event{0});
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return cudaEventCreate(event); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event_of(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  event_of(event)->recorded_ms = mock_now_ms();
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventSynchronize(cudaEvent_t) {
  mock_count_wait();
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* elapsed_ms, cudaEvent_t start, cudaEvent_t end) {
  *elapsed_ms = static_cast<float>(event_of(end)->recorded_ms - event_of(start)->recorded_ms);
  return cudaSuccess;
}

// Streams

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = reinterpret_cast<cudaStream_t>(__sync_fetch_and_add(&next_stream, 16));
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamSynchronize(cudaStream_t) {
  mock_count_wait();
  return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* number,
                                     cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  if (number) *number = 0;
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* argument) {
  function(argument);
  return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* argument, unsigned) {
  function(stream, cudaSuccess, argument);
  return cudaSuccess;
}

// Kernels

void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  if (size_t element_bytes = filled_element_bytes(name)) fills()[function] = element_bytes;
}
cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void** parameters, size_t, cudaStream_t) {
  launch(kernel, parameters);
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(void* kernel, dim3, dim3, void** parameters, size_t, cudaStream_t) {
  launch(kernel, parameters);
  return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) {
  mock_count_launch();
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(void** kernel, const void* function) {
  *kernel = const_cast<void*>(function);
  return cudaSuccess;
}
char __cudaInitModule(void**) { return 1; }
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  *grid = dim3(1);
  *block = dim3(1);
  *shared_bytes = 0;
  *static_cast<void**>(stream) = nullptr;
  return cudaSuccess;
}
void** __cudaRegisterFatBinary(void*) {
  static void* handle[4];
  return handle;
}
cudaError_t cudaGetSymbolAddress(void** pointer, const void*) {
  static char room[1 << 16];
  *pointer = room;
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = 90;
  attributes->ptxVersion = 90;
  attributes->maxDynamicSharedSizeBytes = shared_bytes_optin;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int, size_t, unsigned) {
  *count = 8;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  if (result) *result = cudaDriverEntryPointSuccess;
  *function = reinterpret_cast<void*>(success);
  if (!strcmp(name, "cuDevicePrimaryCtxGetState")) *function = reinterpret_cast<void*>(primary_context_state);
  if (!strcmp(name, "cuPointerGetAttribute")) *function = reinterpret_cast<void*>(pointer_attribute);
  return cudaSuccess;
}

}  // extern "C"

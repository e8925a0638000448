// The CUDA driver (libcuda.so.1) as Triton uses it: modules and kernels load, and launches do nothing.
#include <dlfcn.h>

#include <cstdio>

#include "mock.h"

namespace {

unsigned long long n_launches = 0;

// Handles that are passed on and never looked into.
void* const function_handle = reinterpret_cast<void*>(0x5000);
void* const module_handle = reinterpret_cast<void*>(0x6000);
void* const context_handle = reinterpret_cast<void*>(0x7000);

int give(void** handle, void* value) {
  *handle = value;
  return 0;
}

}  // namespace

extern "C" {

unsigned long long mock_driver_launches() { return n_launches; }

int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
int cuDeviceGet(int* device, int number) {
  *device = number;
  return 0;
}
int cuDeviceGetCount(int* count) {
  *count = static_cast<int>(mock_setting("MOCK_DEVICES", 1));
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  switch (attribute) {
    case 1: *value = 1024; break;       // threads of a block
    case 8: *value = 49152; break;      // shared memory of a block
    case 10: *value = 32; break;        // threads of a warp
    case 12: *value = 65536; break;     // registers of a block
    case 13: *value = 1980000; break;   // clock, kHz
    case 16: *value = 132; break;       // multiprocessors
    case 36: *value = 2619000; break;   // clock of the memory, kHz
    case 37: *value = 5120; break;      // width of the memory bus, bits
    case 39: *value = 2048; break;      // threads of a multiprocessor
    case 75: *value = 9; break;         // compute capability, major
    case 76: *value = 0; break;         // compute capability, minor
    case 81: *value = 233472; break;    // shared memory of a multiprocessor
    case 97: *value = 232448; break;    // shared memory of a block that asks for more
    default: *value = 1;
  }
  return 0;
}
int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  if (flags) *flags = 0;
  *active = 1;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int) { return give(context, context_handle); }
int cuCtxGetCurrent(void** context) { return give(context, context_handle); }
int cuCtxGetDevice(int* device) {
  *device = 0;
  return 0;
}
int cuPointerGetAttribute(void* value, int, unsigned long long pointer) {
  *static_cast<unsigned long long*>(value) = pointer;
  return 0;
}
int cuModuleLoad(void** module, const char*) { return give(module, module_handle); }
int cuModuleLoadData(void** module, const void*) { return give(module, module_handle); }
int cuModuleLoadDataEx(void** module, const void*, unsigned, void*, void*) { return give(module, module_handle); }
int cuModuleGetFunction(void** function, void*, const char*) { return give(function, function_handle); }
int cuFuncGetAttribute(int* value, int attribute, void*) {
  switch (attribute) {
    case 0: *value = 1024; break;  // threads of a block
    case 4: *value = 32; break;    // registers
    default: *value = 0;           // shared, constant and local memory
  }
  return 0;
}
int cuOccupancyMaxActiveClusters(int* count, void*, void*) {
  *count = 66;
  return 0;
}
int cuLaunchKernel() {
  n_launches++;
  return 0;
}
int cuLaunchKernelEx() {
  n_launches++;
  return 0;
}
int cuGetErrorString(int, const char** text) {
  *text = "error of the mock";
  return 0;
}
int cuGetErrorName(int, const char** text) {
  *text = "mock";
  return 0;
}
int cuGetProcAddress_v2(const char* name, void** function, int, unsigned long long, int* status) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  *function = dlsym(library, name);
  if (!*function) {
    char versioned[128];
    snprintf(versioned, sizeof versioned, "%s_v2", name);
    *function = dlsym(library, versioned);
  }
  if (status) *status = 0;
  constexpr int not_found = 500;
  return *function ? 0 : not_found;
}

}  // extern "C"

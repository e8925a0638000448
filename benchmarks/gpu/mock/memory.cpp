// Device memory that is host memory. Pages are mapped on first touch, so what nothing writes to costs nothing.
#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <cstring>
#include <map>
#include <mutex>

#include "mock.h"

namespace {

enum class Kind { device, host };

struct Block {
  size_t n_bytes;
  Kind kind;
  int device;
};

std::mutex mutex;
size_t used_bytes = 0;
unsigned long long n_copies = 0;
unsigned long long n_pageable_copies = 0;
constexpr int n_directions = 5;
unsigned long long copied_bytes[n_directions];

// Never destroyed: PyTorch frees memory after static objects are gone.
std::map<char*, Block>& blocks() {
  static auto* map = new std::map<char*, Block>;
  return *map;
}

// Larger copies and fills are left out: their values are read by kernels alone, which do nothing.
constexpr size_t touched_bytes = 1 << 20;

size_t total_bytes() {
  return mock_setting("MOCK_BYTES", 80ull << 30);
}

cudaError_t allocate(void** pointer, size_t n_bytes, Kind kind) {
  std::lock_guard<std::mutex> guard(mutex);
  if (kind == Kind::device && used_bytes + n_bytes > total_bytes()) return cudaErrorMemoryAllocation;
  size_t mapped_bytes = n_bytes ? n_bytes : 1;
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* start = mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (start == MAP_FAILED) return cudaErrorMemoryAllocation;
  if (kind == Kind::device) used_bytes += mapped_bytes;
  blocks()[static_cast<char*>(start)] = {mapped_bytes, kind, mock_current_device()};
  *pointer = start;
  return cudaSuccess;
}

cudaError_t release(void* pointer) {
  if (!pointer) return cudaSuccess;
  std::lock_guard<std::mutex> guard(mutex);
  auto entry = blocks().find(static_cast<char*>(pointer));
  if (entry == blocks().end()) return cudaErrorInvalidValue;
  if (entry->second.kind == Kind::device) used_bytes -= entry->second.n_bytes;
  munmap(pointer, entry->second.n_bytes);
  blocks().erase(entry);
  return cudaSuccess;
}

bool is_pinned(const void* pointer) {
  char* address = static_cast<char*>(const_cast<void*>(pointer));
  std::lock_guard<std::mutex> guard(mutex);
  auto entry = blocks().upper_bound(address);
  if (entry == blocks().begin()) return false;
  --entry;
  return address < entry->first + entry->second.n_bytes;
}

// A real device copies memory of the host that is not pinned by way of a buffer, for which the host may have to wait.
void count_pageable(const void* to, const void* from, cudaMemcpyKind direction) {
  if (direction == cudaMemcpyHostToDevice && !is_pinned(from)) n_pageable_copies++;
  if (direction == cudaMemcpyDeviceToHost && !is_pinned(to)) n_pageable_copies++;
}

void copy(void* to, const void* from, size_t n_bytes, int direction) {
  n_copies++;
  copied_bytes[direction < n_directions ? direction : n_directions - 1] += n_bytes;
  if (n_bytes < touched_bytes) memmove(to, from, n_bytes);
}

void fill(void* pointer, int value, size_t n_bytes) {
  mock_count_launch();
  if (n_bytes < touched_bytes) memset(pointer, value, n_bytes);
}

}  // namespace

extern "C" {

unsigned long long mock_copies() { return n_copies; }
unsigned long long mock_pageable_copies() { return n_pageable_copies; }
unsigned long long mock_copied(int direction) { return copied_bytes[direction]; }
unsigned long long mock_used() { return used_bytes; }

cudaError_t cudaMalloc(void** pointer, size_t n_bytes) { return allocate(pointer, n_bytes, Kind::device); }
cudaError_t cudaMallocAsync(void** pointer, size_t n_bytes, cudaStream_t) {
  return allocate(pointer, n_bytes, Kind::device);
}
cudaError_t cudaHostAlloc(void** pointer, size_t n_bytes, unsigned) { return allocate(pointer, n_bytes, Kind::host); }
cudaError_t cudaFree(void* pointer) { return release(pointer); }
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return release(pointer); }
cudaError_t cudaFreeHost(void* pointer) { return release(pointer); }

cudaError_t cudaHostRegister(void* pointer, size_t n_bytes, unsigned) {
  std::lock_guard<std::mutex> guard(mutex);
  blocks()[static_cast<char*>(pointer)] = {n_bytes, Kind::host, mock_current_device()};
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* pointer) {
  std::lock_guard<std::mutex> guard(mutex);
  blocks().erase(static_cast<char*>(pointer));
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* all_bytes) {
  *all_bytes = total_bytes();
  *free_bytes = total_bytes() - used_bytes;
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  memset(attributes, 0, sizeof *attributes);
  attributes->type = cudaMemoryTypeUnregistered;
  attributes->device = -1;
  char* address = static_cast<char*>(const_cast<void*>(pointer));
  std::lock_guard<std::mutex> guard(mutex);
  auto entry = blocks().upper_bound(address);
  if (entry == blocks().begin()) return cudaSuccess;
  --entry;
  if (address >= entry->first + entry->second.n_bytes) return cudaSuccess;
  attributes->type = entry->second.kind == Kind::device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  attributes->device = entry->second.device;
  attributes->devicePointer = attributes->hostPointer = address;
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t n_bytes, cudaMemcpyKind direction) {
  mock_count_wait();
  copy(to, from, n_bytes, direction);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n_bytes, cudaMemcpyKind direction, cudaStream_t) {
  count_pageable(to, from, direction);
  copy(to, from, n_bytes, direction);
  return cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t n_bytes, cudaStream_t) {
  copy(to, from, n_bytes, cudaMemcpyDeviceToDevice);
  return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind direction, cudaStream_t) {
  for (size_t row = 0; row < height; row++)
    copy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width, direction);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* pointer, int value, size_t n_bytes) {
  fill(pointer, value, n_bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* pointer, int value, size_t n_bytes, cudaStream_t) {
  fill(pointer, value, n_bytes);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  *pool = reinterpret_cast<cudaMemPool_t>(8);
  return cudaSuccess;
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
  *static_cast<size_t*>(value) = 0;
  return cudaSuccess;
}

}  // extern "C"

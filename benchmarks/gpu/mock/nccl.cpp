// NCCL without a network: every call is written to a log, a line each, and a rank receives what it sends itself.
//
// MOCK_NCCL_LOG names the folder of the logs; each process writes RANK-PID.log. A line is
//   op communicator rank/size count=N dtype=T peer=P stream=S group=G
// where G numbers the outermost ncclGroupStart of the thread, 0 outside of one.
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>

#include "mock.h"

namespace {

struct UniqueId {
  char bytes[128];
};

struct Communicator {
  int size;
  int rank;
  uint64_t number;
  int n_splits;
};

thread_local int group_depth = 0;
thread_local long group_number = 0;

// Larger messages are not copied: kernels alone read them, and these do nothing.
constexpr size_t copied_bytes = 1 << 20;

// ncclDataType_t: int8, uint8, int32, uint32, int64, uint64, fp16, fp32, fp64, bf16, fp8 e4m3, fp8 e5m2
constexpr size_t bytes_of_dtype[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

uint64_t hash_of(const void* data, size_t n_bytes) {
  uint64_t hash = 1469598103934665603ull;  // FNV-1a
  for (size_t i = 0; i < n_bytes; i++) hash = (hash ^ static_cast<const uint8_t*>(data)[i]) * 1099511628211ull;
  return hash;
}

FILE* log_file() {
  static FILE* file = nullptr;
  static pid_t owner = 0;
  const char* folder = getenv("MOCK_NCCL_LOG");
  if (!folder) return nullptr;
  if (!file || owner != getpid()) {  // a fork has a log of its own
    const char* rank = getenv("RANK");
    char path[4096];
    snprintf(path, sizeof path, "%s/%s-%d.log", folder, rank ? rank : "0", getpid());
    file = fopen(path, "a");
    if (!file) return nullptr;
    setvbuf(file, nullptr, _IOLBF, 0);
    owner = getpid();
  }
  return file;
}

Communicator* of(void* communicator) { return static_cast<Communicator*>(communicator); }

void write_call(const char* op, void* communicator, size_t count, int dtype, int peer, void* stream) {
  FILE* file = log_file();
  if (!file) return;
  Communicator* on = of(communicator);
  long group = group_depth ? group_number : 0;
  fprintf(file, "%s %016lx %d/%d count=%zu dtype=%d peer=%d stream=%p group=%ld\n", op, on->number, on->rank, on->size,
          count, dtype, peer, stream, group);
}

// What this rank sends arrives in every part of `to`, as if all ranks sent the same.
void copy_to_parts(const void* from, void* to, size_t count, int dtype, int parts) {
  size_t n_bytes = count * bytes_of_dtype[dtype];
  if (n_bytes * parts >= copied_bytes) return;
  for (int part = 0; part < parts; part++) memmove(static_cast<char*>(to) + part * n_bytes, from, n_bytes);
}

}  // namespace

extern "C" {

int ncclGetVersion(int* version) {
  *version = 22809;
  return 0;
}
const char* ncclGetErrorString(int) { return "error of the mock"; }
const char* ncclGetLastError(void*) { return ""; }

// Communicators

int ncclGetUniqueId(UniqueId* id) {
  static int n_ids = 0;
  memset(id, 0, sizeof *id);
  snprintf(id->bytes, sizeof id->bytes, "%d-%d-%.0f", getpid(), n_ids++, mock_now_ms());
  return 0;
}
int ncclCommInitRank(void** communicator, int size, UniqueId id, int rank) {
  *communicator = new Communicator{size, rank, hash_of(&id, sizeof id), 0};
  write_call("init", *communicator, 0, 0, -1, nullptr);
  return 0;
}
int ncclCommInitRankConfig(void** communicator, int size, UniqueId id, int rank, void*) {
  return ncclCommInitRank(communicator, size, id, rank);
}
int ncclCommInitRankScalable(void** communicator, int size, int rank, int, UniqueId* ids, void*) {
  return ncclCommInitRank(communicator, size, ids[0], rank);
}
// The size of a part is not known without the other ranks: PyTorch sets its rank and does not ask for the size.
int ncclCommSplit(void* communicator, int color, int key, void** part, void*) {
  Communicator* whole = of(communicator);
  struct {
    uint64_t number;
    long split;
    long color;
  } name = {whole->number, whole->n_splits++, color};
  write_call("split", communicator, color, 0, key, nullptr);
  *part = color < 0 ? nullptr : new Communicator{whole->size, key, hash_of(&name, sizeof name), 0};
  return 0;
}
int ncclCommCount(void* communicator, int* count) {
  *count = of(communicator)->size;
  return 0;
}
int ncclCommUserRank(void* communicator, int* rank) {
  *rank = of(communicator)->rank;
  return 0;
}
int ncclCommGetAsyncError(void*, int* error) {
  *error = 0;
  return 0;
}

// Calls

int ncclGroupStart() {
  if (!group_depth++) group_number++;
  return 0;
}
int ncclGroupEnd() {
  group_depth--;
  return 0;
}
int ncclAllGather(const void* from, void* to, size_t count, int dtype, void* communicator, void* stream) {
  write_call("all_gather", communicator, count, dtype, -1, stream);
  copy_to_parts(from, to, count, dtype, of(communicator)->size);
  return 0;
}
int ncclAllReduce(const void* from, void* to, size_t count, int dtype, int, void* communicator, void* stream) {
  write_call("all_reduce", communicator, count, dtype, -1, stream);
  copy_to_parts(from, to, count, dtype, 1);
  return 0;
}
int ncclReduceScatter(const void* from, void* to, size_t count, int dtype, int, void* communicator, void* stream) {
  write_call("reduce_scatter", communicator, count, dtype, -1, stream);
  copy_to_parts(from, to, count, dtype, 1);
  return 0;
}
int ncclBroadcast(const void* from, void* to, size_t count, int dtype, int root, void* communicator, void* stream) {
  write_call("broadcast", communicator, count, dtype, root, stream);
  copy_to_parts(from, to, count, dtype, 1);
  return 0;
}
int ncclReduce(const void* from, void* to, size_t count, int dtype, int, int root, void* communicator, void* stream) {
  write_call("reduce", communicator, count, dtype, root, stream);
  copy_to_parts(from, to, count, dtype, 1);
  return 0;
}
int ncclAlltoAll(const void* from, void* to, size_t count, int dtype, void* communicator, void* stream) {
  write_call("all_to_all", communicator, count, dtype, -1, stream);
  copy_to_parts(from, to, count * of(communicator)->size, dtype, 1);
  return 0;
}
int ncclSend(const void*, size_t count, int dtype, int peer, void* communicator, void* stream) {
  write_call("send", communicator, count, dtype, peer, stream);
  return 0;
}
int ncclRecv(void*, size_t count, int dtype, int peer, void* communicator, void* stream) {
  write_call("recv", communicator, count, dtype, peer, stream);
  return 0;
}

}  // extern "C"

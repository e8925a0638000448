// cuBLAS and cuDNN: handles and descriptions are blocks of memory that nothing reads, matmuls do nothing.
#include <cstdlib>
#include <cstring>

namespace {

// Larger than any handle or description of these libraries.
constexpr size_t room_bytes = 256;

int make(void** object) {
  *object = calloc(1, room_bytes);
  return 0;
}
int unmake(void* object) {
  free(object);
  return 0;
}

constexpr int cublas_version = 130100;
// sizeof(cublasLtMatmulHeuristicResult_t)
constexpr size_t heuristic_bytes = 128;

}  // namespace

extern "C" {

int cublasCreate_v2(void** handle) { return make(handle); }
int cublasDestroy_v2(void* handle) { return unmake(handle); }
int cublasGetMathMode(void*, int* mode) {
  *mode = 0;
  return 0;
}
int cublasGetPointerMode_v2(void*, int* mode) {
  *mode = 0;
  return 0;
}
int cublasGetVersion_v2(void*, int* version) {
  *version = cublas_version;
  return 0;
}
const char* cublasGetStatusString(int) { return "error of the mock"; }

size_t cublasLtGetVersion() { return cublas_version; }
int cublasLtMatmulDescCreate(void** description, int, int) { return make(description); }
int cublasLtMatmulDescDestroy(void* description) { return unmake(description); }
int cublasLtMatmulPreferenceCreate(void** preference) { return make(preference); }
int cublasLtMatmulPreferenceDestroy(void* preference) { return unmake(preference); }
int cublasLtMatrixLayoutCreate(void** layout, int, unsigned long long, unsigned long long, long long) {
  return make(layout);
}
int cublasLtMatrixLayoutDestroy(void* layout) { return unmake(layout); }
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* results, int* count) {
  memset(results, 0, heuristic_bytes);
  *count = 1;
  return 0;
}

int cudnnCreate(void** handle) { return make(handle); }

}  // extern "C"

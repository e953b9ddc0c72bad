// What the bench calls of cuBLAS and cuFile, for a test without them: each function checks that its arguments arrive in
// their places. -DBLAS and -DCUFILE choose.
#include <stdint.h>
#include <sys/types.h>
#include <unistd.h>

#ifdef BLAS
int cublasCreate_v2(void** handle) {
  *handle = (void*)0x1111;
  return 0;
}
int cublasDestroy_v2(void* handle) { return handle == (void*)0x1111 ? 0 : 7; }
int cublasSetStream_v2(void* handle, void* stream) {
  return handle == (void*)0x1111 && stream == (void*)0x2222 ? 0 : 7;
}
int cublasGemmEx(void* handle, int transA, int transB, int m, int n, int k, const void* alpha, const void* a, int typeA,
                 int lda, const void* b, int typeB, int ldb, const void* beta, void* c, int typeC, int ldc, int compute,
                 int algorithm) {
  if (handle != (void*)0x1111 || transA != 0 || transB != 0) return 1;
  if (m != 640 || n != 640 || k != 640 || lda != 640 || ldb != 640 || ldc != 640) return 2;
  if (*(const float*)alpha != 1 || *(const float*)beta != 0) return 3;
  if (a != (void*)0xa0000000a || b != (void*)0xb0000000b || c != (void*)0xc0000000c) return 4;
  if (typeA != 14 || typeB != 14 || typeC != 14) return 5;
  return compute == 68 && algorithm == -1 ? 0 : 6;
}
#endif

#ifdef CUFILE
typedef struct {
  int err, result;
} status;
typedef struct {
  int type;
  union {
    int fd;
    void* handle;
  } handle;
  const void* operations;
} description;

static int opened, file = -1;

status cuFileDriverOpen(void) {
  if (opened) return (status){5001, 0};
  opened = 1;
  return (status){0, 0};
}
status cuFileDriverClose(void) {
  if (!opened) return (status){5002, 0};
  opened = 0;
  return (status){0, 0};
}
status cuFileHandleRegister(void** handle, description* d) {
  if (d->type != 1 || d->operations) return (status){5022, 1};
  file = d->handle.fd;
  *handle = (void*)0x3333;
  return (status){0, 0};
}
void cuFileHandleDeregister(void* handle) {
  if (handle == (void*)0x3333) file = -1;
}
status cuFileBufRegister(const void* p, size_t n, int flags) {
  return (status){p && n == 64 && !flags ? 0 : 5012, 201};
}
status cuFileBufDeregister(const void* p) { return (status){p ? 0 : 5012, 0}; }
ssize_t cuFileRead(void* handle, void* p, size_t n, off_t offset, off_t at) {
  return handle == (void*)0x3333 ? pread(file, (char*)p + at, n, offset) : -5;
}
#endif

// A library with the driver's functions as cuda.h of CUDA 13.0 declares them. Each notes what it is given and returns
// the answer that the test has set.
#include <stddef.h>
#include <stdint.h>

typedef struct { unsigned char bytes[16]; } CUuuid;
typedef struct { char reserved[64]; } CUipcMemHandle;
typedef unsigned long long CUdeviceptr;
typedef int CUresult, CUdevice, CUdevice_attribute, CUpointer_attribute, CUjit_option;
typedef unsigned int CUdevResourceType, CUmemRangeHandleType;
typedef struct CUctx_st *CUcontext;
typedef struct CUgreenCtx_st *CUgreenCtx;
typedef struct CUdevResourceDesc_st *CUdevResourceDesc;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUdevResource_st CUdevResource;
typedef struct CUmemcpyAttributes_st CUmemcpyAttributes;

struct {
  const char *name;
  int64_t count, arguments[16];
} test_seen;
CUresult test_answer;
int test_version, test_devices;

#define SEEN(...)                                              \
  do {                                                         \
    int64_t all[] = {__VA_ARGS__};                             \
    test_seen.name = __func__;                                 \
    test_seen.count = (int64_t)(sizeof all / sizeof *all);     \
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)      \
      test_seen.arguments[i] = all[i];                         \
    return test_answer;                                        \
  } while (0)
#define P(p) ((int64_t)(uintptr_t)(p))

CUresult cuGetErrorName(CUresult r, const char **s) {
  *s = r == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : NULL;
  return r == 2 ? 0 : 1;
}
CUresult cuGetErrorString(CUresult r, const char **s) {
  *s = r == 2 ? "out of memory" : NULL;
  return r == 2 ? 0 : 1;
}
CUresult cuInit(unsigned flags) { SEEN(flags); }
CUresult cuDriverGetVersion(int *v) { *v = test_version; SEEN(P(v)); }
CUresult cuDeviceGetCount(int *n) { *n = test_devices; SEEN(P(n)); }
CUresult cuDeviceGet(CUdevice *d, int ordinal) { SEEN(P(d), ordinal); }
CUresult cuDeviceGetName(char *name, int len, CUdevice d) { SEEN(P(name), len, d); }
CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice d) { SEEN(P(uuid), d); }
CUresult cuDeviceTotalMem_v2(size_t *n, CUdevice d) { SEEN(P(n), d); }
CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice d) { SEEN(P(v), a, d); }
CUresult cuDeviceGetPCIBusId(char *id, int len, CUdevice d) { SEEN(P(id), len, d); }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { SEEN(P(c), d); }
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice d) { SEEN(d); }
CUresult cuCtxSetCurrent(CUcontext c) { SEEN(P(c)); }
CUresult cuCtxSynchronize(void) { test_seen.name = __func__; test_seen.count = 0; return test_answer; }
CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) { SEEN(P(least), P(greatest)); }
CUresult cuDeviceGetDevResource(CUdevice d, CUdevResource *r, CUdevResourceType t) { SEEN(d, P(r), t); }
CUresult cuDevSmResourceSplitByCount(CUdevResource *out, unsigned *groups, const CUdevResource *in, CUdevResource *rest,
                                     unsigned flags, unsigned least) {
  SEEN(P(out), P(groups), P(in), P(rest), flags, least);
}
CUresult cuDevResourceGenerateDesc(CUdevResourceDesc *d, CUdevResource *r, unsigned n) { SEEN(P(d), P(r), n); }
CUresult cuGreenCtxCreate(CUgreenCtx *g, CUdevResourceDesc r, CUdevice d, unsigned flags) { SEEN(P(g), P(r), d, flags); }
CUresult cuGreenCtxDestroy(CUgreenCtx g) { SEEN(P(g)); }
CUresult cuCtxFromGreenCtx(CUcontext *c, CUgreenCtx g) { SEEN(P(c), P(g)); }
CUresult cuGreenCtxStreamCreate(CUstream *s, CUgreenCtx g, unsigned flags, int priority) {
  SEEN(P(s), P(g), flags, priority);
}
CUresult cuMemGetInfo_v2(size_t *free, size_t *total) { SEEN(P(free), P(total)); }
CUresult cuMemAlloc_v2(CUdeviceptr *p, size_t n) { SEEN(P(p), (int64_t)n); }
CUresult cuMemFree_v2(CUdeviceptr p) { SEEN((int64_t)p); }
CUresult cuMemHostAlloc(void **p, size_t n, unsigned flags) { SEEN(P(p), (int64_t)n, flags); }
CUresult cuMemFreeHost(void *p) { SEEN(P(p)); }
CUresult cuMemHostRegister_v2(void *p, size_t n, unsigned flags) { SEEN(P(p), (int64_t)n, flags); }
CUresult cuMemHostUnregister(void *p) { SEEN(P(p)); }
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *d, void *p, unsigned flags) { SEEN(P(d), P(p), flags); }
CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *n, CUdeviceptr p) { SEEN(P(base), P(n), (int64_t)p); }
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute a, CUdeviceptr p) { SEEN(P(data), a, (int64_t)p); }
CUresult cuMemGetHandleForAddressRange(void *h, CUdeviceptr p, size_t n, CUmemRangeHandleType t,
                                       unsigned long long flags) {
  SEEN(P(h), (int64_t)p, (int64_t)n, t, (int64_t)flags);
}
CUresult cuIpcGetMemHandle(CUipcMemHandle *h, CUdeviceptr p) { SEEN(P(h), (int64_t)p); }
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *p, CUipcMemHandle h, unsigned flags) {
  int64_t w[8];
  __builtin_memcpy(w, &h, sizeof w);
  SEEN(P(p), w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], flags);
}
CUresult cuIpcCloseMemHandle(CUdeviceptr p) { SEEN((int64_t)p); }
CUresult cuModuleLoadDataEx(CUmodule *m, const void *image, unsigned n, CUjit_option *options, void **values) {
  SEEN(P(m), P(image), n, P(options), P(values));
}
CUresult cuModuleUnload(CUmodule m) { SEEN(P(m)); }
CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name) { SEEN(P(f), P(m), P(name)); }
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, CUstream s, void **params, void **extra) {
  SEEN(P(f), gx, gy, gz, bx, by, bz, shared, P(s), P(params), P(extra));
}
CUresult cuStreamCreateWithPriority(CUstream *s, unsigned flags, int priority) { SEEN(P(s), flags, priority); }
CUresult cuStreamDestroy_v2(CUstream s) { SEEN(P(s)); }
CUresult cuStreamSynchronize(CUstream s) { SEEN(P(s)); }
CUresult cuStreamQuery(CUstream s) { SEEN(P(s)); }
CUresult cuStreamWaitEvent(CUstream s, CUevent e, unsigned flags) { SEEN(P(s), P(e), flags); }
CUresult cuStreamWaitValue32_v2(CUstream s, CUdeviceptr p, uint32_t v, unsigned flags) {
  SEEN(P(s), (int64_t)p, v, flags);
}
CUresult cuStreamWriteValue32_v2(CUstream s, CUdeviceptr p, uint32_t v, unsigned flags) {
  SEEN(P(s), (int64_t)p, v, flags);
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr d, const void *s, size_t n, CUstream q) {
  SEEN((int64_t)d, P(s), (int64_t)n, P(q));
}
CUresult cuMemcpyDtoHAsync_v2(void *d, CUdeviceptr s, size_t n, CUstream q) {
  SEEN(P(d), (int64_t)s, (int64_t)n, P(q));
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr d, CUdeviceptr s, size_t n, CUstream q) {
  SEEN((int64_t)d, (int64_t)s, (int64_t)n, P(q));
}
CUresult cuMemsetD8Async(CUdeviceptr p, unsigned char v, size_t n, CUstream q) { SEEN((int64_t)p, v, (int64_t)n, P(q)); }
CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *d, CUdeviceptr *s, size_t *n, size_t count, CUmemcpyAttributes *a,
                               size_t *firsts, size_t attributes, CUstream q) {
  SEEN(P(d), P(s), P(n), (int64_t)count, P(a), P(firsts), (int64_t)attributes, P(q));
}
CUresult cuEventCreate(CUevent *e, unsigned flags) { SEEN(P(e), flags); }
CUresult cuEventDestroy_v2(CUevent e) { SEEN(P(e)); }
CUresult cuEventRecord(CUevent e, CUstream s) { SEEN(P(e), P(s)); }
CUresult cuEventQuery(CUevent e) { SEEN(P(e)); }
CUresult cuEventSynchronize(CUevent e) { SEEN(P(e)); }
CUresult cuEventElapsedTime_v2(float *ms, CUevent from, CUevent to) { SEEN(P(ms), P(from), P(to)); }

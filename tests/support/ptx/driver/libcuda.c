/* The functions of CUDA's driver library that Triton and opgrad call. Each hands pointers to its arguments to one
   handler, which Python sets: see device.py. */

typedef int (*Handler)(const char *name, void **arguments);

enum { NOT_INITIALIZED = 3 };

static Handler handler;

void set_handler(Handler given) { handler = given; }

#define CALL(name, ...)                                                                                                \
  {                                                                                                                    \
    void *arguments[] = {__VA_ARGS__};                                                                                 \
    return handler ? handler(#name, arguments) : NOT_INITIALIZED;                                                      \
  }

#define ONE(name, A) int name(A a) CALL(name, &a)
#define TWO(name, A, B) int name(A a, B b) CALL(name, &a, &b)
#define THREE(name, A, B, C) int name(A a, B b, C c) CALL(name, &a, &b, &c)
#define FOUR(name, A, B, C, D) int name(A a, B b, C c, D d) CALL(name, &a, &b, &c, &d)

ONE(cuInit, unsigned)
ONE(cuDriverGetVersion, int *)
TWO(cuGetErrorString, int, const char **)
ONE(cuDeviceGetCount, int *)
TWO(cuDeviceGet, int *, int)
THREE(cuDeviceGetAttribute, int *, int, int)
TWO(cuDevicePrimaryCtxRetain, void **, int)
ONE(cuCtxGetCurrent, void **)
ONE(cuCtxSetCurrent, void *)
ONE(cuCtxGetDevice, int *)
TWO(cuCtxGetLimit, unsigned long *, int)
TWO(cuCtxSetLimit, int, unsigned long)
TWO(cuModuleLoadData, void **, const void *)
ONE(cuModuleUnload, void *)
THREE(cuModuleGetFunction, void **, void *, const char *)
THREE(cuFuncGetAttribute, int *, int, void *)
THREE(cuFuncSetAttribute, void *, int, int)
TWO(cuFuncSetCacheConfig, void *, int)
THREE(cuPointerGetAttribute, void *, int, unsigned long long)
TWO(cuStreamIsCapturing, void *, int *)
FOUR(cuMemcpyDtoDAsync_v2, unsigned long long, unsigned long long, unsigned long, void *)
THREE(cuMemcpyDtoH_v2, void *, unsigned long long, unsigned long)
THREE(cuMemcpyHtoD_v2, unsigned long long, const void *, unsigned long)
FOUR(cuMemcpyHtoDAsync_v2, unsigned long long, const void *, unsigned long, void *)
TWO(cuMemAllocHost_v2, void **, unsigned long)
ONE(cuMemFreeHost, void *)
TWO(cuStreamCreate, void **, unsigned)
TWO(cuEventCreate, void **, unsigned)
TWO(cuEventRecord, void *, void *)
ONE(cuEventSynchronize, void *)
ONE(cuEventDestroy_v2, void *)
FOUR(cuMemsetD8Async, unsigned long long, unsigned char, unsigned long, void *)
FOUR(cuLaunchKernelEx, const void *, void *, void **, void **)

/* NVIDIA's driver without a card: memory is numbers, nothing is computed, and what is downloaded is zeros. */
#include <stdint.h>
#include <string.h>

typedef void *P;
static uintptr_t next = 1 << 20, n_handles;
static char staging[1 << 20];
static int capability[2] = {9, 0};

void set_capability(int major, int minor) { capability[0] = major, capability[1] = minor; }

static int handle(P *made) { *made = (P)++n_handles; return 0; }
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetUuid(unsigned char *uuid, int device) { for (int i = 0; i < 16; i++) uuid[i] = i; return 0; }
int cuDevicePrimaryCtxRetain(P *context, int device) { return handle(context); }
int cuCtxSetCurrent(P context) { return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "recorder", size); return 0; }
int cuDeviceGetAttribute(int *value, int number, int device) { *value = capability[number - 75]; return 0; }
int cuMemGetInfo_v2(size_t *free, size_t *total) { *free = *total = 80ull << 30; return 0; }
int cuMemAlloc_v2(P *made, size_t n_bytes) { *made = (P)next; next += (n_bytes + 511) / 512 * 512; return 0; }
int cuMemFree_v2(P memory) { return 0; }
int cuMemcpyHtoDAsync_v2(P target, P source, size_t n_bytes, P stream) {
    if (n_bytes <= 65536) memcpy(staging, source, n_bytes); /* so does the driver */
    return 0;
}
int cuMemcpyDtoH_v2(P target, P source, size_t n_bytes) { memset(target, 0, n_bytes); return 0; }
int cuMemcpyDtoDAsync_v2(P target, P source, size_t n_bytes, P stream) { return 0; }
int cuModuleLoadData(P *module, P code) { return handle(module); }
int cuModuleGetFunction(P *function, P module, const char *name) { return handle(function); }
int cuStreamCreate(P *stream, unsigned flags) { return handle(stream); }
int cuLaunchKernel(P function, unsigned x, unsigned y, unsigned z, unsigned tx, unsigned ty, unsigned tz, unsigned shared,
                   P stream, P *given, P *more) { return 0; }
int cuLaunchKernelEx(P launch, P function, P *given, P *more) { return 0; }
int cuStreamBeginCapture_v2(P stream, int mode) { return 0; }
int cuStreamEndCapture(P stream, P *graph) { return handle(graph); }
int cuGraphInstantiateWithFlags(P *made, P graph, unsigned long long flags) { return handle(made); }
int cuGraphLaunch(P graph, P stream) { return 0; }
int cuGraphDestroy(P graph) { return 0; }
int cuGraphExecDestroy(P graph) { return 0; }

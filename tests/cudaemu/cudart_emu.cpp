// A CUDA runtime + the few driver/NVRTC entry points CuPy uses, executed on the CPU.
// For exercising stream, event and graph-capture code without a GPU.  See README.md.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cuda_profiler_api.h>
#include <nvrtc.h>
#include <dlfcn.h>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))
typedef cudaError_t E;
typedef std::function<void()> Fn;
typedef std::chrono::steady_clock Clock;

static std::string temp_template(const char* stem) { const char* t = getenv("TMPDIR"); return std::string(t && *t ? t : P_tmpdir) + "/" + stem + "XXXXXX"; }
static long envl(const char* n, long d) { const char* v = getenv(n); return v && *v ? atol(v) : d; }

// ---- completion tokens, operations, streams -------------------------------------------------
struct Tok {
  std::mutex m; std::condition_variable cv; bool done = false; Clock::time_point t;
  void finish() { { std::lock_guard<std::mutex> l(m); done = true; t = Clock::now(); } cv.notify_all(); }
  void wait() { std::unique_lock<std::mutex> l(m); cv.wait(l, [&] { return done; }); }
  bool ready() { std::lock_guard<std::mutex> l(m); return done; }
};
typedef std::shared_ptr<Tok> TokP;
struct Op { Fn fn; std::vector<TokP> deps; TokP tok; };

struct CUgraphNode_st { cudaGraphNodeType type; Fn fn; std::vector<CUgraphNode_st*> deps; };
typedef CUgraphNode_st Node;
typedef std::vector<std::shared_ptr<Node>> Nodes;
struct CUgraph_st { Nodes nodes; };
struct CUgraphExec_st { Nodes nodes; TokP last; };

struct Capture {
  unsigned long long id; cudaStreamCaptureMode mode; std::thread::id thread; cudaStream_t origin;
  CUgraph_st* graph; bool invalid = false; std::set<cudaStream_t> streams;
};
typedef std::shared_ptr<Capture> CapP;

struct CUstream_st {
  int dev = 0; unsigned flags = 0; int prio = 0; bool legacy = false, stop = false, started = false;
  std::mutex m; std::condition_variable cv; std::deque<Op> q; TokP last;
  CapP cap; std::vector<Node*> front;   // capture in progress and its current dependency set
  bool blocking() const { return !(flags & cudaStreamNonBlocking); }
};
struct CUevent_st {
  unsigned flags = 0; int dev = 0; TokP tok; CapP cap; std::vector<Node*> nodes;
};
struct Alloc { size_t size; int dev; cudaMemoryType type; bool registered; };

struct Global {
  std::mutex m;
  int ndev = (int)envl("EMU_DEVICES", 1);
  size_t total = (size_t)envl("EMU_MEM_MB", 4096) << 20; std::vector<size_t> used;
  long delay = envl("EMU_DELAY_US", 0); bool poison = envl("EMU_POISON", 0), trace = envl("EMU_TRACE", 0);
  std::vector<CUstream_st*> legacy; std::set<CUstream_st*> streams; std::set<CUevent_st*> events;
  std::set<CUgraph_st*> graphs; std::set<CUgraphExec_st*> execs; std::vector<CapP> caps;
  std::map<char*, Alloc> mem; std::deque<std::pair<void*, size_t>> quarantine; size_t held = 0;
  std::atomic<int> sticky{0}; unsigned long long next_cap = 1, ops = 0;
  Global() {
    used.assign(ndev > 0 ? ndev : 1, 0);
    for (int d = 0; d < ndev; d++) { auto* s = new CUstream_st; s->dev = d; s->legacy = true; legacy.push_back(s); }
    pthread_atfork(nullptr, nullptr, [] { g_forked = true; });
  }
  static bool g_forked;
};
bool Global::g_forked = false;
static Global& G() { static Global* g = new Global; return *g; }   // never destroyed: workers outlive main
typedef std::unique_lock<std::mutex> Lock;

static thread_local int t_dev = 0;
static thread_local E t_last = cudaSuccess;
static thread_local bool t_cb = false;
static thread_local cudaStreamCaptureMode t_mode = cudaStreamCaptureModeGlobal;

static E ret(E e) { if (e != cudaSuccess) t_last = e; return e; }
static E gate() {
  if (Global::g_forked) return cudaErrorInitializationError;
  if (int s = G().sticky.load()) return (E)s;
  if (t_cb) return cudaErrorNotPermitted;
  if (G().ndev < 1) return cudaErrorNoDevice;
  return cudaSuccess;
}
#define ENTER do { if (G().trace) fprintf(stderr, "[emu] %s\n", __func__); \
  E e_ = gate(); if (e_ != cudaSuccess) return ret(e_); } while (0)

static void delay() {
  long d = G().delay; if (d <= 0) return;
  static thread_local std::mt19937 r((unsigned)(envl("EMU_SEED", 0) * 7919 + (size_t)pthread_self() % 65521));
  std::this_thread::sleep_for(std::chrono::microseconds(r() % (d + 1)));
}
static void worker(CUstream_st* s) {
  for (;;) {
    Op op;
    { Lock l(s->m); s->cv.wait(l, [&] { return !s->q.empty() || s->stop; });
      if (s->q.empty()) break;
      op = std::move(s->q.front()); s->q.pop_front(); }
    for (auto& d : op.deps) d->wait();
    op.deps.clear(); delay();
    if (op.fn && !G().sticky.load()) op.fn();
    op.fn = nullptr; op.tok->finish();
  }   // s is never freed: a stale handle stays recognizable
}
// all below with G().m held -------------------------------------------------------------------
static TokP enqueue(CUstream_st* s, Fn fn, std::vector<TokP> deps = {}) {
  auto& g = G(); g.ops++;
  if (s->legacy) { for (auto* o : g.streams) if (o->dev == s->dev && o->blocking() && o->last) deps.push_back(o->last); }
  else if (s->blocking() && g.legacy[s->dev]->last) deps.push_back(g.legacy[s->dev]->last);
  Op op{std::move(fn), std::move(deps), std::make_shared<Tok>()};
  s->last = op.tok; TokP t = op.tok;
  if (!s->started) { s->started = true; std::thread(worker, s).detach(); }
  { Lock l(s->m); s->q.push_back(std::move(op)); } s->cv.notify_one();
  return t;
}
static E resolve(cudaStream_t h, CUstream_st*& s) {
  auto& g = G();
  if (h == nullptr || h == cudaStreamLegacy || h == cudaStreamPerThread) { s = g.legacy[t_dev]; return cudaSuccess; }
  if (!g.streams.count(h)) return cudaErrorInvalidResourceHandle;
  s = h; return cudaSuccess;
}
static E legacy_check(CUstream_st* s) {   // the legacy stream against captures in blocking streams
  if (!s->legacy) return cudaSuccess;
  bool hit = false;
  for (auto& c : G().caps) for (auto* o : c->streams) if (o->dev == s->dev && o->blocking()) { c->invalid = true; hit = true; }
  return hit ? cudaErrorStreamCaptureImplicit : cudaSuccess;
}
static E unsafe_check() {   // "potentially unsafe" calls such as cudaMalloc, by this thread's interaction mode
  if (t_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  bool hit = false; auto me = std::this_thread::get_id();
  for (auto& c : G().caps) {
    bool own = c->thread == me && c->mode != cudaStreamCaptureModeRelaxed;
    bool other = c->thread != me && c->mode == cudaStreamCaptureModeGlobal && t_mode == cudaStreamCaptureModeGlobal;
    if (own || other) { c->invalid = true; hit = true; }
  }
  return hit ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}
static E no_capture(CUstream_st* s) {   // an operation that a capturing stream refuses
  if (!s->cap) return cudaSuccess;
  if (s->cap->invalid) return cudaErrorStreamCaptureInvalidated;
  s->cap->invalid = true; return cudaErrorStreamCaptureUnsupported;
}
static Node* add_node(CUstream_st* s, cudaGraphNodeType type, Fn fn) {
  auto n = std::make_shared<Node>(); n->type = type; n->fn = std::move(fn); n->deps = s->front;
  s->cap->graph->nodes.push_back(n); s->front = {n.get()}; return n.get();
}
static E submit(cudaStream_t h, cudaGraphNodeType type, Fn fn, TokP* tok = nullptr, bool samedev = false) {
  CUstream_st* s; E e = resolve(h, s); if (e) return e;
  if (samedev && s->dev != t_dev) return cudaErrorInvalidResourceHandle;
  if ((e = legacy_check(s))) return e;
  if (s->cap) {
    if (s->cap->invalid) return cudaErrorStreamCaptureInvalidated;
    add_node(s, type, std::move(fn)); return cudaSuccess;
  }
  TokP t = enqueue(s, std::move(fn)); if (tok) *tok = t;
  return cudaSuccess;
}
static std::vector<TokP> device_toks(int dev) {
  std::vector<TokP> v; auto& g = G();
  if (g.legacy[dev]->last) v.push_back(g.legacy[dev]->last);
  for (auto* s : g.streams) if (s->dev == dev && s->last) v.push_back(s->last);
  return v;
}
static E sticky() { return (E)G().sticky.load(); }
static std::map<char*, Alloc>::iterator find_mem(const void* p) {
  auto& m = G().mem; auto it = m.upper_bound((char*)p);
  if (it == m.begin()) return m.end();
  --it; return (char*)p < it->first + std::max<size_t>(it->second.size, 1) ? it : m.end();
}
static E mem_alloc(void** p, size_t n, cudaMemoryType type, bool count) {
  auto& g = G(); if (!p) return cudaErrorInvalidValue;
  if (!n) { *p = nullptr; return cudaSuccess; }
  if (count && (n > g.total || g.used[t_dev] + n > g.total)) return cudaErrorMemoryAllocation;
  void* q = nullptr; if (posix_memalign(&q, 512, (n + 511) & ~511ul)) return cudaErrorMemoryAllocation;
  if (g.poison) memset(q, 0xCD, n);
  if (count) g.used[t_dev] += n;
  g.mem[(char*)q] = Alloc{n, t_dev, type, false}; *p = q; return cudaSuccess;
}
static void release(void* p, size_t n) {
  auto& g = G(); if (!g.poison) { free(p); return; }
  memset(p, 0xDB, n); g.quarantine.push_back({p, n}); g.held += n;
  while (g.held > (512ul << 20)) { g.held -= g.quarantine.front().second; free(g.quarantine.front().first); g.quarantine.pop_front(); }
}
static E mem_free(void* p, bool device) {
  auto& g = G(); auto it = g.mem.find((char*)p);
  if (it == g.mem.end() || (it->second.type == cudaMemoryTypeHost) == device || it->second.registered) return cudaErrorInvalidValue;
  if (device) g.used[it->second.dev] -= it->second.size;
  size_t n = it->second.size; g.mem.erase(it); release(p, n); return cudaSuccess;
}

// ---- errors ---------------------------------------------------------------------------------
#define ERRS(X) X(Success, "no error") X(InvalidValue, "invalid argument") X(MemoryAllocation, "out of memory") \
  X(InitializationError, "initialization error") X(CudartUnloading, "driver shutting down") \
  X(InvalidMemcpyDirection, "invalid copy direction for memcpy") X(NoDevice, "no CUDA-capable device is detected") \
  X(InvalidDevice, "invalid device ordinal") X(InvalidResourceHandle, "invalid resource handle") \
  X(IllegalState, "the operation cannot be performed in the present state") X(SymbolNotFound, "named symbol not found") \
  X(NotReady, "device not ready") X(IllegalAddress, "an illegal memory access was encountered") \
  X(LaunchFailure, "unspecified launch failure") X(InvalidConfiguration, "invalid configuration argument") \
  X(PeerAccessAlreadyEnabled, "peer access is already enabled") X(PeerAccessNotEnabled, "peer access has not been enabled") \
  X(HostMemoryAlreadyRegistered, "part or all of the requested memory range is already mapped") \
  X(HostMemoryNotRegistered, "pointer does not correspond to a registered memory region") \
  X(NotPermitted, "operation not permitted") X(NotSupported, "operation not supported") \
  X(ContextIsDestroyed, "context is destroyed") X(PeerAccessUnsupported, "peer access is not supported between these two devices") \
  X(StreamCaptureUnsupported, "operation not permitted when stream is capturing") \
  X(StreamCaptureInvalidated, "operation failed due to a previous error during capture") \
  X(StreamCaptureMerge, "operation would result in a merge of separate capture sequences") \
  X(StreamCaptureUnmatched, "capture was not ended in the same stream as it began") \
  X(StreamCaptureUnjoined, "capturing stream has unjoined work") \
  X(StreamCaptureIsolation, "dependency created on uncaptured work in another stream") \
  X(StreamCaptureImplicit, "operation would make the legacy stream depend on a capturing blocking stream") \
  X(CapturedEvent, "operation not permitted on an event last recorded in a capturing stream") \
  X(StreamCaptureWrongThread, "attempt to terminate a thread-local capture sequence from another thread") X(Unknown, "unknown error")
API const char* cudaGetErrorName(E e) {
  switch ((int)e) {
#define X(n, s) case cudaError##n: return "cudaError" #n;
    case 0: return "cudaSuccess";
#define cudaErrorSuccess (-1)
    ERRS(X)
#undef X
  } return "unrecognized error code";
}
API const char* cudaGetErrorString(E e) {
  switch ((int)e) {
#define X(n, s) case cudaError##n: return s;
    case 0: return "no error";
    ERRS(X)
#undef X
  } return "unrecognized error code";
}
API E cudaGetLastError() { if (int s = G().sticky.load()) return (E)s; E e = t_last; t_last = cudaSuccess; return e; }
API E cudaPeekAtLastError() { if (int s = G().sticky.load()) return (E)s; return t_last; }
// test hooks: an asynchronous fault on a stream, its reset, and counts of what is alive
API int emu_fault(cudaStream_t s, int code) {
  ENTER; Lock l(G().m);
  return ret(submit(s, cudaGraphNodeTypeKernel, [code] { G().sticky = code ? code : (int)cudaErrorIllegalAddress; }));
}
API void emu_reset_fault() { G().sticky = 0; t_last = cudaSuccess; }
API void emu_set_delay(long us) { G().delay = us; }
API long emu_live(int what) {   // 0 streams, 1 events, 2 graphs, 3 graph execs, 4 allocations, 5 captures, 6 operations so far
  auto& g = G(); Lock l(g.m);
  size_t v[] = {g.streams.size(), g.events.size(), g.graphs.size(), g.execs.size(), g.mem.size(), g.caps.size(), (size_t)g.ops};
  return what >= 0 && what < 7 ? (long)v[what] : -1;
}
API int emu_block(cudaStream_t s, int* flag) {   // hold the stream until *flag is non-zero
  ENTER; Lock l(G().m);
  return ret(submit(s, cudaGraphNodeTypeHost, [flag] { while (!__atomic_load_n(flag, __ATOMIC_ACQUIRE)) usleep(50); }));
}
API int emu_missing(const char* name) {
  fprintf(stderr, "[emu] %s is not emulated\n", name);
  if (!strncmp(name, "cu", 2) && strncmp(name, "cupy", 4)) return 15;
  fflush(stderr); abort();
}

// ---- devices --------------------------------------------------------------------------------
API E cudaGetDeviceCount(int* n) { *n = 0; if (Global::g_forked) return ret(cudaErrorInitializationError);
  *n = G().ndev; return G().ndev ? cudaSuccess : ret(cudaErrorNoDevice); }
API E cudaSetDevice(int d) { ENTER; if (d < 0 || d >= G().ndev) return ret(cudaErrorInvalidDevice); t_dev = d; return cudaSuccess; }
API E cudaGetDevice(int* d) { ENTER; *d = t_dev; return cudaSuccess; }
API E cudaDriverGetVersion(int* v) { *v = CUDART_VERSION; return cudaSuccess; }
API E cudaRuntimeGetVersion(int* v) { *v = CUDART_VERSION; return cudaSuccess; }
static int attribute(int a) {
  switch (a) {
    case cudaDevAttrComputeCapabilityMajor: return 8; case cudaDevAttrComputeCapabilityMinor: return 0;
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64; case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 49152;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 65536; case cudaDevAttrTotalConstantMemory: return 65536;
    case cudaDevAttrWarpSize: return 32; case cudaDevAttrMultiProcessorCount: return 4;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048; case cudaDevAttrClockRate: return 1000000;
    case cudaDevAttrTextureAlignment: return 512; case cudaDevAttrMaxPitch: return 2147483647;
    case cudaDevAttrUnifiedAddressing: case cudaDevAttrMemoryPoolsSupported: case cudaDevAttrManagedMemory:
    case cudaDevAttrConcurrentKernels: case cudaDevAttrCanMapHostMemory: case cudaDevAttrAsyncEngineCount:
    case cudaDevAttrStreamPrioritiesSupported: case cudaDevAttrHostRegisterSupported: case cudaDevAttrGpuOverlap: return 1;
    case cudaDevAttrPciBusId: return 1; case cudaDevAttrMemoryClockRate: return 1000000; case cudaDevAttrGlobalMemoryBusWidth: return 64;
  } return 0;
}
API E cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int d) { ENTER; if (d < 0 || d >= G().ndev) return ret(cudaErrorInvalidDevice);
  *v = attribute(a); return cudaSuccess; }
API E cudaGetDeviceProperties(cudaDeviceProp* p, int d) {
  ENTER; if (d < 0 || d >= G().ndev) return ret(cudaErrorInvalidDevice);
  memset(p, 0, sizeof *p); snprintf(p->name, sizeof p->name, "CPU emulator %d", d);
  p->totalGlobalMem = G().total; p->major = 8; p->minor = 0; p->warpSize = 32; p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024; p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647; p->maxGridSize[1] = p->maxGridSize[2] = 65535; p->sharedMemPerBlock = 49152;
  p->sharedMemPerMultiprocessor = 65536; p->regsPerBlock = 65536; p->multiProcessorCount = 4; p->maxThreadsPerMultiProcessor = 2048;
  p->unifiedAddressing = p->concurrentKernels = p->managedMemory = p->canMapHostMemory = p->memoryPoolsSupported = 1;
  p->pciBusID = d + 1; p->totalConstMem = 65536; p->textureAlignment = 512; p->asyncEngineCount = 1; return cudaSuccess;
}
API E cudaDeviceGetPCIBusId(char* s, int n, int d) { ENTER; snprintf(s, n, "0000:%02x:00.0", d + 1); return cudaSuccess; }
API E cudaDeviceGetByPCIBusId(int* d, const char* s) { ENTER; unsigned dom, b; if (sscanf(s, "%x:%x", &dom, &b) != 2 || b < 1 || (int)b > G().ndev)
  return ret(cudaErrorInvalidDevice); *d = b - 1; return cudaSuccess; }
API E cudaDeviceCanAccessPeer(int* v, int a, int b) { ENTER; *v = a != b; return cudaSuccess; }
API E cudaDeviceEnablePeerAccess(int, unsigned) { ENTER; return cudaSuccess; }
API E cudaDeviceDisablePeerAccess(int) { ENTER; return cudaSuccess; }
API E cudaDeviceGetLimit(size_t* v, cudaLimit) { ENTER; *v = 1 << 20; return cudaSuccess; }
API E cudaDeviceSetLimit(cudaLimit, size_t) { ENTER; return cudaSuccess; }
API E cudaDeviceReset() { ENTER; return cudaSuccess; }
API E cudaProfilerStart() { return cudaSuccess; }
API E cudaProfilerStop() { return cudaSuccess; }
API E cudaDeviceSynchronize() {
  ENTER; std::vector<TokP> w; { auto& g = G(); Lock l(g.m); bool hit = false;
    for (auto& c : g.caps) for (auto* o : c->streams) if (o->dev == t_dev) { c->invalid = true; hit = true; }
    if (hit) return ret(cudaErrorStreamCaptureUnsupported);
    w = device_toks(t_dev); }
  for (auto& t : w) t->wait();
  return ret(sticky());
}

// ---- memory ---------------------------------------------------------------------------------
static E alloc_sync(void** p, size_t n, cudaMemoryType t) { Lock l(G().m); E e = unsafe_check(); return ret(e ? e : mem_alloc(p, n, t, t != cudaMemoryTypeHost)); }
API E cudaMalloc(void** p, size_t n) { ENTER; return alloc_sync(p, n, cudaMemoryTypeDevice); }
API E cudaMallocManaged(void** p, size_t n, unsigned) { ENTER; return alloc_sync(p, n, cudaMemoryTypeManaged); }
API E cudaHostAlloc(void** p, size_t n, unsigned) { ENTER; return alloc_sync(p, n, cudaMemoryTypeHost); }
API E cudaMallocHost(void** p, size_t n) { ENTER; return alloc_sync(p, n, cudaMemoryTypeHost); }
static E free_sync(void* p, bool device) {
  if (!p) return cudaSuccess;
  std::vector<TokP> w;
  { Lock l(G().m); E e = unsafe_check(); if (e) return ret(e);
    auto it = G().mem.find((char*)p); if (it == G().mem.end()) return ret(cudaErrorInvalidValue);
    w = device_toks(it->second.dev); }
  for (auto& t : w) t->wait();   // cudaFree waits for the device
  Lock l(G().m); return ret(mem_free(p, device));
}
API E cudaFree(void* p) { ENTER; return free_sync(p, true); }
API E cudaFreeHost(void* p) { ENTER; return free_sync(p, false); }
API E cudaHostRegister(void* p, size_t n, unsigned) { ENTER; Lock l(G().m); if (!p || !n) return ret(cudaErrorInvalidValue);
  if (find_mem(p) != G().mem.end()) return ret(cudaErrorHostMemoryAlreadyRegistered);
  G().mem[(char*)p] = Alloc{n, t_dev, cudaMemoryTypeHost, true}; return cudaSuccess; }
API E cudaHostUnregister(void* p) { ENTER; Lock l(G().m); auto it = G().mem.find((char*)p);
  if (it == G().mem.end() || !it->second.registered) return ret(cudaErrorHostMemoryNotRegistered); G().mem.erase(it); return cudaSuccess; }
API E cudaHostGetDevicePointer(void** d, void* h, unsigned) { ENTER; *d = h; return cudaSuccess; }
API E cudaMemGetInfo(size_t* f, size_t* t) { ENTER; Lock l(G().m); *t = G().total; *f = G().total - G().used[t_dev]; return cudaSuccess; }
API E cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  ENTER; Lock l(G().m); memset(a, 0, sizeof *a); auto it = find_mem(p);
  if (it == G().mem.end()) { a->type = cudaMemoryTypeUnregistered; a->device = -2; return cudaSuccess; }
  a->type = it->second.type; a->device = it->second.dev; a->devicePointer = (void*)p;
  a->hostPointer = a->type == cudaMemoryTypeDevice ? nullptr : (void*)p; return cudaSuccess;
}
API E cudaMallocAsync(void** p, size_t n, cudaStream_t h) {
  ENTER; Lock l(G().m); CUstream_st* s; E e = resolve(h, s); if (e || (e = legacy_check(s))) return ret(e);
  if (s->cap) { if (s->cap->invalid) return ret(cudaErrorStreamCaptureInvalidated); add_node(s, cudaGraphNodeTypeMemAlloc, nullptr); }
  return ret(mem_alloc(p, n, cudaMemoryTypeDevice, true));
}
API E cudaMallocFromPoolAsync(void** p, size_t n, cudaMemPool_t, cudaStream_t h) { return cudaMallocAsync(p, n, h); }
API E cudaFreeAsync(void* p, cudaStream_t h) {
  ENTER; if (!p) return cudaSuccess; Lock l(G().m); CUstream_st* s; E e = resolve(h, s); if (e || (e = legacy_check(s))) return ret(e);
  if (s->cap) { if (s->cap->invalid) return ret(cudaErrorStreamCaptureInvalidated); add_node(s, cudaGraphNodeTypeMemFree, nullptr); return cudaSuccess; }
  auto it = G().mem.find((char*)p); if (it == G().mem.end() || it->second.type != cudaMemoryTypeDevice) return ret(cudaErrorInvalidValue);
  size_t n = it->second.size; G().used[it->second.dev] -= n; G().mem.erase(it);   // no longer a valid pointer for later calls
  enqueue(s, [p, n] { Lock l(G().m); release(p, n); }); return cudaSuccess;
}
static char pools[64];
API E cudaDeviceGetDefaultMemPool(cudaMemPool_t* p, int d) { ENTER; *p = (cudaMemPool_t)&pools[d]; return cudaSuccess; }
API E cudaDeviceGetMemPool(cudaMemPool_t* p, int d) { ENTER; *p = (cudaMemPool_t)&pools[d]; return cudaSuccess; }
API E cudaDeviceSetMemPool(int, cudaMemPool_t) { ENTER; return cudaSuccess; }
API E cudaMemPoolCreate(cudaMemPool_t* p, const cudaMemPoolProps*) { ENTER; *p = (cudaMemPool_t)&pools[63]; return cudaSuccess; }
API E cudaMemPoolDestroy(cudaMemPool_t) { ENTER; return cudaSuccess; }
API E cudaMemPoolTrimTo(cudaMemPool_t, size_t) { ENTER; return cudaSuccess; }
API E cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr a, void* v) { ENTER; Lock l(G().m);
  if (a <= cudaMemPoolReuseAllowInternalDependencies) *(int*)v = 1; else *(cuuint64_t*)v = a == cudaMemPoolAttrReleaseThreshold ? 0 : G().used[t_dev];
  return cudaSuccess; }
API E cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { ENTER; return cudaSuccess; }
API E cudaMemPrefetchAsync(const void*, size_t, int, cudaStream_t) { ENTER; return cudaSuccess; }
API E cudaMemAdvise(const void*, size_t, cudaMemoryAdvise, int) { ENTER; return cudaSuccess; }

struct Rect { char* d; size_t dp; const char* s; size_t sp, w, h; };
static void copy_rect(const Rect& r) { if (r.dp == r.w && r.sp == r.w) { memmove(r.d, r.s, r.w * r.h); return; }
  for (size_t i = 0; i < r.h; i++) memmove(r.d + i * r.dp, r.s + i * r.sp, r.w); }
static bool inside(std::map<char*, Alloc>::iterator it, const void* p, size_t n) { return (char*)p + n <= it->first + it->second.size; }
static E copy(Rect r, cudaMemcpyKind k, cudaStream_t h, bool sync) {
  if (!r.w || !r.h) return cudaSuccess;
  if ((int)k < 0 || k > cudaMemcpyDefault) return ret(cudaErrorInvalidMemcpyDirection);
  if (!r.d || !r.s || r.dp < r.w || r.sp < r.w) return ret(cudaErrorInvalidValue);
  size_t dn = (r.h - 1) * r.dp + r.w, sn = (r.h - 1) * r.sp + r.w; TokP tok;
  { Lock l(G().m); auto end = G().mem.end(), di = find_mem(r.d), si = find_mem(r.s);
    if ((di != end && !inside(di, r.d, dn)) || (si != end && !inside(si, r.s, sn))) return ret(cudaErrorInvalidValue);
    bool wd = k == cudaMemcpyHostToDevice || k == cudaMemcpyDeviceToDevice, ws = k == cudaMemcpyDeviceToHost || k == cudaMemcpyDeviceToDevice;
    if ((wd && di == end) || (ws && si == end)) return ret(cudaErrorInvalidValue);
    CUstream_st* s; E e = resolve(h, s); if (e) return ret(e);
    if (sync && ((e = legacy_check(s)) || (e = unsafe_check()))) return ret(e);
    std::shared_ptr<std::vector<char>> stage;
    if (si == end && !s->cap && !sync) {   // pageable source: staged before the call returns, as CUDA does
      stage = std::make_shared<std::vector<char>>(r.s, r.s + sn); r.s = stage->data(); }
    bool back = di == end && !s->cap;      // pageable target: the call returns when the data is there
    if ((e = submit(h, cudaGraphNodeTypeMemcpy, [r, stage] { copy_rect(r); }, &tok))) return ret(e);
    if (!sync && !back) return cudaSuccess; }
  if (tok) tok->wait();
  return ret(sticky());
}
static Rect flat(void* d, const void* s, size_t n) { return Rect{(char*)d, n, (const char*)s, n, n, 1}; }
API E cudaMemcpy(void* d, const void* s, size_t n, cudaMemcpyKind k) { ENTER; return copy(flat(d, s, n), k, nullptr, true); }
API E cudaMemcpyAsync(void* d, const void* s, size_t n, cudaMemcpyKind k, cudaStream_t h) { ENTER; return copy(flat(d, s, n), k, h, false); }
API E cudaMemcpyPeer(void* d, int, const void* s, int, size_t n) { ENTER; return copy(flat(d, s, n), cudaMemcpyDeviceToDevice, nullptr, true); }
API E cudaMemcpyPeerAsync(void* d, int, const void* s, int, size_t n, cudaStream_t h) { ENTER; return copy(flat(d, s, n), cudaMemcpyDeviceToDevice, h, false); }
API E cudaMemcpy2D(void* d, size_t dp, const void* s, size_t sp, size_t w, size_t h, cudaMemcpyKind k) {
  ENTER; return copy(Rect{(char*)d, dp, (const char*)s, sp, w, h}, k, nullptr, true); }
API E cudaMemcpy2DAsync(void* d, size_t dp, const void* s, size_t sp, size_t w, size_t h, cudaMemcpyKind k, cudaStream_t st) {
  ENTER; return copy(Rect{(char*)d, dp, (const char*)s, sp, w, h}, k, st, false); }
static E fill(void* p, int v, size_t n, cudaStream_t h, bool sync) {
  if (!n) return cudaSuccess;
  TokP tok; { Lock l(G().m); auto it = find_mem(p); if (it == G().mem.end() || !inside(it, p, n)) return ret(cudaErrorInvalidValue);
    E e = submit(h, cudaGraphNodeTypeMemset, [=] { memset(p, v, n); }, &tok); if (e) return ret(e); }
  if (sync && tok) tok->wait();
  return cudaSuccess;
}
API E cudaMemset(void* p, int v, size_t n) { ENTER; return fill(p, v, n, nullptr, true); }
API E cudaMemsetAsync(void* p, int v, size_t n, cudaStream_t h) { ENTER; return fill(p, v, n, h, false); }

// ---- streams --------------------------------------------------------------------------------
API E cudaStreamCreateWithPriority(cudaStream_t* p, unsigned f, int prio) {
  ENTER; if (f & ~1u) return ret(cudaErrorInvalidValue);
  Lock l(G().m); auto* s = new CUstream_st; s->dev = t_dev; s->flags = f; s->prio = prio > 0 ? 0 : prio < -5 ? -5 : prio;
  G().streams.insert(s); *p = s; return cudaSuccess;
}
API E cudaStreamCreateWithFlags(cudaStream_t* p, unsigned f) { return cudaStreamCreateWithPriority(p, f, 0); }
API E cudaStreamCreate(cudaStream_t* p) { return cudaStreamCreateWithPriority(p, 0, 0); }
API E cudaDeviceGetStreamPriorityRange(int* lo, int* hi) { ENTER; *lo = 0; *hi = -5; return cudaSuccess; }
API E cudaStreamDestroy(cudaStream_t h) {
  ENTER; Lock l(G().m); if (!G().streams.count(h)) return ret(cudaErrorInvalidResourceHandle);
  if (h->cap) { h->cap->invalid = true; h->cap->streams.erase(h);
    if (h->cap->origin == h) { auto c = h->cap; for (auto* o : c->streams) { o->cap = nullptr; o->front.clear(); }
      for (auto i = G().caps.begin(); i != G().caps.end(); ++i) if (*i == c) { G().caps.erase(i); break; } } }
  G().streams.erase(h);
  if (!h->started) return cudaSuccess;
  { Lock k(h->m); h->stop = true; h->cv.notify_one(); } return cudaSuccess;   // pending work still runs
}
API E cudaStreamGetFlags(cudaStream_t h, unsigned* f) { ENTER; Lock l(G().m); CUstream_st* s; E e = resolve(h, s); if (!e) *f = s->flags; return ret(e); }
API E cudaStreamGetPriority(cudaStream_t h, int* v) { ENTER; Lock l(G().m); CUstream_st* s; E e = resolve(h, s); if (!e) *v = s->prio; return ret(e); }
API E cudaStreamGetDevice(cudaStream_t h, int* v) { ENTER; Lock l(G().m); CUstream_st* s; E e = resolve(h, s); if (!e) *v = s->dev; return ret(e); }
API E cudaStreamGetId(cudaStream_t h, unsigned long long* v) { ENTER; Lock l(G().m); CUstream_st* s; E e = resolve(h, s); if (!e) *v = (unsigned long long)s; return ret(e); }
static E pending(cudaStream_t h, std::vector<TokP>& w) {
  Lock l(G().m); CUstream_st* s; E e = resolve(h, s);
  if (e || (e = legacy_check(s)) || (e = no_capture(s))) return e;
  if (s->last) w.push_back(s->last);
  if (s->legacy) for (auto* o : G().streams) if (o->dev == s->dev && o->blocking() && o->last) w.push_back(o->last);
  return cudaSuccess;
}
API E cudaStreamSynchronize(cudaStream_t h) { ENTER; std::vector<TokP> w; E e = pending(h, w); if (e) return ret(e);
  for (auto& t : w) t->wait(); return ret(sticky()); }
API E cudaStreamQuery(cudaStream_t h) { ENTER; std::vector<TokP> w; E e = pending(h, w); if (e) return ret(e);
  for (auto& t : w) if (!t->ready()) return ret(cudaErrorNotReady); return ret(sticky()); }
API E cudaLaunchHostFunc(cudaStream_t h, cudaHostFn_t f, void* d) { ENTER; Lock l(G().m);
  return ret(submit(h, cudaGraphNodeTypeHost, [=] { t_cb = true; f(d); t_cb = false; })); }
API E cudaStreamAddCallback(cudaStream_t h, cudaStreamCallback_t f, void* d, unsigned) { ENTER; Lock l(G().m);
  CUstream_st* s; E e = resolve(h, s); if (e || (e = no_capture(s))) return ret(e);
  return ret(submit(h, cudaGraphNodeTypeHost, [=] { t_cb = true; f(h, cudaSuccess, d); t_cb = false; })); }

// ---- events ---------------------------------------------------------------------------------
API E cudaEventCreateWithFlags(cudaEvent_t* p, unsigned f) { ENTER; if (f & ~7u) return ret(cudaErrorInvalidValue);
  Lock l(G().m); auto* e = new CUevent_st; e->flags = f; e->dev = t_dev; G().events.insert(e); *p = e; return cudaSuccess; }
API E cudaEventCreate(cudaEvent_t* p) { return cudaEventCreateWithFlags(p, 0); }
#define EVENT(ev) if (!G().events.count(ev)) return ret(cudaErrorInvalidResourceHandle)
API E cudaEventDestroy(cudaEvent_t ev) { ENTER; Lock l(G().m); EVENT(ev); G().events.erase(ev); ev->tok = nullptr; ev->cap = nullptr; ev->nodes.clear(); return cudaSuccess; }
API E cudaEventRecordWithFlags(cudaEvent_t ev, cudaStream_t h, unsigned flags) {
  ENTER; Lock l(G().m); EVENT(ev); CUstream_st* s; E e = resolve(h, s); if (e) return ret(e);
  if (s->dev != ev->dev) return ret(cudaErrorInvalidResourceHandle);
  if ((e = legacy_check(s))) return ret(e);
  if (s->cap) {
    if (s->cap->invalid) return ret(cudaErrorStreamCaptureInvalidated);
    if (flags & cudaEventRecordExternal) {   // a node that records the event whenever the graph runs
      auto t = std::make_shared<Tok>(); t->done = true;
      add_node(s, cudaGraphNodeTypeEventRecord, [t] { t->finish(); }); ev->cap = nullptr; ev->tok = t; return cudaSuccess; }
    ev->cap = s->cap; ev->nodes = s->front; ev->tok = nullptr; return cudaSuccess;
  }
  ev->cap = nullptr; ev->nodes.clear(); ev->tok = enqueue(s, nullptr); return cudaSuccess;
}
API E cudaEventRecord(cudaEvent_t ev, cudaStream_t h) { return cudaEventRecordWithFlags(ev, h, 0); }
static E event_tok(cudaEvent_t ev, TokP& t) {
  Lock l(G().m); EVENT(ev); E e = unsafe_check();
  if (ev->cap) { ev->cap->invalid = true; return ret(cudaErrorCapturedEvent); }
  if (e) return ret(e);
  t = ev->tok; return cudaSuccess;
}
API E cudaEventQuery(cudaEvent_t ev) { ENTER; TokP t; E e = event_tok(ev, t); if (e) return e;
  return ret(!t || t->ready() ? sticky() : cudaErrorNotReady); }
API E cudaEventSynchronize(cudaEvent_t ev) { ENTER; TokP t; E e = event_tok(ev, t); if (e) return e; if (t) t->wait(); return ret(sticky()); }
API E cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  ENTER; TokP x, y; { Lock l(G().m); EVENT(a); EVENT(b);
    if (a->cap || b->cap) return ret(cudaErrorCapturedEvent);
    if (!a->tok || !b->tok || ((a->flags | b->flags) & cudaEventDisableTiming)) return ret(cudaErrorInvalidResourceHandle);
    x = a->tok; y = b->tok; }
  if (!x->ready() || !y->ready()) return ret(cudaErrorNotReady);
  *ms = std::chrono::duration<float, std::milli>(y->t - x->t).count(); return cudaSuccess;
}
API E cudaStreamWaitEvent(cudaStream_t h, cudaEvent_t ev, unsigned) {
  ENTER; Lock l(G().m); EVENT(ev); CUstream_st* s; E e = resolve(h, s); if (e || (e = legacy_check(s))) return ret(e);
  if (s->cap && s->cap->invalid) return ret(cudaErrorStreamCaptureInvalidated);
  if (ev->cap) {
    bool live = false; for (auto& c : G().caps) live |= c == ev->cap;
    if (!live) return ret(cudaErrorCapturedEvent);   // its capture has ended: nothing to wait for
    if (ev->cap->invalid) return ret(cudaErrorStreamCaptureInvalidated);
    if (s->legacy) { ev->cap->invalid = true; return ret(cudaErrorStreamCaptureImplicit); }
    if (s->cap && s->cap != ev->cap) { s->cap->invalid = ev->cap->invalid = true; return ret(cudaErrorStreamCaptureMerge); }
    if (!s->cap) { s->cap = ev->cap; s->cap->streams.insert(s); s->front.clear(); }   // fork
    std::set<Node*> f(s->front.begin(), s->front.end()); for (auto* n : ev->nodes) if (f.insert(n).second) s->front.push_back(n);
    return cudaSuccess;
  }
  if (!ev->tok) return cudaSuccess;
  if (s->cap) { s->cap->invalid = true; return ret(cudaErrorStreamCaptureIsolation); }
  enqueue(s, nullptr, {ev->tok}); return cudaSuccess;
}

// ---- capture and graphs ---------------------------------------------------------------------
API E cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* m) { std::swap(*m, t_mode); return cudaSuccess; }
API E cudaStreamBeginCapture(cudaStream_t h, cudaStreamCaptureMode mode) {
  ENTER; Lock l(G().m); CUstream_st* s; E e = resolve(h, s); if (e) return ret(e);
  if ((int)mode < 0 || mode > cudaStreamCaptureModeRelaxed) return ret(cudaErrorInvalidValue);
  if (s->legacy) return ret(cudaErrorStreamCaptureUnsupported);
  if (s->cap) return ret(cudaErrorIllegalState);
  auto c = std::make_shared<Capture>(); c->id = G().next_cap++; c->mode = mode; c->thread = std::this_thread::get_id(); c->origin = s;
  c->graph = new CUgraph_st; G().graphs.insert(c->graph); c->streams = {s}; s->cap = c; s->front.clear(); G().caps.push_back(c);
  return cudaSuccess;
}
API E cudaStreamEndCapture(cudaStream_t h, cudaGraph_t* out) {
  ENTER; Lock l(G().m); CUstream_st* s; E e = resolve(h, s); if (e) return ret(e); if (out) *out = nullptr;
  CapP c = s->cap; if (!c) return ret(cudaErrorIllegalState);
  if (c->mode != cudaStreamCaptureModeRelaxed && c->thread != std::this_thread::get_id()) return ret(cudaErrorStreamCaptureWrongThread);
  if (c->origin != s) { c->invalid = true; return ret(cudaErrorStreamCaptureUnmatched); }
  e = c->invalid ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
  if (!e) {   // every node must lead to the origin stream
    std::set<Node*> seen; std::vector<Node*> todo = s->front;
    while (!todo.empty()) { Node* n = todo.back(); todo.pop_back(); if (seen.insert(n).second) todo.insert(todo.end(), n->deps.begin(), n->deps.end()); }
    if (seen.size() != c->graph->nodes.size()) e = cudaErrorStreamCaptureUnjoined;
  }
  for (auto* o : c->streams) { o->cap = nullptr; o->front.clear(); }
  for (auto i = G().caps.begin(); i != G().caps.end(); ++i) if (*i == c) { G().caps.erase(i); break; }
  if (e) { G().graphs.erase(c->graph); delete c->graph; return ret(e); }
  if (out) *out = c->graph;
  return cudaSuccess;
}
API E cudaStreamIsCapturing(cudaStream_t h, cudaStreamCaptureStatus* st) {
  ENTER; Lock l(G().m); CUstream_st* s; E e = resolve(h, s); if (e) return ret(e);
  if (s->legacy) { bool hit = false; for (auto& c : G().caps) for (auto* o : c->streams) hit |= o->dev == s->dev && o->blocking();
    *st = cudaStreamCaptureStatusNone; return ret(hit ? cudaErrorStreamCaptureImplicit : cudaSuccess); }   // documented: no invalidation
  *st = !s->cap ? cudaStreamCaptureStatusNone : s->cap->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
API E cudaStreamGetCaptureInfo(cudaStream_t h, cudaStreamCaptureStatus* st, unsigned long long* id, cudaGraph_t* g, const cudaGraphNode_t** deps, size_t* n) {
  E e = cudaStreamIsCapturing(h, st); if (e || *st != cudaStreamCaptureStatusActive) return e;
  Lock l(G().m); if (id) *id = h->cap->id;
  if (g) *g = h->cap->graph;
  if (deps) *deps = h->front.data();
  if (n) *n = h->front.size();
  return cudaSuccess;
}
API E cudaGraphCreate(cudaGraph_t* g, unsigned) { ENTER; Lock l(G().m); *g = new CUgraph_st; G().graphs.insert(*g); return cudaSuccess; }
API E cudaGraphDestroy(cudaGraph_t g) { ENTER; Lock l(G().m); if (!G().graphs.erase(g)) return ret(cudaErrorInvalidValue); delete g; return cudaSuccess; }
API E cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t* v, size_t* n) { ENTER; Lock l(G().m); if (!G().graphs.count(g)) return ret(cudaErrorInvalidValue);
  if (v) for (size_t i = 0; i < *n && i < g->nodes.size(); i++) v[i] = g->nodes[i].get();
  *n = g->nodes.size(); return cudaSuccess; }
API E cudaGraphInstantiate(cudaGraphExec_t* x, cudaGraph_t g, unsigned long long) { ENTER; Lock l(G().m);
  if (!G().graphs.count(g)) return ret(cudaErrorInvalidValue);
  *x = new CUgraphExec_st; (*x)->nodes = g->nodes; G().execs.insert(*x); return cudaSuccess; }
API E cudaGraphInstantiateWithFlags(cudaGraphExec_t* x, cudaGraph_t g, unsigned long long f) { return cudaGraphInstantiate(x, g, f); }
API E cudaGraphExecDestroy(cudaGraphExec_t x) { ENTER; Lock l(G().m); if (!G().execs.erase(x)) return ret(cudaErrorInvalidValue); delete x; return cudaSuccess; }
API E cudaGraphDebugDotPrint(cudaGraph_t g, const char* path, unsigned) { ENTER; Lock l(G().m); if (!G().graphs.count(g)) return ret(cudaErrorInvalidValue);
  std::ofstream o(path); o << "digraph g {\n"; for (auto& n : g->nodes) { o << "n" << n.get() << " [label=\"" << n->type << "\"];\n";
    for (auto* d : n->deps) o << "n" << d << " -> n" << n.get() << ";\n"; } o << "}\n"; return cudaSuccess; }
static void run_nodes(const Nodes& nodes) {   // with a delay set, in a random topological order
  if (!G().delay) { for (auto& n : nodes) if (n->fn && !G().sticky.load()) n->fn(); return; }
  static thread_local std::mt19937 r((unsigned)envl("EMU_SEED", 0) + 17);
  std::vector<Node*> left; for (auto& n : nodes) left.push_back(n.get());
  std::set<Node*> done;
  while (!left.empty()) {
    std::vector<size_t> ok; for (size_t i = 0; i < left.size(); i++) { bool free = true; for (auto* d : left[i]->deps) free &= done.count(d) > 0; if (free) ok.push_back(i); }
    size_t i = ok[r() % ok.size()]; Node* n = left[i]; left.erase(left.begin() + i); delay();
    if (n->fn && !G().sticky.load()) n->fn();
    done.insert(n);
  }
}
API E cudaGraphUpload(cudaGraphExec_t x, cudaStream_t h) { ENTER; Lock l(G().m); if (!G().execs.count(x)) return ret(cudaErrorInvalidValue);
  CUstream_st* s; E e = resolve(h, s); if (e || (e = legacy_check(s)) || (e = no_capture(s))) return ret(e); enqueue(s, nullptr); return cudaSuccess; }
API E cudaGraphLaunch(cudaGraphExec_t x, cudaStream_t h) {
  ENTER; Lock l(G().m); if (!G().execs.count(x)) return ret(cudaErrorInvalidValue);
  CUstream_st* s; E e = resolve(h, s); if (e || (e = legacy_check(s))) return ret(e);
  if ((e = no_capture(s))) return ret(e);
  Nodes nodes = x->nodes; std::vector<TokP> deps; if (x->last) deps.push_back(x->last);   // launches of one exec are ordered
  x->last = enqueue(s, [nodes] { run_nodes(nodes); }, deps); return cudaSuccess;
}

// ---- not emulated ---------------------------------------------------------------------------
extern "C" {
#define NS(decl) __attribute__((visibility("default"))) E decl { return ret(cudaErrorNotSupported); }
NS(cudaIpcCloseMemHandle(void*)) NS(cudaIpcGetEventHandle(cudaIpcEventHandle_t*, cudaEvent_t)) NS(cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*))
NS(cudaIpcOpenEventHandle(cudaEvent_t*, cudaIpcEventHandle_t)) NS(cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned))
NS(cudaMalloc3DArray(cudaArray_t*, const cudaChannelFormatDesc*, cudaExtent, unsigned)) NS(cudaMallocArray(cudaArray_t*, const cudaChannelFormatDesc*, size_t, size_t, unsigned))
NS(cudaFreeArray(cudaArray_t)) NS(cudaMemcpy3D(const cudaMemcpy3DParms*)) NS(cudaMemcpy3DAsync(const cudaMemcpy3DParms*, cudaStream_t))
NS(cudaMemcpy2DFromArray(void*, size_t, cudaArray_const_t, size_t, size_t, size_t, size_t, cudaMemcpyKind))
NS(cudaMemcpy2DFromArrayAsync(void*, size_t, cudaArray_const_t, size_t, size_t, size_t, size_t, cudaMemcpyKind, cudaStream_t))
NS(cudaMemcpy2DToArray(cudaArray_t, size_t, size_t, const void*, size_t, size_t, size_t, cudaMemcpyKind))
NS(cudaMemcpy2DToArrayAsync(cudaArray_t, size_t, size_t, const void*, size_t, size_t, size_t, cudaMemcpyKind, cudaStream_t))
NS(cudaCreateTextureObject(cudaTextureObject_t*, const cudaResourceDesc*, const cudaTextureDesc*, const cudaResourceViewDesc*)) NS(cudaDestroyTextureObject(cudaTextureObject_t))
NS(cudaGetChannelDesc(cudaChannelFormatDesc*, cudaArray_const_t)) NS(cudaGetTextureObjectResourceDesc(cudaResourceDesc*, cudaTextureObject_t))
NS(cudaGetTextureObjectTextureDesc(cudaTextureDesc*, cudaTextureObject_t)) NS(cudaCreateSurfaceObject(cudaSurfaceObject_t*, const cudaResourceDesc*)) NS(cudaDestroySurfaceObject(cudaSurfaceObject_t))
}

// ---- driver API: modules are host shared objects, "EMU1" + length + ELF -----------------------
struct CUfunc_st { void (*launch)(unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void**); std::vector<size_t> sizes; };
struct CUmod_st { void* so; std::map<std::string, CUfunc_st*> fns; };
static CUresult cr(E e) { return e == cudaErrorNotReady ? CUDA_ERROR_NOT_READY : (CUresult)e; }
static char ctxs[64];
#undef cudaErrorSuccess
// What CuPy does not bind and is called by the driver's name; error numbers are the runtime's.
API CUresult cuGraphGetNodes(CUgraph g, CUgraphNode* v, size_t* n) { return (CUresult)cudaGraphGetNodes((cudaGraph_t)g, (cudaGraphNode_t*)v, n); }
API CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* m) { return (CUresult)cudaThreadExchangeStreamCaptureMode((cudaStreamCaptureMode*)m); }
API CUresult cuInit(unsigned) { return cr(gate()); }
API CUresult cuDriverGetVersion(int* v) { *v = CUDA_VERSION; return CUDA_SUCCESS; }
API CUresult cuGetErrorName(CUresult e, const char** s) { *s = cudaGetErrorName((E)e); return CUDA_SUCCESS; }
API CUresult cuGetErrorString(CUresult e, const char** s) { *s = cudaGetErrorString((E)e); return CUDA_SUCCESS; }
API CUresult cuDeviceGet(CUdevice* d, int i) { *d = i; return i < G().ndev ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE; }
API CUresult cuDeviceGetCount(int* n) { *n = G().ndev; return CUDA_SUCCESS; }
API CUresult cuDeviceGetAttribute(int* v, CUdevice_attribute a, CUdevice) { *v = attribute((int)a); return CUDA_SUCCESS; }
API CUresult cuDevicePrimaryCtxRelease(CUdevice) { return CUDA_SUCCESS; }
API CUresult cuDevicePrimaryCtxRetain(CUcontext* c, CUdevice d) { *c = (CUcontext)&ctxs[d]; return CUDA_SUCCESS; }
API CUresult cuCtxGetCurrent(CUcontext* c) { *c = (CUcontext)&ctxs[t_dev]; return CUDA_SUCCESS; }
API CUresult cuCtxSetCurrent(CUcontext c) { if (c) t_dev = (char*)c - ctxs; return CUDA_SUCCESS; }
API CUresult cuCtxCreate(CUcontext* c, unsigned, CUdevice d) { *c = (CUcontext)&ctxs[d]; t_dev = d; return CUDA_SUCCESS; }
API CUresult cuCtxDestroy(CUcontext) { return CUDA_SUCCESS; }
API CUresult cuCtxGetDevice(CUdevice* d) { *d = t_dev; return CUDA_SUCCESS; }
API CUresult cuCtxSynchronize() { return cr(cudaDeviceSynchronize()); }
API CUresult cuStreamGetCtx(CUstream h, CUcontext* c) { int d = 0; E e = cudaStreamGetDevice(h, &d); *c = (CUcontext)&ctxs[d]; return cr(e); }
API CUresult cuModuleLoadData(CUmodule* out, const void* image) {
  E e = gate(); if (e) return cr(e);
  const char* p = (const char*)image; uint64_t n; if (memcmp(p, "EMU1", 4)) return CUDA_ERROR_INVALID_IMAGE; memcpy(&n, p + 4, 8);
  std::string name = temp_template("emukern"); char* path = &name[0]; int fd = mkstemp(path); if (fd < 0) return CUDA_ERROR_UNKNOWN;
  for (uint64_t o = 0; o < n;) { ssize_t k = write(fd, p + 12 + o, n - o); if (k <= 0) { close(fd); unlink(path); return CUDA_ERROR_UNKNOWN; } o += k; }
  close(fd); void* so = dlopen(path, RTLD_NOW | RTLD_LOCAL); if (!so) fprintf(stderr, "[emu] %s\n", dlerror());
  unlink(path); if (!so) return CUDA_ERROR_INVALID_IMAGE;
  auto* m = new CUmod_st; m->so = so; *out = m; return CUDA_SUCCESS;
}
API CUresult cuModuleLoad(CUmodule* out, const char* path) { std::ifstream f(path, std::ios::binary); if (!f) return CUDA_ERROR_FILE_NOT_FOUND;
  std::string s((std::istreambuf_iterator<char>(f)), {}); return s.size() < 12 ? CUDA_ERROR_INVALID_IMAGE : cuModuleLoadData(out, s.data()); }
API CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }   // kept: queued work may still use it
API CUresult cuModuleGetFunction(CUfunction* f, CUmodule m, const char* name) {
  Lock l(G().m); auto& slot = m->fns[name];
  if (!slot) { std::string n(name); void* a = dlsym(m->so, ("emu_launch_" + n).c_str()); auto* s = (size_t(*)(size_t*))dlsym(m->so, ("emu_sizes_" + n).c_str());
    if (!a || !s) { m->fns.erase(name); return CUDA_ERROR_NOT_FOUND; }
    slot = new CUfunc_st; slot->launch = (decltype(slot->launch))a; slot->sizes.resize(s(nullptr)); s(slot->sizes.data()); }
  *f = slot; return CUDA_SUCCESS;
}
API CUresult cuModuleGetGlobal(CUdeviceptr* p, size_t* n, CUmodule m, const char* name) { void* a = dlsym(m->so, name); if (!a) return CUDA_ERROR_NOT_FOUND;
  if (p) *p = (CUdeviceptr)a; if (n) *n = 0; return CUDA_SUCCESS; }
API CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned sh, CUstream h, void** params, void**) {
  if (G().trace) fprintf(stderr, "[emu] cuLaunchKernel\n");
  E e = gate(); if (e) return cr(ret(e));
  if (!gx || !gy || !gz || !bx || !by || !bz || (size_t)bx * by * bz > 1024 || sh > 49152) return CUDA_ERROR_INVALID_VALUE;
  size_t total = 0; for (size_t s : f->sizes) total += (s + 15) & ~15ul;
  auto buf = std::shared_ptr<char>((char*)aligned_alloc(64, (total + 127) & ~63ul), free);   // argument values are taken now
  auto ptr = std::make_shared<std::vector<void*>>(); size_t o = 0;
  for (size_t i = 0; i < f->sizes.size(); i++) { memcpy(buf.get() + o, params[i], f->sizes[i]); ptr->push_back(buf.get() + o); o += (f->sizes[i] + 15) & ~15ul; }
  ptr->push_back(nullptr);
  Lock l(G().m);
  return cr(ret(submit(h, cudaGraphNodeTypeKernel, [=] { (void)buf.get(); f->launch(gx, gy, gz, bx, by, bz, sh, ptr->data()); }, nullptr, true)));
}
API CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned sh, CUstream h, void** p) {
  return cuLaunchKernel(f, gx, gy, gz, bx, by, bz, sh, h, p, nullptr); }
API CUresult cuFuncGetAttribute(int* v, CUfunction_attribute a, CUfunction) { *v = a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0; return CUDA_SUCCESS; }
API CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, CUfunction, int, size_t) { *n = 2; return CUDA_SUCCESS; }
API CUresult cuOccupancyMaxPotentialBlockSize(int* g, int* b, CUfunction, CUoccupancyB2DSize, size_t, int lim) { *g = 8; *b = lim > 0 && lim < 128 ? lim : 128; return CUDA_SUCCESS; }
API CUresult cuLinkCreate(unsigned, CUjit_option*, void**, CUlinkState*) { return CUDA_ERROR_NOT_SUPPORTED; }
API CUresult cuLinkAddData(CUlinkState, CUjitInputType, void*, size_t, const char*, unsigned, CUjit_option*, void**) { return CUDA_ERROR_NOT_SUPPORTED; }
API CUresult cuLinkAddFile(CUlinkState, CUjitInputType, const char*, unsigned, CUjit_option*, void**) { return CUDA_ERROR_NOT_SUPPORTED; }
API CUresult cuLinkComplete(CUlinkState, void**, size_t*) { return CUDA_ERROR_NOT_SUPPORTED; }
API CUresult cuLinkDestroy(CUlinkState) { return CUDA_ERROR_NOT_SUPPORTED; }

// ---- NVRTC: g++ with the shim ---------------------------------------------------------------
struct _nvrtcProgram { std::string src, log, bin; std::vector<std::string> exprs, lowered; std::vector<std::pair<std::string, std::string>> headers; };
API const char* nvrtcGetErrorString(nvrtcResult r) { return r == NVRTC_SUCCESS ? "NVRTC_SUCCESS" : r == NVRTC_ERROR_COMPILATION ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR"; }
API nvrtcResult nvrtcVersion(int* a, int* b) { *a = CUDA_VERSION / 1000; *b = CUDA_VERSION % 1000 / 10; return NVRTC_SUCCESS; }
API nvrtcResult nvrtcGetNumSupportedArchs(int* n) { *n = 1; return NVRTC_SUCCESS; }
API nvrtcResult nvrtcGetSupportedArchs(int* a) { *a = 80; return NVRTC_SUCCESS; }
API nvrtcResult nvrtcCreateProgram(nvrtcProgram* p, const char* src, const char*, int n, const char* const* h, const char* const* names) {
  auto* q = new _nvrtcProgram; q->src = src; for (int i = 0; i < n; i++) q->headers.push_back({names[i], h[i]}); *p = q; return NVRTC_SUCCESS; }
API nvrtcResult nvrtcDestroyProgram(nvrtcProgram* p) { delete *p; *p = nullptr; return NVRTC_SUCCESS; }
API nvrtcResult nvrtcAddNameExpression(nvrtcProgram p, const char* s) { p->exprs.push_back(s); p->lowered.push_back("ne" + std::to_string(p->exprs.size() - 1)); return NVRTC_SUCCESS; }
API nvrtcResult nvrtcGetLoweredName(nvrtcProgram p, const char* s, const char** out) {
  for (size_t i = 0; i < p->exprs.size(); i++) if (p->exprs[i] == s) { *out = p->lowered[i].c_str(); return NVRTC_SUCCESS; } return NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID; }
static std::string slurp(const std::string& f) { std::ifstream i(f, std::ios::binary); return std::string((std::istreambuf_iterator<char>(i)), {}); }
static std::string quote(const std::string& s) { std::string r = "'"; for (char c : s) if (c == '\'') r += "'\\''"; else r += c; return r + "'"; }
API nvrtcResult nvrtcCompileProgram(nvrtcProgram p, int n, const char* const* opts) {
  std::string tdir = temp_template("emunvrtc"); char* dir = &tdir[0]; if (!mkdtemp(dir)) return NVRTC_ERROR_INTERNAL_ERROR;
  std::string d(dir), src = p->src, shim = getenv("EMU_SHIM") ? getenv("EMU_SHIM") : EMU_SHIM_DEFAULT;
  if (src.find_first_not_of(" \t\r\n") == std::string::npos) {   // CuPy's version probe: text, changing with the shim
    struct stat st{}; stat((shim + "/emu_shim.h").c_str(), &st); rmdir(dir);
    p->bin = "// cudaemu 1 shim " + std::to_string(st.st_size) + " " + std::to_string(st.st_mtime) + "\n"; return NVRTC_SUCCESS; }
  bool fibers = src.find("__sync") != std::string::npos || src.find("__shfl") != std::string::npos;
  src = std::regex_replace(src, std::regex("extern\\s+__shared__\\s+(?:__align__\\(\\d+\\)\\s*)?([\\w:<> ]+?)\\s+(\\w+)\\s*\\[\\s*\\]\\s*;"), "$1* $2 = ($1*)emu_smem;");
  std::ostringstream o; o << "#define EMU_FIBERS " << fibers << "\n#include \"emu_shim.h\"\n#line 1\n" << src << "\n";
  std::regex k("extern\\s*\"C\"\\s*(?:\\{\\s*)?(?:[\\w()]+\\s+)*?__global__\\s+(?:__launch_bounds__\\([^)]*\\)\\s*)?void\\s+(?:__launch_bounds__\\([^)]*\\)\\s*)?(\\w+)");
  std::set<std::string> names;
  for (std::sregex_iterator i(src.begin(), src.end(), k), e; i != e; ++i) names.insert((*i)[1]);
  if (src.find("extern \"C\" {") != std::string::npos || src.find("extern \"C\"{") != std::string::npos) {   // a block: take every kernel that is not a template
    std::regex k2("(?:^|[;}\\n])\\s*(?:static\\s+)?__global__\\s+(?:__launch_bounds__\\([^)]*\\)\\s*)?void\\s+(\\w+)");
    for (std::sregex_iterator i(src.begin(), src.end(), k2), e; i != e; ++i) names.insert((*i)[1]); }
  for (auto& s : names) o << "EMU_KERNEL(" << s << ", " << s << ")\n";
  for (size_t i = 0; i < p->exprs.size(); i++) o << "EMU_KERNEL(ne" << i << ", (" << p->exprs[i] << "))\n";
  std::ofstream(d + "/k.cpp") << o.str();
  for (auto& h : p->headers) { std::string path = d + "/" + h.first; for (size_t s = d.size() + 1; (s = path.find('/', s)) != std::string::npos; s++) mkdir(path.substr(0, s).c_str(), 0700); std::ofstream(path) << h.second; }
  std::string cmd = "g++ -x c++ -std=c++17 -O1 -w -fpermissive -fPIC -shared -fvisibility=default -DEMU_DEVICE=1 -I" + quote(shim);
  for (int i = 0; i < n; i++) { std::string s = opts[i]; if (s == "-I" || s == "-D") { cmd += " " + s + quote(opts[++i]); continue; }
    if (s.rfind("-I", 0) == 0 || s.rfind("-D", 0) == 0) cmd += " " + quote(s);
    else if (s.rfind("--include-path=", 0) == 0) cmd += " -I" + quote(s.substr(15)); else if (s.rfind("--define-macro=", 0) == 0) cmd += " -D" + quote(s.substr(15)); }
  cmd += " -I" + quote(d) + " -I" + quote(shim + "/../include") + " -o " + quote(d + "/k.so") + " " + quote(d + "/k.cpp") + " > " + quote(d + "/log") + " 2>&1";
  int rc = system(cmd.c_str()); p->log = slurp(d + "/log");
  if (rc == 0) { std::string b = slurp(d + "/k.so"); uint64_t len = b.size(); p->bin = std::string("EMU1") + std::string((char*)&len, 8) + b; }
  if (rc != 0 && getenv("EMU_KEEP")) fprintf(stderr, "[emu] kept %s\n", dir); else if (system(("rm -rf " + quote(d)).c_str())) {}
  return rc == 0 ? NVRTC_SUCCESS : NVRTC_ERROR_COMPILATION;
}
API nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram p, size_t* n) { *n = p->log.size() + 1; return NVRTC_SUCCESS; }
API nvrtcResult nvrtcGetProgramLog(nvrtcProgram p, char* s) { memcpy(s, p->log.c_str(), p->log.size() + 1); return NVRTC_SUCCESS; }
API nvrtcResult nvrtcGetPTXSize(nvrtcProgram p, size_t* n) { *n = p->bin.size(); return NVRTC_SUCCESS; }
API nvrtcResult nvrtcGetPTX(nvrtcProgram p, char* s) { memcpy(s, p->bin.data(), p->bin.size()); return NVRTC_SUCCESS; }
API nvrtcResult nvrtcGetCUBINSize(nvrtcProgram p, size_t* n) { *n = p->bin.size(); return NVRTC_SUCCESS; }
API nvrtcResult nvrtcGetCUBIN(nvrtcProgram p, char* s) { memcpy(s, p->bin.data(), p->bin.size()); return NVRTC_SUCCESS; }
API nvrtcResult nvrtcGetLTOIRSize(nvrtcProgram, size_t*) { return NVRTC_ERROR_INVALID_INPUT; }
API nvrtcResult nvrtcGetLTOIR(nvrtcProgram, char*) { return NVRTC_ERROR_INVALID_INPUT; }

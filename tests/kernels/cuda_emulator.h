// SPDX-License-Identifier: Apache-2.0
// Stands in for vllm/utils/sm90.cu and wgmma<N>: the same functions on a CPU. Each thread of a
// cluster is a fiber; warps run in random order, each until it has to wait.
//
// What runs beside a thread on the card lands late here, or now and then at once: copies when
// they are waited for or at a random time before the arrival tied to them, bulk copies and sums
// sent at a random time, products (wgmma) when they are waited for; memory is read when they
// land. Not modelled: fences, the order in which other threads see plain stores, registers,
// launches that overlap, and the tensor cores' rounding of sums.
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>
using std::max;
using std::min;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define __device__
#define __global__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define __shared__ static __attribute__((section("block_shared")))  // so that it can be filled with NaN
extern "C" __attribute__((weak, visibility("hidden"))) u8 __start_block_shared[], __stop_block_shared[];
struct int4 { int x, y, z, w; };
struct uint4 { u32 x, y, z, w; };
struct float4 { float x, y, z, w; };
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// ---- threads and their order -----------------------------------------------------

struct Place { u32 x, y; };
struct Barrier { int expected, pending; long bytes; u64 phase; };
struct Meeting { int count, of; u64 turn; };
struct Product { u32 a[32][4]; float* sums[32]; int lanes, columns, accumulate; u64 tokens; long group; };
struct Warp {
  Meeting meeting;
  const char* what;
  u32 words[2][32][6];
  std::deque<Product> products;  // under way
  long first;                    // the number of the foremost
};
struct Block {
  Place index;
  u8* memory;
  int running;
  std::map<u32, Barrier> barriers;
  Meeting meetings[16];
  std::vector<Warp> warps;
  std::vector<std::vector<u64>> issued;  // of each warpgroup: its products' operands
};
struct Copy { u32 to; const u8* from; int bytes; long group; };  // no bytes: an arrival at barrier `to`
struct Flight { Block* block; u32 to; const u8* from; float value[4]; int bytes; u32 barrier; };
struct Fiber {
  ucontext_t start;
  jmp_buf at;
  bool begun, done;
  Place tid;
  Block* block;
  Warp* warp;
  const char* waits;
  std::deque<Copy> copies;
  long copy_groups, products, product_groups;
  u64 cluster_turn;
};
static std::vector<Fiber*> fibers;
static std::vector<Block> blocks_running;
static std::vector<Flight> flights;
static std::vector<std::pair<const u8*, u64>> tensors;
static Fiber* self;
static Place blockIdx, gridDim;
static int block_threads, shared_bytes;
static Meeting cluster_meeting;
static jmp_buf scheduler;
static char error[512];
static long progress;
static u64 random_state;
#define threadIdx (self->tid)

static u32 chance(u32 of) {  // 0 to of - 1
  random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
  return (u32)(random_state >> 33) % of;
}
__attribute__((noinline)) static void leave() { if (!_setjmp(self->at)) _longjmp(scheduler, 1); }
__attribute__((noinline)) static void enter(Fiber* fiber) {
  self = fiber;
  blockIdx = fiber->block->index;
  if (_setjmp(scheduler)) return;
  if (fiber->begun) _longjmp(fiber->at, 1);
  fiber->begun = true;
  setcontext(&fiber->start);
}
__attribute__((format(printf, 1, 2))) static void fail(const char* text, ...) {
  int n = snprintf(error, sizeof error, "block (%u, %u), thread %u: ", blockIdx.x, blockIdx.y, self->tid.x);
  va_list arguments;
  va_start(arguments, text);
  vsnprintf(error + n, sizeof error - n, text, arguments);
  va_end(arguments);
  for (;;) leave();
}
static void land_some();
static void sleep_once() { leave(); land_some(); }
template <class Ready> static void wait_until(const char* what, Ready ready) {
  if (!chance(16)) sleep_once();
  while (!ready()) {
    self->waits = what;
    sleep_once();
  }
  progress++;
}
static void meet(Meeting& meeting, int of, const char* what) {
  if (meeting.count && meeting.of != of) fail("%s: %d threads, another says %d", what, of, meeting.of);
  const u64 turn = meeting.turn;
  meeting.of = of;
  if (++meeting.count == of) meeting.count = 0, meeting.turn++, progress++;
  else wait_until(what, [&] { return meeting.turn != turn; });
}
static void __syncthreads() { meet(self->block->meetings[0], block_threads, "__syncthreads"); }
template <int COUNT>
void warps_meet(int barrier) { meet(self->block->meetings[barrier & 15], COUNT, "a named barrier"); }
static void cluster_arrive() {
  self->cluster_turn = cluster_meeting.turn;
  if (++cluster_meeting.count == (int)(blocks_running.size() * block_threads))
    cluster_meeting.count = 0, cluster_meeting.turn++;
}
static void cluster_wait() { wait_until("the cluster", [] { return cluster_meeting.turn != self->cluster_turn; }); }
// All lanes give some words and get those of all. Two sets in turn: a lane may be one exchange ahead.
static const u32 (&exchange(const char* what, u32 mask, const void* words, int bytes))[32][6] {
  Warp& warp = *self->warp;
  if (mask != ~0u) fail("%s of some lanes only", what);
  if (warp.meeting.count == 0) warp.what = what;
  if (strcmp(warp.what, what)) fail("%s, while other lanes of its warp are at %s", what, warp.what);
  auto& all = warp.words[warp.meeting.turn & 1];
  memcpy(all[threadIdx.x & 31], words, bytes);
  meet(warp.meeting, 32, what);
  return all;
}
template <class T> T __shfl_sync(u32 mask, T value, int lane) {
  memcpy(&value, exchange("a shuffle", mask, &value, sizeof value)[lane & 31], sizeof value);
  return value;
}
template <class T>
T __shfl_xor_sync(u32 mask, T value, int bits) { return __shfl_sync(mask, value, (threadIdx.x & 31) ^ bits); }
template <class T> T __shfl_up_sync(u32 mask, T value, u32 by) {
  const u32 lane = threadIdx.x & 31;
  return __shfl_sync(mask, value, lane >= by ? lane - by : lane);
}
static u32 __ballot_sync(u32 mask, int set) {
  auto& all = exchange("a ballot", mask, &set, 4);
  u32 bits = 0;
  for (int i = 0; i < 32; i++) bits |= (u32)(all[i][0] != 0) << i;
  return bits;
}
static void __syncwarp() { exchange("__syncwarp", ~0u, &progress, 0); }
static int atomicAdd(int* p, int value) { return std::exchange(*p, *p + value); }
static void __trap() { fail("__trap"); }

// ---- arithmetic ------------------------------------------------------------------

template <class To, class From> To bits_as(From x) { To y; memcpy(&y, &x, sizeof y); return y; }
static float __int_as_float(int x) { return bits_as<float>(x); }
static float __uint_as_float(u32 x) { return bits_as<float>(x); }
static int __float_as_int(float x) { return bits_as<int>(x); }
static int __popc(u32 x) { return __builtin_popcount(x); }
static float low(u32 pair) { return __uint_as_float(pair << 16); }
static float high(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }
static u32 to_bf16(float x) {  // to the nearest, ties to even
  const u32 bits = bits_as<u32>(x);
  return x != x ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
static u32 pack_bf16(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }
static u32 scaled(u32 pair, u32 scale) { return pack_bf16(low(pair) * low(scale), high(pair) * high(scale)); }
static u32 scaled_here(u32 pair, u32 scale) { return scaled(pair, scale); }
static u32 twice_low(u32 x) { return (x & 0xFFFF) * 0x10001u; }
static u32 twice_high(u32 x) { return (x >> 16) * 0x10001u; }
template <int BITS> u32 rotated_right(u32 w) { return w >> BITS | w << (32 - BITS); }
static u32 bytes_of(u32 low, u32 high, u32 order) {
  const u64 bytes = (u64)high << 32 | low;
  u32 out = 0;
  for (int i = 0; i < 4; i++) out |= (u32)(bytes >> 8 * (order >> 4 * i & 7) & 255) << 8 * i;
  return out;
}
static u32 __byte_perm(u32 low, u32 high, u32 order) { return bytes_of(low, high, order); }
static float exp2_fast(float x) { return exp2f(x); }
static float reciprocal(float x) { return 1 / x; }
static u32 once(u32 x) { return x; }
template <int BYTES> const u8* ahead(const u8* from, u32 n) { return from + (u64)n * BYTES; }

// ---- shared memory, barriers in it, copies ----------------------------------------

// Where dynamic shared memory begins: no more than 16 bytes of alignment are promised.
static const u32 BASE = 1024 + 16;
static void* dynamic_shared() { return self->block->memory; }
static u32 shared_address(const void* p) { return (u32)((const u8*)p - self->block->memory) + BASE; }
static u8* shared_at(const Block& block, u32 at, int bytes, int alignment) {
  if (at < BASE || (u64)at + bytes > BASE + (u64)shared_bytes)
    fail("%d bytes at %d of %d bytes of shared memory", bytes, (int)(at - BASE), shared_bytes);
  if (at % alignment) fail("shared address %u is not a multiple of %d", at, alignment);
  return block.memory + (at - BASE);
}
static u8* here(u32 at, int bytes) { return shared_at(*self->block, at, bytes, bytes); }
static void load16(u32 (&r)[4], u32 from) { memcpy(r, here(from, 16), 16); }
static u32 load4(u32 from) { return *(u32*)here(from, 4); }
static float load_float(u32 from) { return *(float*)here(from, 4); }
static void store(u32 to, const void* from, int bytes) { memcpy(here(to, bytes), from, bytes); }
static void store4(u32 to, u32 value) { store(to, &value, 4); }
static void store_float(u32 to, float value) { store(to, &value, 4); }
static void store_floats(u32 to, const float* v) { store(to, v, 16); }

static Barrier& barrier_at(Block& block, u32 at) {
  auto found = block.barriers.find(at);
  if (found == block.barriers.end()) fail("no barrier was initialised at %d", (int)(at - BASE));
  return found->second;
}
// A phase ends when no arrival and no byte is outstanding.
static void count_down(Block& block, u32 at, int arrivals, long bytes) {
  Barrier& barrier = barrier_at(block, at);
  barrier.pending -= arrivals;
  barrier.bytes += bytes;
  if (barrier.pending < 0) fail("the barrier at %d has too many arrivals", (int)(at - BASE));
  if (barrier.pending == 0 && barrier.bytes == 0) barrier.pending = barrier.expected, barrier.phase++;
  progress++;
}
static void barrier_init(u32 at, int count) {
  here(at, 8);
  self->block->barriers[at] = {count, count, 0, 0};
}
static void barrier_arrive(u32 at) { count_down(*self->block, at, 1, 0); }
static void barrier_arrive_expect(u32 at, int bytes) { count_down(*self->block, at, 1, bytes); }
static void barrier_wait(u32 at, u32 parity) {  // until the phase of this parity has ended
  wait_until("a barrier in shared memory", [&] { return (barrier_at(*self->block, at).phase & 1) != parity; });
}

static void land_copies(size_t count) {
  for (; count; count--) {
    const Copy copy = self->copies.front();
    self->copies.pop_front();
    if (copy.bytes) store(copy.to, copy.from, copy.bytes);
    else barrier_arrive(copy.to);
  }
}
static void land_some() {
  auto& copies = self->copies;
  auto tied = std::find_if(copies.begin(), copies.end(), [](const Copy& copy) { return !copy.bytes; });
  if (tied != copies.end() && !chance(4)) land_copies(tied - copies.begin() + 1);
  else if (!chance(64)) land_copies(copies.size());
  if (flights.empty() || chance(64)) return;
  std::swap(flights[chance(flights.size())], flights.back());
  const Flight flight = flights.back();
  flights.pop_back();
  if (!flight.block->running) fail("a copy comes to a block that has ended");
  const void* from = flight.from ? flight.from : (const void*)flight.value;
  memcpy(shared_at(*flight.block, flight.to, flight.bytes, 16), from, flight.bytes);
  count_down(*flight.block, flight.barrier, 0, -flight.bytes);
}
static void check_source(const void* from, int bytes, int alignment) {
  if ((u64)from % alignment) fail("a copy from an address that is not a multiple of %d", alignment);
  for (auto& tensor : tensors)
    if (from >= tensor.first && (const u8*)from + bytes <= tensor.first + tensor.second) return;
  fail("a copy of %d bytes from outside of all tensors", bytes);
}
static void copy(u32 to, const void* from, int bytes) {
  check_source(from, bytes, bytes);
  here(to, bytes);
  self->copies.push_back({to, (const u8*)from, bytes, self->copy_groups});
  if (!chance(64)) land_copies(self->copies.size());
}
static void copy16(u32 to, const void* from) { copy(to, from, 16); }
static void copy4(u32 to, const void* from) { copy(to, from, 4); }
static void copies_commit() { self->copy_groups++; }
template <int LEFT> void copies_wait() {
  while (!self->copies.empty() && self->copies.front().group < self->copy_groups - LEFT) land_copies(1);
}
static void copies_wait_all() { land_copies(self->copies.size()); }
static void barrier_arrive_after_copies(u32 at) { self->copies.push_back({at, nullptr, 0, self->copy_groups}); }
static void copy_bulk(u32 to, const void* from, int bytes, u32 barrier) {
  if (bytes <= 0 || bytes % 16) fail("a bulk copy of %d bytes", bytes);
  check_source(from, bytes, 16);
  flights.push_back({self->block, to, (const u8*)from, {}, bytes, barrier});
}
static void send(u32 at, u32 barrier, u32 rank, const float* v) {
  if (rank >= blocks_running.size()) fail("sums sent to block %u of a cluster of %zu", rank, blocks_running.size());
  flights.push_back({&blocks_running[rank], at, nullptr, {v[0], v[1], v[2], v[3]}, 16, barrier});
}

// ---- products --------------------------------------------------------------------

// Fragments of m16n8k16, and of each warp of m64nNk16 (PTX ISA, "Matrix Fragments"): lane 4 g + t has
// in register i of the first operand row g + 8 (i & 1), columns 2 t + 8 (i >> 1) and the next; of
// eight columns of sums, i being 0 to 3, row g + 8 (i >> 1), column 2 t + (i & 1).
static void rows_of(float (&rows)[16][16], const u32* a, int lane) {
  for (int i = 0; i < 4; i++) {
    float* to = &rows[(lane >> 2) + 8 * (i & 1)][2 * (lane & 3) + 8 * (i >> 1)];
    to[0] = low(a[i]), to[1] = high(a[i]);
  }
}
static void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const u32 words[6] = {a[0], a[1], a[2], a[3], b0, b1};
  auto& all = exchange("mma.sync", ~0u, words, sizeof words);
  float rows[16][16];
  for (int lane = 0; lane < 32; lane++) rows_of(rows, all[lane], lane);
  const int g = threadIdx.x >> 2 & 7, t = threadIdx.x & 3;
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 16; k++) {  // lane 4 n + t has columns n of rows 2 t, 2 t + 1, and 8 further
      const u32 pair = all[(2 * t + (i & 1)) * 4 + k / 2 % 4][4 + k / 8];
      c[i] += rows[g + 8 * (i >> 1)][k] * (k & 1 ? high(pair) : low(pair));
    }
}
static u64 descriptor(u32 low) { return (u64)0x40000040u << 32 | low; }
static void land_product(Product& product) {
  const u32 tokens = (u32)(product.tokens & 0x3FFF) << 4;
  float rows[16][16], columns[16][256], sums[16][256];
  for (int n = 0; n < product.columns; n++)
    for (int k = 0; k < 16; k += 8) {
      // Eight rows of 128 bytes every 1024. The swizzle: bits 7 to 9 of an address are added (xor) to 4 to 6.
      u32 at = tokens + n / 8 * 1024 + n % 8 * 128 + k * 2, pairs[4];
      load16(pairs, at ^ (at >> 7 & 7) << 4);
      for (int i = 0; i < 8; i++) columns[k + i][n] = i & 1 ? high(pairs[i / 2]) : low(pairs[i / 2]);
    }
  for (int lane = 0; lane < 32; lane++) rows_of(rows, product.a[lane], lane);
  auto each = [&](auto act) {
    for (int lane = 0; lane < 32; lane++)
      for (int i = 0; i < product.columns / 2; i++)
        act(product.sums[lane][i], sums[(lane >> 2) + 8 * (i >> 1 & 1)][i / 4 * 8 + 2 * (lane & 3) + (i & 1)]);
  };
  each([&](float& held, float& sum) { sum = product.accumulate ? held : 0.0f; });
  for (int row = 0; row < 16; row++)
    for (int k = 0; k < 16; k++)
      for (int n = 0; n < product.columns; n++) sums[row][n] += rows[row][k] * columns[k][n];
  each([&](float& held, float& sum) { held = sum; });
}
static void land_products(long before_group) {  // in order, as far as all lanes have issued them
  for (Warp& warp = *self->warp; !warp.products.empty(); warp.products.pop_front(), warp.first++) {
    if (warp.products.front().group >= before_group || warp.products.front().lanes < 32) return;
    land_product(warp.products.front());
    progress++;
  }
}
template <int N> void wgmma(float (&d)[N / 2], const u32 (&a)[4], u64 tokens, int accumulate) {
  // Bits: 0-13 address, 16-29 leading offset (unused here, 1), 32-45 the 1024 bytes between eights,
  // 49-51 base offset 0: the tile begins at a multiple of 1024; 62-63 the 128-byte swizzle.
  if (tokens >> 32 != 0x40000040u || (tokens >> 14 & 0x3FFFF) != 4 || ((tokens << 4) & 1023) > 96)
    fail("wgmma's descriptor %llx is not that of a tile of tokens", tokens);
  const long number = self->products++;
  auto& issued = self->block->issued[threadIdx.x >> 7];
  const u64 operands = tokens << 10 | N << 1 | (accumulate != 0);
  if (number == (long)issued.size()) issued.push_back(operands);
  if (issued[number] != operands) fail("wgmma differs within a warpgroup");
  Warp& warp = *self->warp;
  if (number - warp.first == (long)warp.products.size())
    warp.products.push_back({{}, {}, 0, N, accumulate, tokens, self->product_groups});
  Product& product = warp.products[number - warp.first];
  memcpy(product.a[threadIdx.x & 31], a, 16);
  product.sums[threadIdx.x & 31] = d;
  if (++product.lanes == 32 && chance(2)) land_products(product.group + 1);
}
static void products_begin() {}
static void products_commit() { self->product_groups++; }
template <int LEFT> void products_wait() {
  const long before = self->product_groups - LEFT;
  wait_until("its warp's products", [&] {
    land_products(before);
    return self->warp->products.empty() || self->warp->products.front().group >= before;
  });
}

// ---- nothing on a CPU --------------------------------------------------------------

static void publish() {} static void publish_shared() {} static void barriers_publish() {}
static void results_wait() {} static void next_may_start() {}
template <int LEFT> void registers_give() {}
template <int HELD> void registers_take() {}

// ---- a launch ----------------------------------------------------------------------

static void (*thread_body)();
static void fiber_body() {
  for (;;) {
    thread_body();
    if (!self->copies.empty()) fail("ended with copies under way");
    if (!self->warp->products.empty()) fail("ended with products under way");
    self->done = true;
    self->block->running--;
    progress++;
    leave();
  }
}
static const char* run_cluster(int warps) {
  std::vector<u64> wakes(warps);  // not run before
  for (int i = 0; i < warps && blocks_running.size() > 1; i++)  // blocks of a cluster start apart
    wakes[i] = i % (block_threads / 32) ? wakes[i - 1] : chance(2) * chance(1000) * warps;
  long idle = 0, seen = 0;
  for (u64 now = 0; !error[0]; now++) {
    bool all_done = true;
    for (auto& block : blocks_running) all_done &= block.running == 0;
    if (all_done) return nullptr;
    const u32 warp = chance(warps);
    if (wakes[warp] > now) continue;
    if (!chance(32)) wakes[warp] = now + chance(20 * warps);  // others get far ahead of it
    const u32 first = chance(32);
    for (u32 i = 0; i < 32 && !error[0]; i++) {
      Fiber* fiber = fibers[warp * 32 + (first + i) % 32];
      if (!fiber->done) enter(fiber);
    }
    if (progress != seen) idle = 0;
    seen = progress;
    if (++idle < 5000L * warps) continue;
    std::map<std::string, int> waiting;
    for (int i = 0; i < warps * 32; i++)
      if (!fibers[i]->done) waiting[fibers[i]->waits]++;
    std::string text = "no progress:";
    for (auto& [what, count] : waiting) text += " " + std::to_string(count) + " threads wait for " + what + ";";
    const Place at = blocks_running[0].index;
    snprintf(error, sizeof error, "block (%u, %u): %s", at.x, at.y, text.c_str());
  }
  return error;
}
static const char* launch(const int* shape, u32 seed, const u64* ranges, int count, void (*body)()) {
  const int gx = shape[0], gy = shape[1], cluster = shape[4], guard = 4096;
  block_threads = shape[2], shared_bytes = shape[3], thread_body = body, gridDim = {(u32)gx, (u32)gy};
  random_state = seed, error[0] = 0, tensors.clear();
  for (int i = 0; i < count; i++) tensors.push_back({(const u8*)ranges[2 * i], ranges[2 * i + 1]});
  const int threads = block_threads * cluster, bytes = 16 + shared_bytes + guard;
  while ((int)fibers.size() < threads) {
    auto* fiber = new Fiber();
    getcontext(&fiber->start);
    fiber->start.uc_stack.ss_size = 1 << 17;
    fiber->start.uc_stack.ss_sp = malloc(1 << 17);
    makecontext(&fiber->start, fiber_body, 0);
    fibers.push_back(fiber);
  }
  std::vector<u8*> memory;
  for (int i = 0; i < cluster; i++) memory.push_back((u8*)aligned_alloc(1024, (bytes + 1023) / 1024 * 1024));
  const char* result = nullptr;
  for (int b = 0; b < gx * gy / cluster && !result; b++) {
    blocks_running = std::vector<Block>(cluster);
    flights.clear(), cluster_meeting = {};
    if (__start_block_shared) memset(__start_block_shared, 0xff, __stop_block_shared - __start_block_shared);
    for (int i = 0; i < threads; i++) {
      Block& block = blocks_running[i / block_threads];
      if (i % block_threads == 0) {
        block.index = {(u32)(b % gx), (u32)(b / gx * cluster + i / block_threads)};
        block.memory = (u8*)memset(memory[i / block_threads], 0xff, bytes) + 16;
        block.running = block_threads;
        block.warps = std::vector<Warp>(block_threads / 32);
        block.issued.resize((block_threads + 127) / 128);
      }
      Fiber& f = *fibers[i];
      f.done = false, f.tid = {(u32)(i % block_threads), 0}, f.block = &block, f.waits = "its turn";
      f.warp = &block.warps[i % block_threads / 32];
      f.copy_groups = f.products = f.product_groups = 0;
    }
    result = run_cluster(threads / 32);
    for (auto& block : blocks_running)
      for (int i = 0; i < guard && !result; i++)
        if (block.memory[shared_bytes + i] != 0xff) result = "a plain store went past the end of shared memory";
    if (!result && !flights.empty()) result = "a copy comes to a block that has ended";
  }
  for (u8* m : memory) free(m);
  if (result) fibers.clear();  // stopped where they were; their stacks stay behind
  return result;
}
static void** launch_arguments;
template <class... A, size_t... I>
void call(void (*kernel)(A...), std::index_sequence<I...>) { kernel(*(std::remove_cv_t<A>*)launch_arguments[I]...); }
template <class... A> void call(void (*kernel)(A...)) { call(kernel, std::index_sequence_for<A...>()); }
#define EMULATE(kernel)                                                                                          \
  extern "C" __attribute__((visibility("default"))) const char* emulate(const int* shape, u32 seed,             \
                                                                        const u64* ranges, int count, void** a) { \
    launch_arguments = a;                                                                                        \
    return launch(shape, seed, ranges, count, [] { call(kernel); });                                             \
  }

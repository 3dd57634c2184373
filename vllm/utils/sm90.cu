// SPDX-License-Identifier: Apache-2.0
// All that kernels for SM90 say in PTX, one instruction a function: a kernel's own file has none,
// and whoever puts other text in place of this one, and of wgmma<N>, runs it elsewhere.
// `source` in nvrtc.py puts it in front of a kernel's text, and wgmma<N> behind it.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// ---- arithmetic ----------------------------------------------------------------

__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  u32 out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
__device__ __forceinline__ u32 scaled(u32 pair, u32 scale) {  // both bf16x2
  u32 out;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(pair), "r"(scale));
  return out;
}
// The same, where it stands: the compiler does not move it past a wait.
__device__ __forceinline__ u32 scaled_here(u32 pair, u32 scale) {
  u32 out;
  asm volatile("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(pair), "r"(scale));
  return out;
}
__device__ __forceinline__ u32 twice_low(u32 x) {
  u32 y;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l};}" : "=r"(y) : "r"(x));
  return y;
}
__device__ __forceinline__ u32 twice_high(u32 x) {
  u32 y;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h};}" : "=r"(y) : "r"(x));
  return y;
}
template <int BITS>
__device__ __forceinline__ u32 rotated_right(u32 w) {
  u32 out;
  asm("shf.r.wrap.b32 %0, %1, %1, %2;" : "=r"(out) : "r"(w), "n"(BITS));
  return out;
}
// Four bytes of eight, one for each hexadecimal digit of `order`.
__device__ __forceinline__ u32 bytes_of(u32 low, u32 high, u32 order) {
  u32 out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "r"(order));
  return out;
}
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// A value that is made here and kept, and an address `n` times BYTES ahead in one operation.
__device__ __forceinline__ u32 once(u32 x) {
  u32 y;
  asm volatile("mov.b32 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
template <int BYTES>
__device__ __forceinline__ const u8* ahead(const u8* from, u32 n) {
  u64 to;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(to) : "r"(n), "n"(BYTES), "l"(from));
  return (const u8*)to;
}

// ---- products ------------------------------------------------------------------

// Of one warp: c += a b, 16 x 8 x 16.
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
               "{%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// The products of a warpgroup run beside what follows, until they are waited for.
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
// Descriptor of a tile of tokens: rows of 128 bytes in the 128-byte swizzle, eight rows every
// 1024 bytes. `low` is its lower word, the address in units of 16 bytes included.
__device__ __forceinline__ u64 descriptor(u32 low) {
  u64 d;
  asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(low), "r"(0x40000040u));
  return d;
}

// ---- shared memory -------------------------------------------------------------

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void load16(u32 (&r)[4], u32 from) {
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from));
}
__device__ __forceinline__ u32 load4(u32 from) {
  u32 r;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(r) : "r"(from));
  return r;
}
__device__ __forceinline__ float load_float(u32 from) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(from));
  return v;
}
__device__ __forceinline__ void store4(u32 to, u32 value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}
__device__ __forceinline__ void store_float(u32 to, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}
__device__ __forceinline__ void store_floats(u32 to, const float* v) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
               : "memory");
}
// What this thread wrote, or waited for, is seen by wgmma and by bulk copies from here on.
__device__ __forceinline__ void publish() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ __forceinline__ void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- copies --------------------------------------------------------------------

__device__ __forceinline__ void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy4(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
__device__ __forceinline__ void copies_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
__device__ __forceinline__ void copy_bulk(u32 to, const void* from, int bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
// To where `at` and `barrier` lie in this block's shared memory, in block `rank` of the cluster.
__device__ __forceinline__ void send(u32 at, u32 barrier, u32 rank, const float* v) {
  asm volatile(
      "{\n.reg .b32 to, there;\nmapa.shared::cluster.u32 to, %0, %2;\nmapa.shared::cluster.u32 there, %1, %2;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [to], {%3,%4,%5,%6}, [there];\n}" ::"r"(at),
      "r"(barrier), "r"(rank), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
}

// ---- barriers in shared memory -------------------------------------------------

__device__ __forceinline__ void barrier_init(u32 at, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}
__device__ __forceinline__ void barriers_publish() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 at) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}
__device__ __forceinline__ void barrier_arrive_expect(u32 at, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive_after_copies(u32 at) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 at, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(at), "r"(parity) : "memory");
}

// ---- threads, blocks and launches ----------------------------------------------

template <int COUNT>
__device__ __forceinline__ void warps_meet(int barrier) {  // 1 to 15; 0 is __syncthreads
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(COUNT) : "memory");
}
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void registers_give() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LEFT));
}
template <int HELD>
__device__ __forceinline__ void registers_take() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(HELD));
}
// Programmatic dependent launch: a kernel may start while the one before still runs.
// It reads that one's results only after `results_wait`.
__device__ __forceinline__ void results_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void next_may_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

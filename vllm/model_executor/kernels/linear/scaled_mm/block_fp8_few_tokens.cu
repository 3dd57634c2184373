// SPDX-License-Identifier: Apache-2.0
// Block-scaled FP8 weights times few BF16 tokens for SM90, weight-only. Compiled at run
// time by NVRTC, once for each width TOKENS; behind vllm/utils/sm90.cu.
//
// A block multiplies 128 rows with all tokens over a share of the columns: two warpgroups,
// 64 rows each. Weights are the first operand of the tensor cores: a lane reads 16 codes of
// two rows straight into registers, AHEAD blocks of 128 columns before they are due, and
// widens them there. Tokens are the second operand, from shared memory: all of the share,
// brought there first; or (RING) four blocks of columns in turn, each by a warp that does
// nothing else. (The fence between writing tokens and multiplying them waits for all that a
// thread is reading, so a warp that reads weights ahead cannot bring tokens as well.) The
// blocks of a cluster have the shares of one row group and add them up from each other's
// shared memory, in order.

#define WARPS 8
#define COPIERS (RING ? 4 : 0)
#define THREADS ((WARPS + COPIERS) * 32)
// With copiers a thread has 168 registers at the start; then these, together not more.
#define REGISTERS 208
#define COPIER_REGISTERS 88
#define TILE_BYTES (TOKENS * 128)  // 64 columns of all tokens

__device__ __forceinline__ void tokens_written() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// What lies at `at` of this block's shared memory, in block `rank` of the cluster.
__device__ __forceinline__ float4 load_remote(u32 at, u32 rank) {
  u32 there;
  float4 v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(there) : "memory");
  return v;
}
// Codes are read once: they need no place in L1. The condition is no branch: see below.
__device__ __forceinline__ void load_codes(u32 (&r)[4], const u8* from, int wanted) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %5, 0; "
               "@p ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%0,%1,%2,%3}, [%4];}"
               : "+r"(r[0]), "+r"(r[1]), "+r"(r[2]), "+r"(r[3]) : "l"(from), "r"(wanted));
}
// Two of four codes to BF16: sign and magnitude move to BF16's places, which divides by
// 2^120, and a product with 2^120 puts that right, subnormals included. Each step is exact.
// The code for NaN would become 480; loading refuses it.
template <int PAIR>
__device__ __forceinline__ u32 widen(u32 codes) {
  u32 spread, out;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(spread) : "r"(codes), "n"(PAIR ? 0x3424 : 0x1404));
  const u32 moved = (spread & 0x80008000u) | ((spread >> 4) & 0x07F007F0u);
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(moved), "r"(0x7B807B80u));
  return out;
}

// Tokens are moved in units of 8 tokens and 64 columns, by a warp each.
#define UNITS (TOKENS / 4)  // of a block of 128 columns
struct Unit {
  uint4 v[2];
  __device__ __forceinline__ void load(const u16* x, int x_stride, int tokens, int u, int g, int t) {
    const int n = u % (TOKENS / 8) * 8 + g;
    const uint4* const from = (const uint4*)(x + (long long)n * x_stride + u / (TOKENS / 8) * 64 + t * 16);
    v[0] = n < tokens ? from[0] : make_uint4(0, 0, 0, 0);
    v[1] = n < tokens ? from[1] : make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void store(u32 to, int u, int g, int t) const {
    const u32 row = to + u / (TOKENS / 8) * TILE_BYTES + (u % (TOKENS / 8) * 8 + g) * 128 + t * 4;
    const u32 words[8] = {v[0].x, v[0].y, v[0].z, v[0].w, v[1].x, v[1].y, v[1].z, v[1].w};
#pragma unroll
    for (int k = 0; k < 8; k++)  // columns 2 k, 2 k + 1 of the lane's: piece k of the swizzled row
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(row + ((k ^ g) << 4)), "r"(words[k]) : "memory");
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) block_fp8_few_tokens(
    const u8* __restrict__ weight, const float* __restrict__ scale, const u16* x, u16* out, int tokens,
    int x_stride, int blocks, int share) {
  extern __shared__ u8 shared[];
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
  const u32 tokens_at = ((u32)__cvta_generic_to_shared(shared) + 1023) & ~1023u;
  const int first = blockIdx.y * share, count = min(share, blocks - first);
  const long long columns = blocks * 128;

#if RING
  const u32 full = tokens_at + 8 * TILE_BYTES, empty = full + 32;  // one of each per slot
  if (tid < 4) {
    barrier_init(full + tid * 8, 1);
    barrier_init(empty + tid * 8, WARPS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (warp >= WARPS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COPIER_REGISTERS));
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int slot = warp - WARPS;
    const u32 to = tokens_at + slot * (2 * TILE_BYTES);
    for (int b = slot; b < count; b += 4) {
      if (b >= 4) barrier_wait(empty + slot * 8, ((b >> 2) & 1) ^ 1);
      const u16* const from = x + (first + b) * 128;
#pragma unroll
      for (int u0 = 0; u0 < UNITS; u0 += 8) {
        Unit unit[8];
#pragma unroll
        for (int i = 0; i < 8; i++) unit[i].load(from, x_stride, tokens, u0 + i, g, t);
#pragma unroll
        for (int i = 0; i < 8; i++) unit[i].store(to, u0 + i, g, t);
      }
      tokens_written();
      __syncwarp();
      if (lane == 0) barrier_arrive(full + slot * 8);
    }
    __syncthreads();  // the barriers of the others, below
    cluster_barrier();
    cluster_barrier();
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif

  // In each 64 columns lane t of a quad holds block t of 16; the tensor cores take its columns
  // 4 s.. for columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of step s. Tokens are permuted to fit.
  const u8* const upper = weight + (blockIdx.x * 128LL + warp * 16 + g) * columns + first * 128 + t * 16;
  const u8* const lower = upper + 8 * columns;
  u32 codes[AHEAD][2][2][4] = {};
  auto fetch = [&](u32 (&to)[2][2][4], int block) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      load_codes(to[half][0], upper + block * 128 + half * 64, block < count);
      load_codes(to[half][1], lower + block * 128 + half * 64, block < count);
    }
  };
#pragma unroll
  for (int p = 0; p < AHEAD; p++) fetch(codes[p], p);

  asm volatile("griddepcontrol.wait;" ::: "memory");  // what came before may still have run
#if !RING
  x += first * 128;
  for (int u0 = warp; u0 < count * UNITS; u0 += WARPS * BATCH) {
    Unit unit[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; i++)
      if (u0 + i * WARPS < count * UNITS) unit[i].load(x, x_stride, tokens, u0 + i * WARPS, g, t);
#pragma unroll
    for (int i = 0; i < BATCH; i++)
      if (u0 + i * WARPS < count * UNITS) unit[i].store(tokens_at, u0 + i * WARPS, g, t);
  }
  tokens_written();
  __syncthreads();
#endif

  const float* const scales = scale + blockIdx.x * blocks + first;
  float total[TOKENS / 2] = {}, acc[2][TOKENS / 2], factor = 0.0f;
  u32 a[2][4][4];
  auto add = [&](const float (&from)[TOKENS / 2], bool counts) {
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) total[i] = counts ? total[i] + factor * from[i] : total[i];
  };
  // No branch around products, or the compiler would wait for each: blocks past the last are
  // multiplied and dropped.
  for (int b0 = 0; b0 < count; b0 += AHEAD) {
#if RING
#pragma unroll
    for (int p = 0; p < AHEAD; p++)
      if (b0 + p < count) barrier_wait(full + ((b0 + p) & 3) * 8, (b0 + p) >> 2 & 1);
#endif
#pragma unroll
    for (int p = 0; p < AHEAD; p++) {
      const int b = b0 + p;
      const int slot = RING ? b & 3 : b;
      const u32 low = ((tokens_at + slot * (2 * TILE_BYTES)) >> 4) | 0x10000u;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        products_wait<1>();  // a[half] is free; and with half 1 the block before is done
        if (half == 1) {
          if (p) add(acc[(p & 1) ^ 1], b <= count);
          factor = scales[min(b, count - 1)];
        }
#pragma unroll
        for (int s = 0; s < 4; s++) {
          a[half][s][0] = widen<0>(codes[p][half][0][s]);
          a[half][s][1] = widen<0>(codes[p][half][1][s]);
          a[half][s][2] = widen<1>(codes[p][half][0][s]);
          a[half][s][3] = widen<1>(codes[p][half][1][s]);
        }
        if (half == 1) fetch(codes[p], b + AHEAD);
        products_begin();
#pragma unroll
        for (int s = 0; s < 4; s++)
          wgmma<TOKENS>(acc[p & 1], a[half][s], descriptor(low + half * (TILE_BYTES >> 4) + s * 2), half || s);
        products_commit();
      }
    }
    products_wait<0>();
    add(acc[1], b0 + AHEAD <= count);
#if RING
    if (lane < AHEAD) barrier_arrive(empty + ((b0 + lane) & 3) * 8);
#endif
  }

  // Shares meet: unit (warp, 8 tokens) by unit, each added up by one block of the cluster.
  __syncthreads();  // the tokens are read, their place is free
  const u32 sums = tokens_at + lane * 16;
#pragma unroll
  for (int j = 0; j < TOKENS / 8; j++)
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(sums + (warp * (TOKENS / 8) + j) * 512),
                 "f"(total[4 * j]), "f"(total[4 * j + 1]), "f"(total[4 * j + 2]), "f"(total[4 * j + 3]) : "memory");
  cluster_barrier();
  const int split = gridDim.y;
  const long long rows = (long long)gridDim.x * 128;
  for (int u = blockIdx.y + split * warp; u < WARPS * (TOKENS / 8); u += split * WARPS) {
    const int token = u % (TOKENS / 8) * 8, row = blockIdx.x * 128 + u / (TOKENS / 8) * 16;
    if (token >= tokens) continue;
    float4 sum = load_remote(sums + u * 512, 0);
    for (int q = 1; q < split; q++) {
      const float4 v = load_remote(sums + u * 512, q);
      sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
    }
    // Lanes of neighbouring rows exchange, so that each writes two rows of one token.
    const float up = __shfl_xor_sync(~0u, g & 1 ? sum.x : sum.y, 4);
    const float down = __shfl_xor_sync(~0u, g & 1 ? sum.z : sum.w, 4);
    const int n = token + 2 * t + (g & 1);
    u16* const to = out + n * rows + row + (g & ~1);
    if (n < tokens) {
      *(u32*)to = g & 1 ? pack_bf16(up, sum.y) : pack_bf16(sum.x, up);
      *(u32*)(to + 8) = g & 1 ? pack_bf16(down, sum.w) : pack_bf16(sum.z, down);
    }
  }
  cluster_barrier();  // nobody leaves while another reads its sums
}

// SPDX-License-Identifier: Apache-2.0
// NVFP4 experts for SM90: routing, two GEMM shapes, reduction. Compiled at run time
// by NVRTC, one kernel per compilation, chosen by macros; behind vllm/utils/sm90.cu.
//
// PHASE 1 multiplies w13 and applies SiTU, PHASE 2 multiplies w2. Weights are the
// first operand of the tensor cores and go from memory to registers in the layout of
// nvfp4_situ_sm90_layout.py; tokens are the second, from shared memory.

#define WARP 32
#define CHUNK 128              // columns per pipeline step: 1024 B of codes, 128 B of scales
#define CODES 1024
#define SCALES 128
#define STEP_BYTES (CODES + SCALES)
#define WEIGHT_FACTOR 256.0f   // the layout's products are 2**-8 too small

__device__ __forceinline__ u32 shared_address(const void* p) {
  return (u32)__cvta_generic_to_shared(p);
}
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
__device__ __forceinline__ void load16(u32 (&r)[4], u32 from) {
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from));
}
__device__ __forceinline__ u32 load4(u32 from) {
  u32 r;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(r) : "r"(from));
  return r;
}
__device__ __forceinline__ u32 scaled(u32 codes, u32 scale) {
  u32 out;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(codes), "r"(scale));
  return out;
}
// bf16x2 of a block scale times 2**118, twice the same; BYTE picks the block.
template <int BYTE>
__device__ __forceinline__ u32 block_scale(u32 word) {
  u32 byte;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(byte) : "r"(word), "n"(0x4440 + BYTE));
  return byte * 0x00100010u + 0x76007600u;
}
// One word: the operand of a lane for 16 rows and 16 columns. Left shifts are products by a
// value the compiler cannot see through: they then run on the multiplier's pipe, and the
// logic pipe, the busiest one, has a fifth less to do.
struct Shifts {
  u32 by1, by2, by3, by6;
  __device__ __forceinline__ explicit Shifts(int chunks) {
    const u32 one = 1 + ((u32)chunks >> 30);
    by1 = one * 2, by2 = one * 4, by3 = one * 8, by6 = one * 64;
  }
};
__device__ __forceinline__ void unpack(u32 (&a)[4], u32 w, u32 upper, u32 lower, const Shifts& left) {
  a[0] = scaled(w & 0x81C081C0u, upper);
  a[1] = scaled((w * left.by6) & 0x81C081C0u, lower);
  a[2] = scaled(((w * left.by3) & 0x01C001C0u) | ((w * left.by1) & 0x80008000u), upper);
  a[3] = scaled(((w >> 4) & 0x01C001C0u) | ((w * left.by2) & 0x80008000u), lower);
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
// 1 - exp(-x) for x >= 0, given e = exp(-x): by its series where the difference cancels.
__device__ __forceinline__ float one_minus(float x, float e) {
  return x < 0.03125f ? x * (1.0f - x * (0.5f - x * 0.16666667f)) : 1.0f - e;
}
// beta tanh(g / beta) sigmoid(g) lambda tanh(u / lambda) over one common denominator;
// lambda 0 stands for "no second limit". Relative error below 4e-6.
struct Situ {
  float over_beta, over_lambda, scale;
  bool limited;
  __device__ __forceinline__ Situ(float beta, float lambda) {
    limited = lambda > 0.0f;
    over_beta = 2.0f / beta;
    over_lambda = limited ? 2.0f / lambda : 0.0f;
    scale = limited ? beta * lambda : beta;
  }
  __device__ __forceinline__ float operator()(float g, float u) const {
    const float log2e = 1.44269504f;
    const float x = fabsf(g) * over_beta, ex = exp2_fast(-log2e * x), eg = exp2_fast(-log2e * fabsf(g));
    const float y = fabsf(u) * over_lambda, ey = exp2_fast(-log2e * y);
    const float rest = limited ? one_minus(y, ey) : fabsf(u);
    const float above = scale * one_minus(x, ex) * (g < 0.0f ? eg : 1.0f) * rest;
    const float below = (1.0f + ex) * (1.0f + eg) * (limited ? 1.0f + ey : 1.0f);
    return copysignf(above * reciprocal(below), __int_as_float(__float_as_int(g) ^ __float_as_int(u)));
  }
};
// Programmatic dependent launch: a kernel may start while the one before still runs.
// It reads that one's results only after `results_wait`.
__device__ __forceinline__ void results_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void next_may_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Where column c of a token lies for the large kernel. In each 64 columns lane t of a quad
// holds the weights of block t, its four columns 4 s.. in step s; the tensor cores take them
// for columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of step s.
__device__ __forceinline__ int permuted(int c) {
  const int t = c >> 4 & 3, s = c >> 2 & 3;
  return (c & ~63) + 16 * s + 8 * (c >> 1 & 1) + 2 * t + (c & 1);
}

#ifdef KERNEL_ROUTE
// Sorts (token, choice) pairs by local expert and cuts every expert's list into items
// of at most `cap` tokens. Order within an expert varies from run to run; results do not
// depend on it. An id that is negative, out of range, or mapped to -1 takes no part.
//
// One block does it all, or (many pairs) PART 1 counts in several blocks and remembers
// each pair's rank, and PART 2 places: every block sums the counts for itself.
//
// Blocks from `route_blocks` on bring the tokens into the large kernel's order meanwhile.
__device__ __forceinline__ int local_expert(const void* ids, int wide, const int* map, int mapped,
                                            int experts, int p) {
  long long e = wide ? ((const long long*)ids)[p] : (long long)((const int*)ids)[p];
  if (map) {
    if (e < 0 || e >= mapped) return -1;
    e = map[e];
  }
  return e < 0 || e >= experts ? -1 : (int)e;
}
extern "C" __global__ void __launch_bounds__(1024) ENTRY(
    const void* ids, const int* map, int* slots, int4* items, int* item_count, int* ranks, int* counts,
    const u32* x, u32* x_permuted, int words, int route_blocks, int wide, int mapped, int experts,
    int pairs, int cap) {
  extern __shared__ int cursor[];  // tokens of each expert, then its next slot
  __shared__ u64 warp_total[32];
  __shared__ u64 carry;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  if (PART != 2 && blockIdx.x >= route_blocks) {
    if (PART == 0) next_may_start();
    const int stride = (gridDim.x - route_blocks) * 1024;
    for (int i = (blockIdx.x - route_blocks) * 1024 + tid; i < words; i += stride) {
      // Word i holds positions p and p + 1 of its 64; read scattered, write in order.
      const int p = 2 * (i & 31);
      x_permuted[i] = x[(i & ~31) + 8 * (p >> 1 & 3) + 2 * (p >> 4) + (p >> 3 & 1)];
    }
    return;
  }
  const int share = (pairs + route_blocks - 1) / route_blocks, first_pair = share * blockIdx.x;
  const int end_pair = min(pairs, first_pair + share);
  if (PART != 1) next_may_start();
  if (tid == 0) carry = 0;
  if (PART != 2) {
    for (int e = tid; e < experts; e += 1024) cursor[e] = 0;
    __syncthreads();
    for (int p0 = first_pair + tid; p0 < end_pair; p0 += 8 * 1024) {
      int e[8];
#pragma unroll
      for (int i = 0; i < 8; i++) {
        int p = p0 + i * 1024;
        e[i] = p < end_pair ? local_expert(ids, wide, map, mapped, experts, p) : -1;
      }
#pragma unroll
      for (int i = 0; i < 8; i++)
        if (e[i] >= 0) {
          int rank = atomicAdd(&cursor[e[i]], 1);
          ranks[p0 + i * 1024] = rank;
        }
    }
    __syncthreads();
  }
  if (PART == 1) {
    for (int e = tid; e < experts; e += 1024) counts[blockIdx.x * experts + e] = cursor[e];
    return;
  }
  for (int e0 = 0; e0 < experts; e0 += 1024) {  // prefix sums: tokens low, items high
    const int e = e0 + tid;
    u32 n = 0, before_me = 0;
    if (e < experts) {
      if (PART == 0) n = cursor[e];
      if (PART == 2)
#pragma unroll 8
        for (int b = 0; b < route_blocks; b++) {
          u32 c = counts[b * experts + e];
          n += c;
          before_me += b < blockIdx.x ? c : 0;
        }
    }
    u64 own = ((u64)((n + cap - 1) / cap) << 32) | n, sum = own;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      u64 other = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += other;
    }
    if (lane == 31) warp_total[warp] = sum;
    __syncthreads();
    if (warp == 0) {
      u64 total = warp_total[lane], run = total;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        u64 other = __shfl_up_sync(~0u, run, d);
        if (lane >= d) run += other;
      }
      u64 before = carry;
      __syncwarp();
      warp_total[lane] = run - total + before;
      if (lane == 31) carry = before + run;
    }
    __syncthreads();
    const u64 first = warp_total[warp] + sum - own;
    if (e < experts) {
      int slot = (int)(u32)first, item = (int)(first >> 32);
      cursor[e] = slot + before_me;
      if (blockIdx.x == 0)
        for (int done = 0; done < (int)n; done += cap)
          items[item++] = make_int4(e, slot + done, min(cap, (int)n - done), 0);
    }
    __syncthreads();
  }
  if (tid == 0 && blockIdx.x == 0) *item_count = (int)(carry >> 32);
  for (int p0 = first_pair + tid; p0 < end_pair; p0 += 8 * 1024) {
    int e[8], rank[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      int p = p0 + i * 1024;
      e[i] = p < end_pair ? local_expert(ids, wide, map, mapped, experts, p) : -1;
      rank[i] = e[i] >= 0 ? ranks[p] : 0;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (e[i] >= 0) slots[cursor[e[i]] + rank[i]] = p0 + i * 1024;
  }
}
#endif

#ifdef KERNEL_REDUCE
// out[token] = sum over choices of routing weight * pair's row; float32 in the order of
// the choices, so the result does not vary.
extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(
    const u16* rows, const void* ids, const int* map, const float* weights, u16* out, int wide,
    int mapped, int experts, int choices, int columns) {
  extern __shared__ float weight[];
  results_wait();
  const long long token = blockIdx.x;
  for (int k = threadIdx.x; k < choices; k += THREADS) {
    long long p = token * choices + k;
    long long e = wide ? ((const long long*)ids)[p] : (long long)((const int*)ids)[p];
    bool held = e >= 0;
    if (map) {
      held = held && e < mapped;
      e = held ? map[e] : -1;
      held = e >= 0;
    }
    weight[k] = held && e < experts ? weights[p] : __int_as_float(0x7fffffff);
  }
  __syncthreads();
  for (int c = threadIdx.x + blockIdx.y * THREADS; c < columns / 8; c += THREADS * gridDim.y) {
    float sum[8] = {};
#pragma unroll 4
    for (int k = 0; k < choices; k++) {
      float w = weight[k];
      if (__float_as_int(w) == 0x7fffffff) continue;
      uint4 v = ((const uint4*)(rows + (token * choices + k) * columns))[c];
      u32 word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        sum[2 * i] += w * __uint_as_float(word[i] << 16);
        sum[2 * i + 1] += w * __uint_as_float(word[i] & 0xFFFF0000u);
      }
    }
    uint4 v = make_uint4(pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]),
                         pack_bf16(sum[4], sum[5]), pack_bf16(sum[6], sum[7]));
    ((uint4*)(out + token * columns))[c] = v;
  }
}
#endif

#ifdef KERNEL_SMALL
// Few tokens per expert: at most 8 * TILES an item. All units (ROWS row tiles of 16) of all
// items form one list; blocks take equal runs of it, so that all multiprocessors read as
// much. In a block, groups of SPLIT warps take units in turn, each warp a part of the
// columns through a ring of its own; the parts meet in shared memory, in a fixed order.
// The tokens of as many items as fit TOKEN_ROWS lie there whole.
#define GROUPS (WARPS / SPLIT)
#define TABLE 64  // items a block looks up at a time
#define RING_STEP (ROWS * STEP_BYTES)
#define SUM_BYTES (SPLIT > 1 ? ROWS * TILES * 512 : 0)
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
               "{%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
extern "C" __global__ void __launch_bounds__(WARPS* WARP, BLOCKS) ENTRY(
    const u8* __restrict__ codes, const u8* __restrict__ scales, const float* __restrict__ alphas,
    const u16* x, const int* slots, const int4* items, const int* item_count, u16* __restrict__ out,
    int row_tiles, int chunks, int choices, int out_stride, float beta, float linear_beta) {
  extern __shared__ __align__(128) u8 shared[];
  __shared__ int4 table[TABLE];
  __shared__ int token_source[TOKEN_ROWS];
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
  const int group = warp / SPLIT, part = warp % SPLIT;
  const int columns = chunks * CHUNK, pitch = columns * 2 + 16;
  const u32 tokens_at = shared_address(shared);
  const u32 ring = tokens_at + TOKEN_ROWS * pitch + warp * (STAGES * RING_STEP);
  float* const sums =
      (float*)(shared + TOKEN_ROWS * pitch + WARPS * STAGES * RING_STEP + group * 2 * SPLIT * SUM_BYTES);
  const int units = row_tiles / ROWS;
  const int chunk0 = part * chunks / SPLIT, mine = (part + 1) * chunks / SPLIT - chunk0;
  if (PHASE == 1) results_wait();  // the routing; PHASE 2 starts when all of PHASE 1 have it
  next_may_start();
  bool waiting = PHASE == 2;
  const long long total = (long long)*item_count * units;
  long long at = total * blockIdx.x / gridDim.x;
  const long long end = total * (blockIdx.x + 1) / gridDim.x;
  int next_stage = 0, stage = 0, turn = 0;
  const Shifts left(chunks);
  const Situ situ(beta, linear_beta);

  while (at < end) {
    const int item0 = (int)(at / units), listed = (int)min((long long)TABLE, (end - 1) / units - item0 + 1);
    const int first = (int)(at - (long long)item0 * units);
    const int last = (int)min(end - (long long)item0 * units, (long long)listed * units);
    at += last - first;
    __syncthreads();  // the table before is read
    if (tid < listed) table[tid] = items[item0 + tid];
    __syncthreads();

    int next_unit = first + group, next_chunk = 0;
    const u8 *next_codes = 0, *next_scales = 0;
    auto fetch = [&]() {
      if (next_unit < last) {
        if (next_chunk == 0) {
          const int item = next_unit / units;
          const long long row = (long long)table[item].x * row_tiles + (next_unit - item * units) * ROWS;
          next_codes = codes + (row * chunks + chunk0) * CODES + lane * 16;
          next_scales = scales + (row * chunks + chunk0) * SCALES + lane * 4;
        }
        const u32 to = ring + next_stage * RING_STEP;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
          const u8* c = next_codes + (long long)r * chunks * CODES;
          copy16(to + r * STEP_BYTES + lane * 16, c);
          copy16(to + r * STEP_BYTES + 512 + lane * 16, c + 512);
          copy4(to + r * STEP_BYTES + CODES + lane * 4, next_scales + (long long)r * chunks * SCALES);
        }
        next_codes += CODES;
        next_scales += SCALES;
        if (++next_stage == STAGES) next_stage = 0;
        if (++next_chunk == mine) {
          next_chunk = 0;
          next_unit += GROUPS;
        }
      }
      copies_commit();
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) fetch();

    int unit = first + group;
    for (int item = 0; item < listed;) {
      __syncthreads();  // the tokens before are read
      int from_item = item, rows = 0;
      while (item < listed && rows + table[item].z <= TOKEN_ROWS) {
        const int4 it = table[item];
        if (waiting && rows == 0) {
          results_wait();
          waiting = false;
        }
        if (tid < it.z) token_source[rows + tid] = PHASE == 1 ? slots[it.y + tid] / choices : it.y + tid;
        if (tid == 0) table[item].w = rows;
        rows += it.z;
        item++;
      }
      __syncthreads();
      for (int n = 0; n < rows; n++) {
        const u16* from = x + (long long)token_source[n] * columns;
        for (int c = tid; c < columns / 8; c += WARPS * WARP) copy16(tokens_at + n * pitch + c * 16, from + c * 8);
      }
      copies_commit();
      copies_wait<0>();
      __syncthreads();
      const int stop = min(last, item * units);
      for (; unit < stop; unit += GROUPS) {
        const int4 it = table[unit / units];
        const int tile = (unit - unit / units * units) * ROWS;
        u32 token_lane[TILES];
#pragma unroll
        for (int j = 0; j < TILES; j++)  // rows past the item's are another's; their sums are dropped
          token_lane[j] = tokens_at + min(it.w + j * 8 + g, TOKEN_ROWS - 1) * pitch + t * 32 + chunk0 * CHUNK * 2;
        float acc[ROWS][TILES][4] = {};
        for (int chunk = 0; chunk < mine; chunk++) {
          copies_wait<STAGES - 2>();  // a lane reads back what it copied itself
          const u32 from = ring + stage * RING_STEP;
          if (++stage == STAGES) stage = 0;
          u32 sc[ROWS][4];
#pragma unroll
          for (int r = 0; r < ROWS; r++) {
            const u32 word = load4(from + r * STEP_BYTES + CODES + lane * 4);
            sc[r][0] = block_scale<0>(word), sc[r][1] = block_scale<1>(word);
            sc[r][2] = block_scale<2>(word), sc[r][3] = block_scale<3>(word);
          }
#pragma unroll
          for (int half = 0; half < 2; half++) {
            u32 b[TILES][2][4];
#pragma unroll
            for (int j = 0; j < TILES; j++)
#pragma unroll
              for (int i = 0; i < 2; i++)
                load16(b[j][i], token_lane[j] + (chunk * CHUNK + half * 64 + i * 8) * 2);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
              u32 w[4], a[4];
              load16(w, from + r * STEP_BYTES + half * 512 + lane * 16);
#define PRODUCTS(S)                                                                          \
  unpack(a, w[S], sc[r][2 * half], sc[r][2 * half + 1], left);                               \
  _Pragma("unroll") for (int j = 0; j < TILES; j++)                                          \
      multiply(acc[r][j], a, b[j][S / 2][S % 2 * 2], b[j][S / 2][S % 2 * 2 + 1]);
              PRODUCTS(0) PRODUCTS(1) PRODUCTS(2) PRODUCTS(3)
#undef PRODUCTS
            }
            if (half == 0) fetch();
          }
        }
        bool write = true;
        if (SPLIT > 1) {
          float* const both = sums + (turn & 1) * (SPLIT * SUM_BYTES / 4) + lane * 4;
#pragma unroll
          for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int j = 0; j < TILES; j++)
              *(float4*)(both + part * (SUM_BYTES / 4) + (r * TILES + j) * 128) =
                  make_float4(acc[r][j][0], acc[r][j][1], acc[r][j][2], acc[r][j][3]);
          asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(SPLIT * WARP) : "memory");
          write = turn % SPLIT == part;
          if (write)
#pragma unroll
            for (int r = 0; r < ROWS; r++)
#pragma unroll
              for (int j = 0; j < TILES; j++) {
                float4 v = *(float4*)(both + (r * TILES + j) * 128);
#pragma unroll
                for (int q = 1; q < SPLIT; q++) {
                  const float4 o = *(float4*)(both + q * (SUM_BYTES / 4) + (r * TILES + j) * 128);
                  v = make_float4(v.x + o.x, v.y + o.y, v.z + o.z, v.w + o.w);
                }
                acc[r][j][0] = v.x, acc[r][j][1] = v.y, acc[r][j][2] = v.z, acc[r][j][3] = v.w;
              }
          turn++;
        }
        if (write) {
          const float upper = alphas[PHASE == 1 ? 2 * it.x : it.x] * WEIGHT_FACTOR;
          const float lower = PHASE == 1 ? alphas[2 * it.x + 1] * WEIGHT_FACTOR : upper;
#pragma unroll
          for (int j = 0; j < TILES; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
              const int n = j * 8 + t * 2 + i;
              if (n < it.z) {
                u16* const to = out + (long long)(PHASE == 1 ? it.y + n : slots[it.y + n]) * out_stride;
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                  const float p = acc[r][j][i] * upper, q = acc[r][j][2 + i] * lower;
                  if (PHASE == 1) {
                    const float h = situ(p, q);
                    to[(tile + r) * 8 + g] = (u16)pack_bf16(h, h);
                  } else {
                    *(u32*)(to + (tile + r) * 16 + 2 * g) = pack_bf16(p, q);
                  }
                }
              }
            }
        }
      }
      if (from_item == item) __trap();  // an item larger than TOKEN_ROWS: a wrong launch
    }
    copies_wait<0>();
  }
  if (waiting) results_wait();
}
#endif

#ifdef KERNEL_LARGE
// Many tokens per expert. A block multiplies 256 rows with up to TOKENS tokens. Four warps
// copy, STAGES steps ahead and over all tiles of the block; each of the other 16
// dequantises 16 rows into registers and its warpgroup multiplies them with the tokens' tile
// by wgmma, TOKENS wide or, where that does, NARROW. Only barriers per stage tie the warps
// together, so one warpgroup's epilogue passes under another's products.
#define WARPS 16
#define COPIERS 4
#define THREADS ((WARPS + COPIERS) * WARP)
// Registers per thread: 96 at the start, then moved from the copying warps to the others.
// What all have together stays: 20 * 96 = 16 * 112 + 4 * 32.
#define COPIER_REGISTERS 32
#define REGISTERS 112
#define TOKEN_BYTES (TOKENS * CHUNK * 2)
#define HALF_BYTES (TOKENS * CHUNK)
__device__ __forceinline__ void barrier_arrive_expect(u32 at, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive_after_copies(u32 at) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at) : "memory");
}
__device__ __forceinline__ void copy_bulk(u32 to, const void* from, int bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
struct Place {  // in the ring of stages
  int stage;
  u32 parity;
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
};
template <int N>
__device__ __forceinline__ void products(float (&acc)[TOKENS / 2], Place& now, u32 barriers, u32 ring_lane,
                                         u32 ring_scale, u32 tokens_low, int chunks, bool first_lane,
                                         const Shifts& left) {
  u32 a[2][PAIR][4], w[4];
  for (int chunk = 0; chunk < chunks; chunk++) {
    barrier_wait(barriers + now.stage * 8, now.parity);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    const u32 at = now.stage * STEP_BYTES * WARPS;
    const u32 word = load4(ring_scale + at);
    const u32 sc[4] = {block_scale<0>(word), block_scale<1>(word), block_scale<2>(word), block_scale<3>(word)};
    const u32 low = tokens_low + now.stage * (TOKEN_BYTES >> 4);
#pragma unroll
    for (int i = 0; i < 8 / PAIR; i++) {  // PAIR steps of 16 columns at a time
      const int half = i * PAIR / 4;
      if (i * PAIR % 4 == 0) load16(w, ring_lane + at + half * 512);
      products_wait<1>();  // a[i % 2] is free
      // The step before has been multiplied: its stage may be filled.
      if (i == 1 && chunk && first_lane)
        barrier_arrive(barriers + (STAGES + (now.stage ? now.stage - 1 : STAGES - 1)) * 8);
      const u32 upper = sc[2 * half], lower = sc[2 * half + 1];
      if (PAIR == 4 || i % 2 == 0) {
        unpack(a[i % 2][0], w[0], upper, lower, left);
        unpack(a[i % 2][1], w[1], upper, lower, left);
      }
      if (PAIR == 4 || i % 2 == 1) {
        unpack(a[i % 2][PAIR - 2], w[2], upper, lower, left);
        unpack(a[i % 2][PAIR - 1], w[3], upper, lower, left);
      }
      products_begin();
#pragma unroll
      for (int s = 0; s < PAIR; s++)
        wgmma<N>(acc, a[i % 2][s], descriptor(low + half * (HALF_BYTES >> 4) + (i * PAIR % 4 + s) * 2),
                 i || s ? 1 : chunk);
      products_commit();
    }
    now.advance();
  }
  products_wait<0>();
  if (first_lane) barrier_arrive(barriers + (STAGES + (now.stage ? now.stage - 1 : STAGES - 1)) * 8);
}
extern "C" __global__ void __launch_bounds__(THREADS, 1) ENTRY(
    const u8* __restrict__ codes, const u8* __restrict__ scales, const float* __restrict__ alphas,
    const u16* x, const int* slots, const int4* items, const int* item_count, u16* __restrict__ out,
    int row_tiles, int chunks, int choices, int out_stride, float beta, float linear_beta) {
  extern __shared__ __align__(1024) u8 shared[];
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
  const u32 tokens_at = (shared_address(shared) + 1023) & ~1023u;
  const u32 ring = tokens_at + STAGES * TOKEN_BYTES;
  const u32 barriers = ring + STAGES * WARPS * STEP_BYTES;  // full of each stage, then empty
  if (tid < STAGES) {
    barrier_init(barriers + tid * 8, COPIERS * (WARP + 1));
    barrier_init(barriers + (STAGES + tid) * 8, WARPS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  results_wait();
  next_may_start();
  const int columns = chunks * CHUNK, blocks_of_rows = (row_tiles + WARPS - 1) / WARPS;
  const int total = *item_count * blocks_of_rows;

  if (warp >= WARPS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COPIER_REGISTERS));
    const int copier = warp - WARPS, piece = lane & 15;  // which 16 bytes of a row's step
    const int row = 2 * copier + (lane >> 4);            // and of every eight rows which
    const int mine = copier * (WARPS / COPIERS) + (lane & 3);
    const u32 to_lane = tokens_at + (piece >> 3) * HALF_BYTES + row * CHUNK + (((piece & 7) ^ row) << 4);
    const u32 ring_lane = ring + mine * STEP_BYTES;
    Place next = {0, 0};
    for (int at = blockIdx.x; at < total; at += gridDim.x) {
      const int item = at / blocks_of_rows;
      const int4 it = items[item];
      const int tile = min((at - item * blocks_of_rows) * WARPS + mine, row_tiles - 1);
      u32 step = (it.x * row_tiles + tile) * chunks;
      u32 from[TOKENS / 8];  // in 16 bytes
#pragma unroll
      for (int i = 0; i < TOKENS / 8; i++) {
        const int n = 8 * i + row;
        from[i] = piece;
        if (n < it.z) from[i] += (u32)(PHASE == 1 ? slots[it.y + n] / choices : it.y + n) * (u32)(columns / 8);
      }
      const uint4* x_chunk = (const uint4*)x;
      for (int chunk = 0; chunk < chunks; chunk++) {
        const u32 full = barriers + next.stage * 8;
        barrier_wait(full + STAGES * 8, next.parity ^ 1);
        if (lane == 0) barrier_arrive_expect(full, WARPS / COPIERS * STEP_BYTES);
        __syncwarp();
        if (lane < WARPS / COPIERS) {
          const u32 to = ring_lane + next.stage * (WARPS * STEP_BYTES);
          copy_bulk(to, codes + (u64)step * CODES, CODES, full);
          copy_bulk(to + CODES, scales + (u64)step * SCALES, SCALES, full);
        }
        step++;
        const u32 to = to_lane + next.stage * TOKEN_BYTES;
#pragma unroll
        for (int i = 0; i < TOKENS / 8; i++)
          if (8 * i + row < it.z) copy16(to + i * (8 * CHUNK), x_chunk + from[i]);
        x_chunk += CHUNK / 8;
        barrier_arrive_after_copies(full);
        next.advance();
      }
    }
    copies_commit();
    copies_wait<0>();
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));

  const u32 ring_lane = ring + warp * STEP_BYTES + lane * 16, ring_scale = ring + warp * STEP_BYTES + CODES + lane * 4;
  const u32 tokens_low = (tokens_at >> 4) | 0x10000u;
  const bool first_lane = lane == 0;
  const Shifts left(chunks);
  const Situ situ(beta, linear_beta);
  Place now = {0, 0};
  float acc[TOKENS / 2];
  for (int at = blockIdx.x; at < total; at += gridDim.x) {
    const int item = at / blocks_of_rows;
    const int tile = (at - item * blocks_of_rows) * WARPS + warp;
    const int4 it = items[item];
#if NARROW
    if (it.z <= NARROW)
      products<NARROW>(acc, now, barriers, ring_lane, ring_scale, tokens_low, chunks, first_lane, left);
    else
#endif
      products<TOKENS>(acc, now, barriers, ring_lane, ring_scale, tokens_low, chunks, first_lane, left);
    if (tile < row_tiles) {
      const float upper = alphas[PHASE == 1 ? 2 * it.x : it.x] * WEIGHT_FACTOR;
      const float lower = PHASE == 1 ? alphas[2 * it.x + 1] * WEIGHT_FACTOR : upper;
      // Columns of the second GEMM's operand lie as `permuted` has them.
      const int column = PHASE == 1 ? permuted(tile * 8 + g) : tile * 16 + 2 * g;
      u16* to = out + (long long)(it.y + 2 * t) * out_stride + column;
      int pair[(TOKENS + 31) / 32];  // the pair of token lane + 32 k, for PHASE 2
#pragma unroll
      for (int k = 0; k < (TOKENS + 31) / 32; k++)
        pair[k] = PHASE == 2 && lane + 32 * k < it.z ? slots[it.y + lane + 32 * k] : 0;
#pragma unroll
      for (int j = 0; j < TOKENS / 8; j++) {
        if (j * 8 >= it.z) break;
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int n = j * 8 + t * 2 + i;
          const float p = acc[4 * j + i] * upper, q = acc[4 * j + 2 + i] * lower;
          const float h = PHASE == 1 ? situ(p, q) : 0.0f;
          const int row = PHASE == 2 ? __shfl_sync(~0u, pair[j / 4], n & 31) : 0;
          if (n < it.z) {
            if (PHASE == 1)
              to[i * out_stride] = (u16)pack_bf16(h, h);
            else
              *(u32*)(out + (long long)row * out_stride + column) = pack_bf16(p, q);
          }
        }
        to += 8 * out_stride;
      }
    }
  }
}
#endif

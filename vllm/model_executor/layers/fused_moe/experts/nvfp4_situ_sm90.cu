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

// The same value, but not one that the compiler may make anew at each use.
__device__ __forceinline__ u32 kept(u32 x) { return __shfl_sync(~0u, x, threadIdx.x & 31); }
// bf16x2 of a lane's four block scales times 2**118, each twice the same: of the first half's rows
// g and g + 8, then of the second's. Two are made at once; taking one of a pair twice is free.
__device__ __forceinline__ void block_scales(u32 (&scale)[4], u32 word) {
  const u32 upper = (word & 0x00FF00FFu) * 16 + 0x76007600u, lower = (word >> 8 & 0x00FF00FFu) * 16 + 0x76007600u;
  scale[0] = twice_low(upper), scale[1] = twice_low(lower);
  scale[2] = twice_high(upper), scale[3] = twice_high(lower);
}
// One word: the operand of a lane for 16 rows and 16 columns. Left shifts are products by a
// value the compiler cannot see through: they then run on the multiplier's pipe, and the
// logic pipe, the busiest one, has less to do.
struct Shifts {
  u32 by2, by6;
  __device__ __forceinline__ explicit Shifts(int chunks) {
    const u32 one = kept(1 + ((u32)chunks >> 30));
    by2 = one * 4, by6 = one * 64;
  }
};
__device__ __forceinline__ void unpack(u32 (&a)[4], u32 w, u32 upper, u32 lower, const Shifts& left) {
  a[0] = scaled(w & 0x81C081C0u, upper);
  a[1] = scaled((w * left.by6) & 0x81C081C0u, lower);
  a[2] = scaled(rotated_right<4>(w) & 0x81C081C0u, upper);
  a[3] = scaled((rotated_right<6>(w) & 0x81808180u) | ((w * left.by2) & 0x00400040u), lower);
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

// Order of a token's columns for the large kernel. In each 64 columns lane t of a quad holds
// the weights of block t, its four columns 4 s.. in step s; the tensor cores take them for
// columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of step s. So column 16 t + 4 s + 2 b + o lies at
// 16 s + 8 b + 2 t + o.

#ifdef KERNEL_ROUTE
// Sorts (token, choice) pairs by local expert and cuts every expert's list into items
// of at most the first of `widths` tokens (four bits each, in eights, descending; 0 ends).
// Each width has a list of items, `room` apart: those that fit it and none narrower. Order
// within an expert and of items varies from run to run; results do not depend on it. An id
// that is negative, out of range, or mapped to -1 takes no part.
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
    int pairs, int widths, int room) {
  extern __shared__ int cursor[];  // tokens of each expert, then its next slot
  __shared__ int warp_total[32];
  __shared__ int listed[8];  // items of each width
  __shared__ int carry;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  if (PART != 2 && blockIdx.x >= route_blocks) {
    if (PART == 0) next_may_start();
    const int stride = (gridDim.x - route_blocks) * 1024;
    for (int i0 = (blockIdx.x - route_blocks) * 1024 + tid; i0 < words; i0 += 8 * stride) {
      u32 word[8];
#pragma unroll
      for (int k = 0; k < 8; k++) {
        // Word i holds positions p and p + 1 of its 64; read scattered, write in order.
        const int i = i0 + k * stride, p = 2 * (i & 31);
        if (i < words) word[k] = x[(i & ~31) + 8 * (p >> 1 & 3) + 2 * (p >> 4) + (p >> 3 & 1)];
      }
#pragma unroll
      for (int k = 0; k < 8; k++)
        if (i0 + k * stride < words) x_permuted[i0 + k * stride] = word[k];
    }
    return;
  }
  const int share = (pairs + route_blocks - 1) / route_blocks, first_pair = share * blockIdx.x;
  const int end_pair = min(pairs, first_pair + share);
  if (PART != 1) next_may_start();
  const int cap = (widths & 15) * 8;
  if (tid == 0) carry = 0;
  if (tid < 8) listed[tid] = 0;
  if (PART == 2) __syncthreads();
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
  for (int e0 = 0; e0 < experts; e0 += 1024) {  // prefix sums over the experts' tokens
    const int e = e0 + tid;
    int n = 0, before_me = 0;
    if (e < experts) {
      if (PART == 0) n = cursor[e];
      if (PART == 2)
#pragma unroll 8
        for (int b = 0; b < route_blocks; b++) {
          int c = counts[b * experts + e];
          n += c;
          before_me += b < blockIdx.x ? c : 0;
        }
    }
    int sum = n;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      int other = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += other;
    }
    if (lane == 31) warp_total[warp] = sum;
    __syncthreads();
    if (warp == 0) {
      int total = warp_total[lane], run = total;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        int other = __shfl_up_sync(~0u, run, d);
        if (lane >= d) run += other;
      }
      int before = carry;
      __syncwarp();
      warp_total[lane] = run - total + before;
      if (lane == 31) carry = before + run;
    }
    __syncthreads();
    const int slot = warp_total[warp] + sum - n;
    if (e < experts) cursor[e] = slot + before_me;
    if (blockIdx.x == 0) {
      const int whole = n / cap, rest = n - whole * cap;
      if (whole) {
        const int item = atomicAdd(&listed[0], whole);
        for (int i = 0; i < whole; i++) items[item + i] = make_int4(e, slot + i * cap, cap, 0);
      }
      for (int list = 0; widths >> 4 * list; list++) {
        const int width = (widths >> 4 * list & 15) * 8, narrower = (widths >> 4 * list >> 4 & 15) * 8;
        const bool here = rest > narrower && rest <= width;
        const u32 those = __ballot_sync(~0u, here);
        int item = 0;
        if (lane == 0 && those) item = atomicAdd(&listed[list], __popc(those));
        item = __shfl_sync(~0u, item, 0) + __popc(those & ((1u << lane) - 1));
        if (here) items[list * room + item] = make_int4(e, slot + whole * cap, rest, 0);
      }
    }
    __syncthreads();
  }
  if (tid < 8 && blockIdx.x == 0) item_count[tid] = listed[tid];
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
// out[token] = sum over choices of routing weight * tensor scale * pair's row; float32 in the
// order of the choices, so the result does not vary. Rows come without their tensor scale and
// 2**-8 too small: sums of bf16 times weights below 11, far from the ends of bf16's range.
extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(
    const u16* rows, const void* ids, const int* map, const float* weights, const float* alphas, u16* out,
    int wide, int mapped, int experts, int choices, int columns) {
  extern __shared__ float weight[];
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
    weight[k] = held && e < experts ? weights[p] * (alphas[e] * WEIGHT_FACTOR) : __int_as_float(0x7fffffff);
  }
  __syncthreads();
  results_wait();  // what is read above was there before the router
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
extern "C" __global__ void __launch_bounds__(WARPS* WARP, BLOCKS) ENTRY(
    const u8* __restrict__ codes, const u8* __restrict__ scales, const float* __restrict__ alphas,
    const u16* x, const int* slots, const int4* items, const int* item_count, u16* __restrict__ out,
    int row_tiles, int chunks, int choices, int out_stride, float beta, float linear_beta,
    int pairs, int room) {
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
            block_scales(sc[r], load4(from + r * STEP_BYTES + CODES + lane * 4));
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
          warps_meet<SPLIT * WARP>(1 + group);
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
          const float upper = PHASE == 1 ? alphas[2 * it.x] * WEIGHT_FACTOR : 1.0f;
          const float lower = PHASE == 1 ? alphas[2 * it.x + 1] * WEIGHT_FACTOR : 1.0f;
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
// copy, each a stage in turn and over all tiles of the block; each of the other 16
// dequantises 16 rows into registers and its warpgroup multiplies them with the tokens' tile
// by wgmma, as wide as the item's list. Only barriers per stage tie the warps together, so
// one warpgroup's epilogue passes under another's products.
//
// The activation between the GEMMs lies as the second one's tiles do: per 64 columns all
// slots, 128 bytes each, in the order above and swizzled by the slot's place in its item. A
// tile's 64 columns are then one piece of memory.
#define WARPS 16
#define COPIERS 4
#define THREADS ((WARPS + COPIERS) * WARP)
// Registers per thread: 96 at the start, then moved from the copying warps to the others.
// What all have together stays: 20 * 96 = 16 * 112 + 4 * 32.
#define COPIER_REGISTERS 32
#define REGISTERS 112
#define HALF_BYTES (TOKENS * CHUNK)  // tokens' tile of 64 columns
// A stage holds SPAN chunks: of the tokens, then of each warp codes and scales.
#define STAGE_TOKENS (SPAN * 2 * HALF_BYTES)
#define WARP_WEIGHTS (SPAN * STEP_BYTES)
#define STAGE_WEIGHTS (WARPS * WARP_WEIGHTS)
// Besides stages: tables of the tokens' places, or what rows pass through on their way out.
#define EXTRA_BYTES (PHASE == 1 ? COPIERS * TOKENS * 4 : WARPS * 1024)
// With fewer a copier could come to a stage two uses early, which parity does not show.
static_assert(STAGES >= COPIERS, "too few stages");

// The tiles of a block: of each width's list all items, of each item all blocks of rows, dealt
// to the blocks in turn. Where the next one lies is added up: a division costs twenty operations.
struct Tiles {
  const int4* items;
  const int* count;
  int room, blocks_of_rows, listed, item, block, next_item, next_block;
  __device__ __forceinline__ Tiles(const int4* items, const int* count, int room, int blocks_of_rows)
      : items(items), count(count), room(room), blocks_of_rows(blocks_of_rows), listed(*count),
        item(blockIdx.x / blocks_of_rows), block(blockIdx.x % blocks_of_rows), next_item(gridDim.x / blocks_of_rows),
        next_block(gridDim.x % blocks_of_rows) {}
  __device__ __forceinline__ bool more() const { return item < listed; }
  __device__ __forceinline__ void advance() {
    block += next_block;
    const bool over = block >= blocks_of_rows;
    block -= over ? blocks_of_rows : 0;
    item += next_item + over;
  }
  __device__ __forceinline__ void next_list() {
    item -= listed;
    items += room;
    listed = *++count;
  }
};
struct Turn {  // in the ring of stages; addresses are carried along, not made anew
  int stage;
  u32 parity, full, tokens, weights;
  __device__ __forceinline__ void advance() {
    const bool last = ++stage == STAGES;
    stage = last ? 0 : stage;
    parity ^= last;
    full += last ? 8 - 8 * STAGES : 8;
    tokens += last ? (1 - STAGES) * (STAGE_TOKENS >> 4) : STAGE_TOKENS >> 4;
    weights += last ? (1 - STAGES) * STAGE_WEIGHTS : STAGE_WEIGHTS;
  }
};
// Leaves the last products under way. Returns the barrier that frees their stage.
template <int N>
__device__ __forceinline__ u32 products(float (&acc)[N / 2], Turn& now, u32 codes_lane, u32 scales_lane, int steps,
                                        bool first_lane, const Shifts& left) {
  u32 a[2][PAIR][4], w[4], before = 0;
  for (int step = 0; step < steps; step++) {
    const u32 codes_at = codes_lane + now.weights, scales_at = scales_lane + now.weights;
    const u32 tokens = now.tokens;
    barrier_wait(now.full, now.parity);
#pragma unroll
    for (int u = 0; u < SPAN; u++) {
      u32 sc[4];
      block_scales(sc, load4(scales_at + u * SCALES));
#pragma unroll
      for (int i = 0; i < 8 / PAIR; i++) {  // PAIR steps of 16 columns at a time
        const int half = i * PAIR / 4;
        if (i * PAIR % 4 == 0) load16(w, codes_at + u * CODES + half * 512);
        products_wait<1>();  // a[i % 2] is free
        // The stage before has been multiplied: it may be filled.
        if (u == 0 && i == 1 && step && first_lane) barrier_arrive(before);
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
          wgmma<N>(acc, a[i % 2][s], descriptor(tokens + (2 * u + half) * (HALF_BYTES >> 4) + (i * PAIR % 4 + s) * 2),
                   u || i || s ? 1 : step);
        products_commit();
      }
    }
    before = now.full + STAGES * 8;
    now.advance();
  }
  return before;
}
// A stage's weights, SPAN chunks of 16 row tiles: `first` is the chunk of the first tile, each
// tile's lie `chunks` further, a tile past `last` is the last. Half a kilobyte of codes an
// instruction, eight lanes to a chunk's scales. Not by bulk copies: those of a warp's lanes go
// one by one, at eight instructions each, and the copying warps fall behind.
__device__ __forceinline__ void copy_weights(u32 to, const u8* codes, const u8* scales, u32 first, u32 last,
                                             int chunks, int lane) {
  const u32 to_codes = once(to + lane * 16), row = lane >> 3, part = (lane & 7) * 16;
  const u32 to_scales = once(to + row * WARP_WEIGHTS + SPAN * CODES + part);
#pragma unroll
  for (int r = 0; r < WARPS; r++) {
    const u8* const from = ahead<CODES>(codes + lane * 16, first + min((u32)r, last) * (u32)chunks);
#pragma unroll
    for (int q = 0; q < 2 * SPAN; q++) copy16(to_codes + r * WARP_WEIGHTS + q * 512, from + q * 512);
  }
#pragma unroll
  for (int r = 0; r < WARPS; r += 4) {
    const u8* const from = ahead<SCALES>(scales + part, first + min(r + row, last) * (u32)chunks);
#pragma unroll
    for (int q = 0; q < SPAN; q++) copy16(to_scales + r * WARP_WEIGHTS + q * SCALES, from + q * SCALES);
  }
}
// A stage's tokens, SPAN chunks of `count` rows: an instruction copies a chunk of two rows. A
// lane has rows lane / 16 + 2 k of eight, at `to_lane[k]`, and each row's piece lane % 16;
// `table` says where rows begin, in 16 bytes.
__device__ __forceinline__ void gather_tokens(const u32 (&to_lane)[4], u32 stage, u32 table, const u8* x, int count,
                                              int lane) {
  const u8* const from_lane = x + (lane & 15) * 16;
  const int sub = lane >> 4;
  u32 to[4];
#pragma unroll
  for (int k = 0; k < 4; k++) to[k] = once(to_lane[k] + stage);
  auto eight = [&](int i, u32 offset, int rows) {
    u32 row[4];
    load16(row, table + i * 32 + sub * 16);
#pragma unroll
    for (int k = 0; k < 4; k++)
      if (2 * k + sub < rows)
#pragma unroll
        for (int u = 0; u < SPAN; u++)
          copy16(to[k] + offset + u * (2 * HALF_BYTES), ahead<16>(from_lane, row[k]) + u * (2 * CHUNK));
  };
#pragma unroll
  for (int i = 0; i < TOKENS / 8; i++) {
    if (8 * i + 8 > count) break;
    eight(i, i * (8 * CHUNK), 8);
  }
  if (count & 7) eight(count >> 3, (count >> 3) * (8 * CHUNK), count & 7);
}
struct Output {
  const float* alphas;
  const int* slots;
  u16* to;
  int row_tiles, stride, pairs;
  u32 passage;  // shared memory of this warp
};
// SiTU of gate and up, into the activation.
template <int N>
__device__ __forceinline__ void finish_first(const float (&acc)[N / 2], u32 stage_empty, const int4& it, int tile,
                                             int lane, const Output& out, const Situ& situ) {
  const int g = lane >> 2, t = lane & 3;
  const float upper = out.alphas[2 * it.x] * WEIGHT_FACTOR, lower = out.alphas[2 * it.x + 1] * WEIGHT_FACTOR;
  products_wait<0>();
  if (lane == 0) barrier_arrive(stage_empty);
  if (tile >= out.row_tiles) return;
  // A lane has column g of tokens 2 t and 2 t + 1. Neighbours in g swap: each then stores
  // both columns of one token. The tile's eight columns are two of each of four pieces.
  const int odd = g & 1, row = 2 * t + odd;
  const u32 pick = odd ? 0x3276 : 0x5410;
  u8* const to = (u8*)out.to + ((u64)(u32)(tile >> 3) * (u32)out.pairs + it.y + row) * CHUNK +
                 (((tile & 1) * 4 + (g >> 1)) ^ row) * 16 + (tile >> 1 & 3) * 4;
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
    if (j * 8 >= it.z) break;
    const u32 own = pack_bf16(situ(acc[4 * j] * upper, acc[4 * j + 2] * lower),
                              situ(acc[4 * j + 1] * upper, acc[4 * j + 3] * lower));
    const u32 both = __byte_perm(own, __shfl_xor_sync(~0u, own, 4), pick);
    if (8 * j + row < it.z) *(u32*)(to + j * (8 * CHUNK)) = both;
  }
}
// Rows of the pairs, without the tensor scale: the reduction has it. They pass through shared
// memory, 16 tokens at a time in two buffers, so that a lane stores 16 bytes. The last four of
// eight tokens lie swapped in pairs: no two lanes then meet in a bank.
template <int N>
__device__ __forceinline__ void finish_second(const float (&acc)[N / 2], u32 stage_empty, const int4& it, int tile,
                                              int lane, const Output& out) {
  const int g = lane >> 2, t = lane & 3, mine = (lane >> 1) ^ (lane >> 3 & 1);
  int row[(N + 15) / 16];
#pragma unroll
  for (int r = 0; r < (N + 15) / 16; r++) row[r] = 16 * r + mine < it.z ? out.slots[it.y + 16 * r + mine] : -1;
  products_wait<0>();
  if (lane == 0) barrier_arrive(stage_empty);
  if (tile >= out.row_tiles) return;
  const u32 even = out.passage + ((2 * t) ^ (t >> 1)) * 32 + g * 4;
  const u32 odd = out.passage + ((2 * t + 1) ^ (t >> 1)) * 32 + g * 4;
  u16* const to = out.to + tile * 16 + (lane & 1) * 8;
#pragma unroll
  for (int r = 0; r < (N + 15) / 16; r++) {
    if (16 * r >= it.z) break;
    const int buffer = r % 2 * 512;
#pragma unroll
    for (int j = 2 * r; j < 2 * r + 2 && j < N / 8; j++) {
      store4(even + buffer + j % 2 * 256, pack_bf16(acc[4 * j], acc[4 * j + 2]));
      store4(odd + buffer + j % 2 * 256, pack_bf16(acc[4 * j + 1], acc[4 * j + 3]));
    }
    __syncwarp();
    u32 v[4];
    load16(v, out.passage + buffer + lane * 16);
    if (row[r] >= 0) *(uint4*)(to + (u64)(u32)row[r] * (u32)out.stride) = make_uint4(v[0], v[1], v[2], v[3]);
  }
  __syncwarp();
}
// The tiles of all lists. Each width has a loop of its own: with several in one the compiler
// runs short of registers and waits for every product.
template <int N, int... NARROWER>
__device__ __forceinline__ void multiply_tiles(Tiles& tiles, Turn& now, u32 codes_lane, u32 scales_lane, int steps,
                                               int warp, int lane, const Output& out, const Shifts& left,
                                               const Situ& situ) {
  float acc[N / 2];
  for (; tiles.more(); tiles.advance()) {
    const int4 it = tiles.items[tiles.item];
    const int tile = tiles.block * WARPS + warp;
    const u32 stage_empty = products<N>(acc, now, codes_lane, scales_lane, steps, lane == 0, left);
#if PHASE == 1
    finish_first<N>(acc, stage_empty, it, tile, lane, out, situ);
#else
    finish_second<N>(acc, stage_empty, it, tile, lane, out);
#endif
  }
  if constexpr (sizeof...(NARROWER) > 0) {
    tiles.next_list();
    multiply_tiles<NARROWER...>(tiles, now, codes_lane, scales_lane, steps, warp, lane, out, left, situ);
  }
}
extern "C" __global__ void __launch_bounds__(THREADS, 1) ENTRY(
    const u8* __restrict__ codes, const u8* __restrict__ scales, const float* __restrict__ alphas,
    const u16* x, const int* slots, const int4* items, const int* item_count, u16* __restrict__ out,
    int row_tiles, int chunks, int choices, int out_stride, float beta, float linear_beta, int pairs, int room) {
  extern __shared__ __align__(1024) u8 shared[];
  // By shuffle, so that the compiler knows it for the same in all lanes: without, descriptors
  // and barriers' addresses are moved to uniform registers at each use.
  const int tid = threadIdx.x, lane = tid & 31, warp = __shfl_sync(~0u, tid >> 5, 0);
  const u32 tokens_at = (shared_address(shared) + 1023) & ~1023u;
  const u32 ring = tokens_at + STAGES * STAGE_TOKENS;
  const u32 extra = ring + STAGES * STAGE_WEIGHTS;
  const u32 barriers = extra + EXTRA_BYTES;  // full of each stage, then empty
  if (tid < STAGES) {
    barrier_init(barriers + tid * 8, PHASE == 1 ? 1 : WARP + 1);
    barrier_init(barriers + (STAGES + tid) * 8, WARPS);
    barriers_publish();
  }
  __syncthreads();
  results_wait();
  next_may_start();
  const int steps = chunks / SPAN;
  Tiles tiles(items, item_count, room, (row_tiles + WARPS - 1) / WARPS);

  if (warp >= WARPS) {
    registers_give<COPIER_REGISTERS>();
    constexpr int widths[] = {WIDTHS};
    const int copier = warp - WARPS, piece = lane & 15;
    const u32 table = extra + copier * (TOKENS * 4);  // of each token its first 16 bytes
    u32 to_lane[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int row = 2 * k + (lane >> 4);
      to_lane[k] = tokens_at + (piece >> 3) * HALF_BYTES + row * CHUNK + (((piece & 7) ^ row) << 4);
    }
    if (PHASE == 2) publish();  // the activation: written by stores, read by bulk copies
    int stage = copier, step = copier;
    u32 parity = 0;
    for (int list = 0; list < sizeof(widths) / sizeof(int); list++) {
      if (list) tiles.next_list();
      for (; tiles.more(); tiles.advance(), step -= steps) {
        if (step >= steps) continue;
        const int4 it = tiles.items[tiles.item];
        const u32 first = (u32)(it.x * row_tiles + tiles.block * WARPS) * (u32)chunks;
        const u32 last = (u32)(row_tiles - 1 - tiles.block * WARPS);
        if (PHASE == 1) {
          __syncwarp();  // the table before is read
          int slot[(TOKENS + WARP - 1) / WARP];
#pragma unroll
          for (int n = lane, i = 0; i < (TOKENS + WARP - 1) / WARP; i++, n += WARP)
            slot[i] = n < it.z ? slots[it.y + n] : 0;
#pragma unroll
          for (int n = lane, i = 0; i < (TOKENS + WARP - 1) / WARP; i++, n += WARP)
            if (n < it.z)  // of eight: 0, 2, 4, 6, 1, 3, 5, 7
              store4(table + ((n & ~7) + (n & 1) * 4 + (n >> 1 & 3)) * 4,
                     (u32)slot[i] / (u32)choices * (u32)(chunks * (CHUNK / 8)));
          __syncwarp();
        }
        for (; step < steps; step += COPIERS) {
          const u32 full = barriers + stage * 8;
          barrier_wait(full + STAGES * 8, parity ^ 1);
          if (PHASE == 2) {
            if (lane == 0) barrier_arrive_expect(full, SPAN * 2 * CHUNK * it.z);
            __syncwarp();
            if (lane < 2 * SPAN)
              copy_bulk(tokens_at + stage * STAGE_TOKENS + lane * HALF_BYTES,
                        (const u8*)x + ((u64)(u32)(step * (2 * SPAN) + lane) * (u32)pairs + it.y) * CHUNK,
                        it.z * CHUNK, full);
          }
          copy_weights(ring + stage * STAGE_WEIGHTS, codes, scales, first + step * SPAN, last, chunks, lane);
          if (PHASE == 2) {
            barrier_arrive_after_copies(full);
          } else {
            gather_tokens(to_lane, stage * STAGE_TOKENS, table, (const u8*)x + step * (SPAN * CHUNK * 2), it.z, lane);
            copies_commit();
            copies_wait<0>();
            // Here and not by those who multiply: it waits for all that a thread has in flight.
            publish();
            __syncwarp();
            if (lane == 0) barrier_arrive(full);
          }
          stage += COPIERS;
          if (stage >= STAGES) {
            stage -= STAGES;
            parity ^= 1;
          }
        }
      }
    }
    copies_commit();
    copies_wait<0>();
    return;
  }
  registers_take<REGISTERS>();

  const u32 codes_lane = kept(ring + warp * WARP_WEIGHTS + lane * 16);
  const u32 scales_lane = kept(ring + warp * WARP_WEIGHTS + SPAN * CODES + lane * 4);
  const Shifts left(chunks);
  const Situ situ(beta, linear_beta);
  const Output output = {alphas, slots, out, row_tiles, out_stride, pairs, extra + warp * 1024};
  Turn now = {0, 0, barriers, (tokens_at >> 4) | 0x10000u, 0};
  multiply_tiles<WIDTHS>(tiles, now, codes_lane, scales_lane, steps, warp, lane, output, left, situ);
}
#endif

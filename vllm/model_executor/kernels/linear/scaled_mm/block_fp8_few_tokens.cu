// SPDX-License-Identifier: Apache-2.0
// Block-scaled FP8 weights times few BF16 tokens for SM90, weight-only. Compiled at run
// time by NVRTC, once for each width TOKENS; behind vllm/utils/sm90.cu.
//
// A block multiplies 128 rows with all tokens over a share of the columns: two warpgroups,
// 64 rows each. Four more warps copy weights and tokens of STAGES blocks of 128 columns into
// a ring in shared memory. Weights are the first operand of the tensor cores, widened to
// BF16 in registers; tokens are the second, from shared memory. The blocks of a cluster have
// the shares of one row group: each sends its sums to the one that adds them up, in order.

#define WARPS 8
#define COPIERS 4
#define THREADS ((WARPS + COPIERS) * 32)
#define CODES (128 * 128)
#define TILE_BYTES (TOKENS * 128)  // 64 columns of all tokens
#define STAGE_BYTES (CODES + 2 * TILE_BYTES)
// A thread has 168 registers at the start; then these, together not more.
#define REGISTERS 208
#define COPIER_REGISTERS 88

// Four codes to BF16: sign and magnitude move to BF16's places, which divides by 2^120, and a
// product with 2^120 puts that right, subnormals included. Each step is exact. Left shifts are
// products, for the logic pipe is the busiest. The code for NaN would become 480; loading
// refuses it.
__device__ __forceinline__ void widen(u32& first, u32& second, u32 codes, u32 more, u32 order, u32 by4, u32 by8) {
  const u32 w = bytes_of(codes, more, order);
  const u32 low = ((w * by8) & 0x80008000u) | ((w * by4) & 0x07F007F0u);
  const u32 high = (w & 0x80008000u) | ((w >> 4) & 0x07F007F0u);
  first = scaled_here(low, 0x7B807B80u);
  second = scaled_here(high, 0x7B807B80u);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) block_fp8_few_tokens(
    const u8* __restrict__ weight, const float* __restrict__ scale, const u16* x, u16* out, int tokens,
    int x_stride, int blocks, int share) {
  extern __shared__ u8 shared[];
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
  const int first = blockIdx.y * share, count = min(share, blocks - first), split = gridDim.y;
  const u32 ring = (shared_address(shared) + 1023) & ~1023u;
  const u32 full = ring + STAGES * STAGE_BYTES, empty = full + STAGES * 8;  // one of each per stage
  const u32 received = empty + STAGES * 8, scales = received + 8, sums = (scales + share * 4 + 15) & ~15u;
  if (tid < STAGES) {
    barrier_init(full + tid * 8, COPIERS * 32);
    barrier_init(empty + tid * 8, WARPS);
    if (tid == 0) barrier_init(received, 1);
    barriers_publish();
  }
  __syncthreads();
  cluster_arrive();  // others may send sums once all blocks of the cluster run

  if (warp >= WARPS) {
    registers_give<COPIER_REGISTERS>();
    const int copier = warp - WARPS;
    const long long columns = blocks * 128;
    // Of a block of columns a copier has 32 rows of the weight, four at a time, and every fourth
    // piece of four tokens and 64 columns. Both lie in the 128-byte swizzle.
    const int four = lane >> 3, piece = lane & 7, row = copier * 32 + four;
    const u8* weights = weight + (blockIdx.x * 128LL + row) * columns + first * 128 + piece * 16;
    const u32 weights_to = ring + row * 128 + ((piece ^ four) << 4);
    const int n = (copier >> 1) * 4 + four;
    const u8* tokens_from = (const u8*)(x + (long long)n * x_stride + (first * 2 + (copier & 1)) * 64 + piece * 8);
    const u32 tokens_to = ring + CODES + (copier & 1) * TILE_BYTES + n * 128 + ((piece ^ n) << 4);
    auto copy_weights = [&](int stage) {
      const u32 to = weights_to + stage * STAGE_BYTES;
      const u8* from = weights;
#pragma unroll
      for (int i = 0; i < 8; i++, from += 4 * columns) copy16((i & 1 ? to ^ 64 : to) + i * 512, from);
      weights += 128;
    };
    auto copy_tokens = [&](int stage) {
      const u8* from = tokens_from;
#pragma unroll
      for (int i = 0; i < TOKENS / 8; i++, from += 16LL * x_stride)
        if (n + 8 * i < tokens) copy16(tokens_to + stage * STAGE_BYTES + i * 1024, from);  // others' sums are dropped
      tokens_from += 256;
      barrier_arrive_after_copies(full + stage * 8);
    };
    // Weights of the first two blocks before the tokens: the kernel in front may still run.
    copy_weights(0);
    if (count > 1) copy_weights(1);
    results_wait();
    copy_tokens(0);
    if (count > 1) copy_tokens(1);
    u32 parity = 1;
    for (int b = 2, stage = 2; b < count; b++) {
      if (stage == STAGES) stage = 0, parity ^= 1;
      barrier_wait(empty + stage * 8, parity);
      copy_weights(stage);
      copy_tokens(stage);
      stage++;
    }
    copies_wait_all();
    cluster_wait();
    return;
  }
  registers_take<REGISTERS>();
  for (int i = tid; i < count; i += WARPS * 32) store_float(scales + i * 4, scale[blockIdx.x * blocks + first + i]);
  warps_meet<WARPS * 32>(1);

  // The tensor cores take columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of 16 from lane t of a quad: halves
  // of two words, one in either half of the row's 16 bytes.
  const u32 codes_lane = ring + (warp * 16 + g) * 128 + (t >> 1) * 4, order = t & 1 ? 0x7362 : 0x5140;
  const u32 by4 = 16 + ((u32)blocks >> 30), by8 = by4 * 16;  // not known to the compiler, or it would shift
  float total[TOKENS / 2] = {}, acc[2][TOKENS / 2];
  u32 a[2][4][4], codes[4][4];
  int stage = 0, b = 0;
  u32 parity = 0;
  auto add = [&](const float (&from)[TOKENS / 2], int block) {
    const float factor = load_float(scales + min(block, count - 1) * 4);
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) total[i] = block < count ? total[i] + factor * from[i] : total[i];
  };
  auto fetch = [&](int i) {
    const u32 from = codes_lane + (stage + (i >> 1)) * STAGE_BYTES;
#pragma unroll
    for (int s = 0; s < 4; s++) {
      const u32 at = from + (((i & 1) * 4 + s) ^ g) * 16;
      codes[s][0] = load4(at), codes[s][1] = load4(at + 8);
      codes[s][2] = load4(at + 1024), codes[s][3] = load4(at + 1032);
    }
  };
  auto widen_half = [&](u32 (&to)[4][4]) {
#pragma unroll
    for (int s = 0; s < 4; s++) {
      widen(to[s][0], to[s][2], codes[s][0], codes[s][1], order, by4, by8);
      widen(to[s][1], to[s][3], codes[s][2], codes[s][3], order, by4, by8);
    }
  };
  auto await = [&](int p) {
    if (b + p < count) barrier_wait(full + (stage + p) * 8, parity);
    publish_shared();  // copied, then read by the tensor cores
  };
  await(0);
  fetch(0);
  widen_half(a[0]);
  await(1);
  // Two blocks of columns in turn, in halves; each is widened while the one before is multiplied.
  // One past the last is multiplied and dropped: a branch would make the compiler wait.
  while (b < count) {
    const u32 low = ((ring + CODES + stage * STAGE_BYTES) >> 4) | 0x10000u;
    const u32 used = empty + stage * 8;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      products_begin();
#pragma unroll
      for (int s = 0; s < 4; s++)
        wgmma<TOKENS>(acc[i >> 1], a[i & 1][s],
                      descriptor(low + (i >> 1) * (STAGE_BYTES >> 4) + (i & 1) * (TILE_BYTES >> 4) + s * 2), i & 1 || s);
      products_commit();
      if (i < 3) {
        fetch(i + 1);
      } else {
        b += 2, stage += 2;
        if (stage == STAGES) stage = 0, parity ^= 1;
        await(0);
        fetch(0);
      }
      products_wait<1>();  // the half before is done
      if (i == 2) add(acc[0], b);
      widen_half(a[(i + 1) & 1]);
    }
    await(1);  // here, since the compiler moves widening behind a wait for all, but not over a branch
    products_wait<0>();
    add(acc[1], b - 1);
    if (lane < 2) barrier_arrive(used + lane * 8);
  }

  // Unit (warp, 8 tokens) u is added up by its warp of block u % split, as its unit u / split, from
  // all blocks' sums in the order of their ranks.
  cluster_wait();
  const int groups = (tokens + 7) / 8, rank = blockIdx.y, first_unit = warp * groups;
  if (tid == 0) barrier_arrive_expect(received, (WARPS * groups - rank + split - 1) / split * (split - 1) * 512);
  int owner = first_unit % split;
  u32 at = sums + (first_unit / split * split + rank) * 512 + lane * 16;
#pragma unroll
  for (int j = 0; j < TOKENS / 8; j++) {
    if (j < groups && owner != rank) send(at, received, owner, total + 4 * j);
    if (j < groups && owner == rank) store_floats(at, total + 4 * j);  // its own lane reads it
    if (++owner == split) owner = 0, at += split * 512;
  }
  barrier_wait(received, 0);
  const int first_own = (rank - first_unit % split + split) % split;
  u32 from = sums + (first_unit + first_own) / split * split * 512 + lane * 16;
#pragma unroll 2
  for (int j = first_own; j < groups; j += split) {
    float sum[4] = {};
#pragma unroll 2
    for (int q = 0; q < split; q++, from += 512) {
      u32 v[4];
      load16(v, from);
#pragma unroll
      for (int i = 0; i < 4; i++) sum[i] += __uint_as_float(v[i]);
    }
    // Lanes of neighbouring rows exchange, so that each writes two rows of one token.
    const float up = __shfl_xor_sync(~0u, g & 1 ? sum[0] : sum[1], 4);
    const float down = __shfl_xor_sync(~0u, g & 1 ? sum[2] : sum[3], 4);
    const int token = 8 * j + 2 * t + (g & 1);
    u16* const to = out + (long long)token * gridDim.x * 128 + blockIdx.x * 128 + warp * 16 + (g & ~1);
    if (token < tokens) {
      *(u32*)to = g & 1 ? pack_bf16(up, sum[1]) : pack_bf16(sum[0], up);
      *(u32*)(to + 8) = g & 1 ? pack_bf16(down, sum[3]) : pack_bf16(sum[2], down);
    }
  }
}

// Copies between device memory and pinned host memory that the device has mapped, and checksums of pages.
//
// Compiled when the device is opened, without any header.

typedef unsigned long long u64;

// Where a piece goes and where it comes from.
struct Pair {
  u64 to;
  u64 from;
};

static_assert(sizeof(Pair) == 16, "lists are written by the host");

// A warp moves so much at a time: four loads of 16 bytes are in flight in each lane, which hides the way over the
// link.
constexpr unsigned WARP_LANES = 32;
constexpr unsigned LOADS = 4;
constexpr unsigned CHUNK_BYTES = WARP_LANES * 16 * LOADS;

// All lanes of a warp copy `bytes` bytes, no more than a chunk.
__device__ __forceinline__ void copy_chunk(u64 to, u64 from, unsigned bytes, unsigned lane) {
  if ((to | from) % 16 != 0) {
    // Nothing wider than a byte is sure to be aligned on both sides.
    for (unsigned at = lane; at < bytes; at += WARP_LANES) {
      reinterpret_cast<char *>(to)[at] = reinterpret_cast<const char *>(from)[at];
    }
    return;
  }
  const int4 *source = reinterpret_cast<const int4 *>(from);
  int4 *target = reinterpret_cast<int4 *>(to);
  if (bytes == CHUNK_BYTES) {
    int4 loaded[LOADS];
#pragma unroll
    for (unsigned load = 0; load < LOADS; ++load) loaded[load] = source[lane + load * WARP_LANES];
#pragma unroll
    for (unsigned load = 0; load < LOADS; ++load) target[lane + load * WARP_LANES] = loaded[load];
    return;
  }
  unsigned wide = bytes / 16;
  for (unsigned at = lane; at < wide; at += WARP_LANES) target[at] = source[at];
  for (unsigned at = wide * 16 + lane; at < bytes; at += WARP_LANES) {
    reinterpret_cast<char *>(to)[at] = reinterpret_cast<const char *>(from)[at];
  }
}

// Copies `bytes` bytes from `offset` on of every piece of a list. Warps take chunks in turn, whatever piece they are of; their
// number fits in 32 bits, or eight terabytes would be copied at once. Blocks are small, with few registers: they have room
// beside those of steps.
extern "C" __global__ void __launch_bounds__(256, 8)
    copy_parts(const Pair *list, unsigned pairs, u64 offset, u64 bytes) {
  unsigned lane = threadIdx.x % WARP_LANES;
  unsigned warp = (blockIdx.x * blockDim.x + threadIdx.x) / WARP_LANES;
  unsigned warps = gridDim.x * blockDim.x / WARP_LANES;
  unsigned chunks = static_cast<unsigned>((bytes + CHUNK_BYTES - 1) / CHUNK_BYTES);
  for (unsigned work = warp; work < pairs * chunks; work += warps) {
    Pair pair = list[work / chunks];
    u64 at = static_cast<u64>(work % chunks) * CHUNK_BYTES;
    u64 left = bytes - at;
    unsigned here = left < CHUNK_BYTES ? static_cast<unsigned>(left) : CHUNK_BYTES;
    copy_chunk(pair.to + offset + at, pair.from + offset + at, here, lane);
  }
}

// Pieces, each with its length.
constexpr unsigned FETCHED_MAX = 8;
struct Fetched {
  struct {
    u64 to, from, bytes;
  } pieces[FETCHED_MAX];
};

// Copies a few pieces, a block for each: lists come to the device so.
extern "C" __global__ void __launch_bounds__(1024) fetch(const __grid_constant__ Fetched fetched) {
  u64 to = fetched.pieces[blockIdx.x].to, from = fetched.pieces[blockIdx.x].from, bytes = fetched.pieces[blockIdx.x].bytes;
  unsigned lane = threadIdx.x % WARP_LANES;
  unsigned warps = blockDim.x / WARP_LANES;
  for (u64 at = threadIdx.x / WARP_LANES * CHUNK_BYTES; at < bytes; at += warps * CHUNK_BYTES) {
    u64 left = bytes - at;
    unsigned here = left < CHUNK_BYTES ? static_cast<unsigned>(left) : CHUNK_BYTES;
    copy_chunk(to + at, from + at, here, lane);
  }
}

// What a word adds to the checksum of its page. The same is written in Rust, and must stay the same.
__device__ __forceinline__ u64 mixed(u64 word, u64 place) {
  u64 mix = (word ^ (place + 1) * 0x9e3779b97f4a7c15ull) * 0xd6e8feb86659fd93ull;
  mix ^= mix >> 32;
  mix *= 0xd6e8feb86659fd93ull;
  return mix ^ mix >> 32;
}

// The checksums of the first piece of every pair, a block for each. Words are of 8 bytes, the last filled up with zeros.
extern "C" __global__ void __launch_bounds__(256)
    checksums(const Pair *list, u64 bytes, u64 *sums) {
  __shared__ u64 parts[256];
  u64 from = list[blockIdx.x].to;
  u64 words = (bytes + 7) / 8;
  u64 sum = 0;
  for (u64 place = threadIdx.x; place < words; place += blockDim.x) {
    u64 word = 0;
    if (from % 8 == 0 && place * 8 + 8 <= bytes) {
      word = reinterpret_cast<const u64 *>(from)[place];
    } else {
      for (u64 at = place * 8; at < bytes && at < place * 8 + 8; ++at) {
        word |= static_cast<u64>(reinterpret_cast<const unsigned char *>(from)[at]) << (at % 8 * 8);
      }
    }
    sum += mixed(word, place);
  }
  parts[threadIdx.x] = sum;
  __syncthreads();
  for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) sums[blockIdx.x] = parts[0];
}

// Copies between device memory and pinned host memory that the device has mapped, and checksums of pages.
//
// Compiled when the device is opened, without any header.

typedef unsigned long long u64;

// Destination and source of a piece.
struct Pair {
  u64 to;
  u64 from;
};

static_assert(sizeof(Pair) == 16, "lists are written by the host");

// Bytes that a warp moves at a time: four loads of 16 bytes in flight in each lane, which hides the
// latency of the link.
constexpr unsigned WARP_LANES = 32;
constexpr unsigned LOADS = 4;
constexpr unsigned CHUNK_BYTES = WARP_LANES * 16 * LOADS;

// Copies `bytes` bytes with all lanes of a warp; at most a chunk.
__device__ __forceinline__ void copy_chunk(u64 to, u64 from, unsigned bytes, unsigned lane) {
  if ((to | from) % 16 != 0) {
    // Only single bytes are aligned on both sides.
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

// Copies `bytes` bytes from `offset` on of every piece of a list. Warps take chunks in turn across
// pieces. The chunk count fits in 32 bits unless a copy exceeds eight terabytes. Blocks are small
// and use few registers, so that they fit beside the blocks of steps.
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

// Copies a few pieces, one block for each. Lists are uploaded this way.
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

// Returns the contribution of a word to the checksum of its page. Must match the Rust
// implementation.
__device__ __forceinline__ u64 mixed(u64 word, u64 place) {
  u64 mix = (word ^ (place + 1) * 0x9e3779b97f4a7c15ull) * 0xd6e8feb86659fd93ull;
  mix ^= mix >> 32;
  mix *= 0xd6e8feb86659fd93ull;
  return mix ^ mix >> 32;
}

// Computes the checksum of the first piece of every pair, one block for each. Words have 8 bytes;
// the last is padded with zeros.
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

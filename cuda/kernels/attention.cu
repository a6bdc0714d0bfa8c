// Attention over pages, on tensor cores.
//
// The result of a query depends on its position and the keys up to it alone, to the bit. It does
// not depend on the kernel or on the rest of the batch. Keys are visited in tiles of TILE at fixed
// positions. The softmax restarts every SEGMENT keys (a definition passed with the model's sizes),
// and segments are joined in order. `attend` computes all segments of many queries; `attend_few`
// computes one segment of a few queries, so that long contexts are spread over the device; `join`
// joins those segments. Sums over the keys of a tile are kept separately for each PART keys,
// because `attend_few` assigns these to different warps.

#define TILE 64
#define PART 16
// Elements of a head, rounded up for tensor cores.
#define DEPTH ((HEAD_DIM + 15) / 16 * 16)
#define CHUNKS (DEPTH / 8)
// The swizzle permutes groups of a power of two of chunks: the largest group that divides a row
// evenly, so that no chunk leaves its row.
#define SWIZZLE (CHUNKS % 8 == 0 ? 7 : CHUNKS % 4 == 0 ? 3 : 1)
#define QUERIES_WIDTH (KV_HEADS * GROUP * HEAD_DIM)
#define QKV_WIDTH (KV_HEADS * (GROUP + 2) * HEAD_DIM)

// Consecutive tokens of a sequence, and the range of keys that they attend to.
struct Item {
    u32 row;          // of the page table
    u32 first_token;  // in the batch
    u32 tokens;
    u32 position;     // of the first token
    u32 keys_from, keys_end;
    u32 partial;      // place of the partial result, or WHOLE for a final result; a partial result covers one segment
    u32 unused;
};
#define WHOLE 0xffffffffu
#define FEW_ROWS 16

struct Pages {
    const u8 *kv;
    u64 page_bytes, layer_offset;
    const u32 *table;
    u32 row_entries;
};

#ifndef ON_CPU

__device__ __forceinline__ void load_four(u32 *to, u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address));
}
__device__ __forceinline__ void load_four_turned(u32 *to, u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address));
}
__device__ __forceinline__ void multiply(float *sums, const u32 *a, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void put_shared(u32 address, u32 value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

#endif

// Address of eight elements of a row in shared memory, swizzled over its banks.
__device__ __forceinline__ u32 spot(u32 row, u32 chunk) { return (row * CHUNKS + (chunk ^ (row & SWIZZLE))) * 16; }

// Address of the partial result of a row in a segment: its highest score, the sum of its weights,
// and the weighted values. Items take space in units of FEW_ROWS rows.
__device__ __forceinline__ float *partial_at(float *partials, u32 partial, u32 units, u32 kv_head, u32 row) {
    return partials + (((u64)partial * KV_HEADS + kv_head * units) * FEW_ROWS + row) * (DEPTH + 2);
}

// Loads the queries of an item's rows, and zeros for missing rows. A row is one query head of a
// token's group.
template <int ROWS, int THREADS>
__device__ __forceinline__ void load_queries(u32 to, const u16 *qkv, const Item &item, u32 kv_head) {
    for (u32 at = threadIdx.x; at < ROWS * CHUNKS; at += THREADS) {
        u32 row = at / CHUNKS, chunk = at % CHUNKS, token = row / GROUP, head = kv_head * GROUP + row % GROUP;
        bool is_there = token < item.tokens && chunk * 8 < HEAD_DIM;
        u64 from = (u64)(item.first_token + token) * QKV_WIDTH + head * HEAD_DIM + chunk * 8;
        copy_behind(to + spot(row, chunk), qkv + (is_there ? from : 0), is_there);
    }
}

// Loads a tile's keys or values, and zeros from `end` on.
template <int THREADS>
__device__ __forceinline__ void load_tile(
    u32 to, const Pages &pages, const Item &item, u32 kv_head, u32 is_value, u32 tile_start) {
    const u8 *layer = pages.kv + pages.layer_offset;
    const u32 *table = pages.table + (u64)item.row * pages.row_entries;
#pragma unroll
    for (u32 at = threadIdx.x; at < TILE * CHUNKS; at += THREADS) {
        u32 key = at / CHUNKS, chunk = at % CHUNKS, position = tile_start + key;
        bool is_there = position < item.keys_end && chunk * 8 < HEAD_DIM;
        const u16 *from = (const u16 *)layer;
        if (is_there) {
            from = (const u16 *)(layer + table[position / PAGE_SIZE] * pages.page_bytes);
            from += place_in_layer(kv_head, is_value, position % PAGE_SIZE) + chunk * 8;
        }
        copy_behind(to + spot(key, chunk), from, is_there);
    }
}

// Running softmax state of a row in a segment.
struct Running {
    float highest;
    float sums[TILE / PART];
};

// Joins the result of the next segment: `found` with its highest score and its sum of weights.
struct Joined {
    float highest, sum;
};
__device__ __forceinline__ float2 join_weights(Joined &joined, float highest, float sum) {
    float both = fmaxf(joined.highest, highest);
    float before = power_of_two(joined.highest - both), next = power_of_two(highest - both);
    joined.sum = __fmaf_rn(joined.sum, before, __fmul_rn(sum, next));
    joined.highest = both;
    return make_float2(before, next);
}
__device__ __forceinline__ float join_found(float joined, float found, float2 weights) {
    return __fmaf_rn(joined, weights.x, __fmul_rn(found, weights.y));
}
// Returns the sum of a row's weights over the four threads that hold its columns.
__device__ __forceinline__ float over_quad(float part) {
    part = __fadd_rn(part, __shfl_xor_sync(~0u, part, 1));
    return __fadd_rn(part, __shfl_xor_sync(~0u, part, 2));
}
// Returns the sum over all parts of the tiles.
__device__ __forceinline__ float segment_sum(const Running &running) {
    float sum = 0.0f;
    for (int part = 0; part < TILE / PART; part++) sum = __fadd_rn(sum, over_quad(running.sums[part]));
    return sum;
}
// Joins a row's segment to the previous ones, which are stored at `kept`; `found` then holds the
// total. A thread holds some columns of two rows.
__device__ __forceinline__ void join_segment(
    Joined &joined, const Running &running, int half, float (*found)[4], float *kept, bool is_first) {
    float2 both = join_weights(joined, running.highest, segment_sum(running));
#pragma unroll
    for (int block = 0; block < DEPTH / 8; block++) {
        float2 *place = (float2 *)(kept + block * 8);
        float2 before = is_first ? make_float2(0.0f, 0.0f) : *place;
        before.x = join_found(before.x, found[block][half * 2], both);
        before.y = join_found(before.y, found[block][half * 2 + 1], both);
        *place = before;
        found[block][half * 2] = before.x, found[block][half * 2 + 1] = before.y;
    }
}
// Returns the final value of an element. Adding zero turns negative zeros into positive ones.
__device__ __forceinline__ float final_value(float found, float share) { return __fadd_rn(__fmul_rn(found, share), 0.0f); }

// Returns the scale of scores: the softmax uses powers of two.
__device__ __forceinline__ float score_scale() { return 1.4426950408889634f / sqrtf((float)HEAD_DIM); }

// Returns the weight of a score.
__device__ __forceinline__ float weight_of(float score, float scale, float highest) {
    return power_of_two(__fmaf_rn(score, scale, -highest));
}
// Returns the reference score for weights; 0 for a row without visible keys so far.
__device__ __forceinline__ float reference(float highest) { return highest == -INFINITE ? 0.0f : highest; }

#define ROWS 128
#define THREADS 256
#define STAGES 2

// Writes a row's result, or stores it as a partial result. A thread holds some elements of two
// rows.
__device__ __forceinline__ void put_row(
    const Item &item, u32 kv_head, u32 row, u32 column, int half, float highest, float sum, const float (*found)[4],
    u16 *found_out, float *partials) {
    u32 token = row / GROUP;
    if (token >= item.tokens) return;
    if (item.partial != WHOLE) {
        float *to = partial_at(partials, item.partial, ROWS / FEW_ROWS, kv_head, row);
        if (column == 0) *(float2 *)to = make_float2(highest, sum);
#pragma unroll
        for (int block = 0; block < DEPTH / 8; block++)
            *(float2 *)(to + 2 + block * 8 + column) = make_float2(found[block][half * 2], found[block][half * 2 + 1]);
        return;
    }
    float share = 1.0f / sum;
    u16 *to = found_out + (u64)(item.first_token + token) * QUERIES_WIDTH + (kv_head * GROUP + row % GROUP) * HEAD_DIM;
#pragma unroll
    for (int block = 0; block < DEPTH / 8; block++)
        if (block * 8 < HEAD_DIM)
            *(u32 *)(to + block * 8 + column) =
                pair_of(final_value(found[block][half * 2], share), final_value(found[block][half * 2 + 1], share));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
attend(const u16 *qkv, u16 *found_out, Pages pages, const Item *items, float *partials) {
    follow();
    extern __shared__ __align__(1024) u8 memory[];
    const u32 TILE_BYTES = TILE * DEPTH * 2;
    u32 queries_at = shared_address(memory), tiles_at = queries_at + ROWS * DEPTH * 2;
    float *joined_found = (float *)(memory + ROWS * DEPTH * 2 + STAGES * 2 * TILE_BYTES);
    u32 item_count = gridDim.x / KV_HEADS;
    Item item = items[blockIdx.x % item_count];
    // Blocks of one head are consecutive, so that its keys and values stay in the L2 cache.
    u32 kv_head = blockIdx.x / item_count;
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane / 4, column = lane % 4 * 2;
    float scale = score_scale();

    load_queries<ROWS, THREADS>(queries_at, qkv, item, kv_head);
    load_tile<THREADS>(tiles_at, pages, item, kv_head, 0, item.keys_from);
    end_group();
    load_tile<THREADS>(tiles_at + TILE_BYTES, pages, item, kv_head, 1, item.keys_from);
    end_group();
    wait_for_groups<1>();
    __syncthreads();
    u32 queries[DEPTH / 16][4];
#pragma unroll
    for (int step = 0; step < DEPTH / 16; step++)
        load_four(queries[step], queries_at + spot(warp * 16 + lane % 16, step * 2 + lane / 16));

    // This thread holds some columns of two rows.
    u32 positions[2];
    for (int half = 0; half < 2; half++)
        positions[half] = item.position + (warp * 16 + quad + half * 8) / GROUP;
    Running running[2];
    Joined joined[2] = {{-INFINITE, 0.0f}, {-INFINITE, 0.0f}};
    float found[DEPTH / 8][4];
    u32 last_of_warp = item.position + (warp * 16 + 15) / GROUP, first_of_warp = item.position + warp * 16 / GROUP;
    u32 tile_count = (item.keys_end - item.keys_from + TILE - 1) / TILE;
    u32 segment_count = (tile_count + SEGMENT / TILE - 1) / (SEGMENT / TILE);

    for (u32 tile = 0; tile < tile_count; tile++) {
        u32 tile_start = item.keys_from + tile * TILE, place = tile % STAGES;
        u32 keys_at = tiles_at + place * 2 * TILE_BYTES, values_at = keys_at + TILE_BYTES;
        if (tile % (SEGMENT / TILE) == 0) {
            for (int half = 0; half < 2; half++) {
                running[half].highest = -INFINITE;
                for (int part = 0; part < TILE / PART; part++) running[half].sums[part] = 0.0f;
            }
#pragma unroll
            for (int block = 0; block < DEPTH / 8; block++)
                for (int at = 0; at < 4; at++) found[block][at] = 0.0f;
        }
        // The next keys are loaded while this tile is processed.
        if (tile + 1 < tile_count) {
            u32 next = tiles_at + (tile + 1) % STAGES * 2 * TILE_BYTES;
            load_tile<THREADS>(next, pages, item, kv_head, 0, tile_start + TILE);
            end_group();
            wait_for_groups<2>();
        } else {
            wait_for_groups<1>();
        }
        __syncthreads();
        bool is_seen = tile_start <= last_of_warp;
        u32 weights[TILE / 16][4];
        if (is_seen) {
            float scores[TILE / 8][4];
#pragma unroll
            for (int block = 0; block < TILE / 8; block++)
                for (int at = 0; at < 4; at++) scores[block][at] = 0.0f;
#pragma unroll
            for (int step = 0; step < DEPTH / 16; step++) {
#pragma unroll
                for (int block = 0; block < TILE / 8; block += 2) {
                    u32 keys[4];
                    load_four(keys, keys_at + spot(block * 8 + lane % 8 + lane / 16 * 8, step * 2 + lane / 8 % 2));
                    multiply(scores[block], queries[step], keys[0], keys[1]);
                    multiply(scores[block + 1], queries[step], keys[2], keys[3]);
                }
            }
            if (tile_start + TILE - 1 > first_of_warp) {
#pragma unroll
                for (int block = 0; block < TILE / 8; block++)
                    for (int at = 0; at < 4; at++)
                        if (tile_start + block * 8 + column + at % 2 > positions[at / 2]) scores[block][at] = -INFINITE;
            }
            bool is_higher = false;
            float corrections[2], references[2];
            for (int half = 0; half < 2; half++) {
                float highest = -INFINITE;
#pragma unroll
                for (int block = 0; block < TILE / 8; block++)
                    highest = fmaxf(highest, fmaxf(scores[block][half * 2], scores[block][half * 2 + 1]));
                highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
                highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
                highest = fmaxf(running[half].highest, __fmul_rn(highest, scale));
                references[half] = reference(highest);
                corrections[half] = power_of_two(running[half].highest - references[half]);
                is_higher |= running[half].highest != highest;
                running[half].highest = highest;
            }
            if (__any_sync(~0u, is_higher)) {
                for (int half = 0; half < 2; half++)
                    for (int part = 0; part < TILE / PART; part++) running[half].sums[part] *= corrections[half];
#pragma unroll
                for (int block = 0; block < DEPTH / 8; block++)
                    for (int at = 0; at < 4; at++) found[block][at] *= corrections[at / 2];
            }
#pragma unroll
            for (int block = 0; block < TILE / 8; block++) {
                float each[4];
                for (int at = 0; at < 4; at++) {
                    each[at] = weight_of(scores[block][at], scale, references[at / 2]);
                    float *sum = &running[at / 2].sums[block * 8 / PART];
                    *sum = __fadd_rn(*sum, each[at]);
                }
                weights[block / 2][block % 2 * 2] = pair_of(each[0], each[1]);
                weights[block / 2][block % 2 * 2 + 1] = pair_of(each[2], each[3]);
            }
        }
        // The values have arrived. All threads have left the buffer of the next ones, so it is
        // free.
        if (tile + 1 < tile_count) {
            u32 next = tiles_at + (tile + 1) % STAGES * 2 * TILE_BYTES + TILE_BYTES;
            load_tile<THREADS>(next, pages, item, kv_head, 1, tile_start + TILE);
            end_group();
            wait_for_groups<2>();
        } else {
            wait_for_groups<0>();
        }
        __syncthreads();
        if (is_seen) {
#pragma unroll
            for (int step = 0; step < TILE / 16; step++) {
#pragma unroll
                for (int block = 0; block < DEPTH / 8; block += 2) {
                    u32 values[4];
                    load_four_turned(values, values_at + spot(step * 16 + lane % 16, block + lane / 16));
                    multiply(found[block], weights[step], values[0], values[1]);
                    multiply(found[block + 1], weights[step], values[2], values[3]);
                }
            }
        }
        if (segment_count > 1 && (tile % (SEGMENT / TILE) == SEGMENT / TILE - 1 || tile + 1 == tile_count)) {
            bool is_first = tile < SEGMENT / TILE;
            for (int half = 0; half < 2; half++) {
                float *row = joined_found + (warp * 16 + quad + half * 8) * DEPTH + column;
                join_segment(joined[half], running[half], half, found, row, is_first);
            }
        }
        __syncthreads();
    }

    for (int half = 0; half < 2; half++) {
        float sum = segment_count == 1 ? segment_sum(running[half]) : joined[half].sum;
        put_row(item, kv_head, warp * 16 + quad + half * 8, column, half, running[half].highest, sum, found, found_out, partials);
    }
}

// At most FEW_ROWS rows, whose keys four warps share. Each warp scores PART keys of a tile, and
// then computes some of the output elements.
#define FEW_THREADS 128
#define FEW_STAGES 3

// A thread's part of a few rows: some columns of two of them, one PART of each tile's scores for
// its warp, and BLOCKS times eight output elements.
template <int BLOCKS>
struct Few {
    u32 warp, lane, quad, column;
    u32 positions[2];
    float highest[2], sums[2], found[BLOCKS][4];

    __device__ __forceinline__ explicit Few(const Item &item)
        : warp(threadIdx.x / 32), lane(threadIdx.x % 32), quad(lane / 4), column(lane % 4 * 2) {
        for (int half = 0; half < 2; half++) {
            positions[half] = item.position + (quad + half * 8) / GROUP;
            highest[half] = -INFINITE, sums[half] = 0.0f;
        }
        for (int block = 0; block < BLOCKS; block++)
            for (int at = 0; at < 4; at++) found[block][at] = 0.0f;
    }

    // Masks invisible keys and publishes the highest scores to the other warps. A barrier must
    // follow.
    __device__ __forceinline__ void mask(float (*scores)[4], u32 tile_start, float (*highest_of)[FEW_ROWS]) const {
        for (int half = 0; half < 2; half++) {
            float own = -INFINITE;
            for (int block = 0; block < 2; block++)
                for (int at = half * 2; at < half * 2 + 2; at++) {
                    u32 position = tile_start + warp * PART + block * 8 + column + at % 2;
                    if (position > positions[half]) scores[block][at] = -INFINITE;
                    own = fmaxf(own, scores[block][at]);
                }
            own = fmaxf(own, __shfl_xor_sync(~0u, own, 1));
            own = fmaxf(own, __shfl_xor_sync(~0u, own, 2));
            if (lane % 4 == 0) highest_of[warp][quad + half * 8] = own;
        }
    }

    // Converts scores to softmax weights for all warps. A barrier must follow.
    __device__ __forceinline__ void softmax_weights(
        const float (*scores)[4], float scale, const float (*highest_of)[FEW_ROWS], u32 weights_at) {
        for (int half = 0; half < 2; half++) {
            u32 row = quad + half * 8;
            float all = -INFINITE;
            for (int other = 0; other < 4; other++) all = fmaxf(all, highest_of[other][row]);
            all = fmaxf(highest[half], __fmul_rn(all, scale));
            float by = reference(all), correction = power_of_two(highest[half] - by);
            highest[half] = all;
            sums[half] *= correction;
            for (int block = 0; block < BLOCKS; block++)
                found[block][half * 2] *= correction, found[block][half * 2 + 1] *= correction;
            for (int block = 0; block < 2; block++) {
                float first = weight_of(scores[block][half * 2], scale, by);
                float second = weight_of(scores[block][half * 2 + 1], scale, by);
                sums[half] = __fadd_rn(__fadd_rn(sums[half], first), second);
                put_shared(weight_spot(weights_at, row, warp * 2 + block) + column * 2, pair_of(first, second));
            }
        }
    }

    // Loads the weights of sixteen keys as a matrix operand.
    __device__ __forceinline__ void load_weights(u32 *weights, u32 weights_at, int step) const {
        load_four(weights, weight_spot(weights_at, lane % 16, step * 2 + lane / 16));
    }

    // Publishes the sums of weights to the other warps. A barrier must follow.
    __device__ __forceinline__ void publish_sums(float (*sum_of)[FEW_ROWS]) const {
        for (int half = 0; half < 2; half++) {
            float sum = over_quad(sums[half]);
            if (lane % 4 == 0) sum_of[warp][quad + half * 8] = sum;
        }
    }

    // Writes the rows' results, or stores them as partial results.
    __device__ __forceinline__ void put(
        const Item &item, u32 kv_head, const float (*sum_of)[FEW_ROWS], u16 *found_out, float *partials) const {
        for (int half = 0; half < 2; half++) {
            u32 row = quad + half * 8, token = row / GROUP;
            float sum = 0.0f;
            for (int other = 0; other < 4; other++) sum = __fadd_rn(sum, sum_of[other][row]);
            if (token < item.tokens) {
                u64 head = kv_head * GROUP + row % GROUP;
                for (int block = 0; block < BLOCKS; block++) {
                    u32 element = (warp * BLOCKS + block) * 8 + column;
                    if (element >= HEAD_DIM || warp * BLOCKS + block >= DEPTH / 8) continue;
                    float first = found[block][half * 2], second = found[block][half * 2 + 1];
                    if (item.partial == WHOLE) {
                        float share = 1.0f / sum;
                        u64 to = (u64)(item.first_token + token) * QUERIES_WIDTH + head * HEAD_DIM + element;
                        *(u32 *)(found_out + to) = pair_of(final_value(first, share), final_value(second, share));
                    } else {
                        float *to = partial_at(partials, item.partial, 1, kv_head, row);
                        *(float2 *)(to + 2 + element) = make_float2(first, second);
                        if (element == 0) *(float2 *)to = make_float2(highest[half], sum);
                    }
                }
            }
        }
    }

    static __device__ __forceinline__ u32 weight_spot(u32 weights_at, u32 row, u32 chunk) {
        return weights_at + (row * 8 + (chunk ^ (row & 7))) * 16;
    }
};

extern "C" __global__ void __launch_bounds__(FEW_THREADS, 2)
attend_few(
    const u16 *qkv, u16 *found_out, Pages pages, const Item *items, const u32 *item_count, float *partials) {
    follow();
    extern __shared__ __align__(1024) u8 memory[];
    const u32 TILE_BYTES = TILE * DEPTH * 2;
    u32 queries_at = shared_address(memory), weights_at = queries_at + FEW_ROWS * DEPTH * 2;
    u32 tiles_at = weights_at + FEW_ROWS * TILE * 2;
    __shared__ float highest_of[4][FEW_ROWS], sum_of[4][FEW_ROWS];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float scale = score_scale();
    const int BLOCKS = (DEPTH / 8 + 3) / 4;

    for (u32 job = blockIdx.x; job < *item_count * KV_HEADS; job += gridDim.x) {
        Item item = items[job / KV_HEADS];
        u32 kv_head = job % KV_HEADS;
        u32 tile_count = (item.keys_end - item.keys_from + TILE - 1) / TILE;
        load_queries<FEW_ROWS, FEW_THREADS>(queries_at, qkv, item, kv_head);
#pragma unroll
        for (u32 stage = 0; stage < FEW_STAGES - 1; stage++) {
            if (stage < tile_count) {
                u32 to = tiles_at + stage * 2 * TILE_BYTES, from = item.keys_from + stage * TILE;
                load_tile<FEW_THREADS>(to, pages, item, kv_head, 0, from);
                load_tile<FEW_THREADS>(to + TILE_BYTES, pages, item, kv_head, 1, from);
            }
            end_group();
        }
        Few<BLOCKS> few(item);

        for (u32 tile = 0; tile < tile_count; tile++) {
            u32 tile_start = item.keys_from + tile * TILE;
            u32 keys_at = tiles_at + tile % FEW_STAGES * 2 * TILE_BYTES, values_at = keys_at + TILE_BYTES;
            wait_for_groups<FEW_STAGES - 2>();
            __syncthreads();
            u32 ahead = tile + FEW_STAGES - 1;
            if (ahead < tile_count) {
                u32 to = tiles_at + ahead % FEW_STAGES * 2 * TILE_BYTES, from = item.keys_from + ahead * TILE;
                load_tile<FEW_THREADS>(to, pages, item, kv_head, 0, from);
                load_tile<FEW_THREADS>(to + TILE_BYTES, pages, item, kv_head, 1, from);
            }
            end_group();

            float scores[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll
            for (int step = 0; step < DEPTH / 16; step++) {
                u32 queries[4], keys[4];
                load_four(queries, queries_at + spot(lane % 16, step * 2 + lane / 16));
                load_four(keys, keys_at + spot(warp * PART + lane % 8 + lane / 16 * 8, step * 2 + lane / 8 % 2));
                multiply(scores[0], queries, keys[0], keys[1]);
                multiply(scores[1], queries, keys[2], keys[3]);
            }
            few.mask(scores, tile_start, highest_of);
            __syncthreads();
            few.softmax_weights(scores, scale, highest_of, weights_at);
            __syncthreads();
#pragma unroll
            for (int step = 0; step < TILE / 16; step++) {
                u32 weights[4];
                few.load_weights(weights, weights_at, step);
#pragma unroll
                for (int block = 0; block < BLOCKS; block += 2) {
                    u32 chunk = warp * BLOCKS + block;
                    if (chunk < DEPTH / 8) {
                        u32 values[4];
                        u32 last = chunk + 1 < DEPTH / 8 ? chunk + lane / 16 : chunk;
                        load_four_turned(values, values_at + spot(step * 16 + lane % 16, last));
                        multiply(few.found[block], weights, values[0], values[1]);
                        if (block + 1 < BLOCKS) multiply(few.found[block + 1], weights, values[2], values[3]);
                    }
                }
            }
        }
        few.publish_sums(sum_of);
        wait_for_groups<0>();
        __syncthreads();
        few.put(item, kv_head, sum_of, found_out, partials);
        __syncthreads();
    }
}

// Joins the segments of rows, in order.
struct Segments {
    u32 first_token, tokens, first_partial, count;
    u32 units;  // of space, for each segment
    u32 unused[3];
};

#define JOIN_THREADS 256
// Number of segments whose results are in flight at once.
#define JOIN_AHEAD 8

extern "C" __global__ void __launch_bounds__(JOIN_THREADS)
join(const float *partials, const Segments *all, const u32 *counts, u16 *found_out) {
    launch_next_kernel();
    // A thread computes two elements of a row.
    const u32 PAIRS = HEAD_DIM / 2, ROWS_AT_ONCE = JOIN_THREADS / PAIRS;
    u32 element = threadIdx.x % PAIRS * 2, slot = threadIdx.x / PAIRS;
    // The number of joins, and the number of rows of the largest.
    u32 rows = counts[1], jobs = slot < ROWS_AT_ONCE ? counts[0] * KV_HEADS * rows : 0;
    wait_for_previous_kernel();
    for (u32 job = blockIdx.x * ROWS_AT_ONCE + slot; job < jobs; job += gridDim.x * ROWS_AT_ONCE) {
        Segments segments = all[job / (KV_HEADS * rows)];
        u32 kv_head = job / rows % KV_HEADS, row = job % rows, token = row / GROUP;
        if (token >= segments.tokens) continue;
        Joined joined = {-INFINITE, 0.0f};
        float2 found = make_float2(0.0f, 0.0f);
        for (u32 first = 0; first < segments.count; first += JOIN_AHEAD) {
            float2 tops[JOIN_AHEAD], founds[JOIN_AHEAD];
#pragma unroll
            for (u32 at = 0; at < JOIN_AHEAD; at++) {
                if (first + at >= segments.count) break;
                u32 partial = segments.first_partial + (first + at) * segments.units;
                const float *from = partial_at((float *)partials, partial, segments.units, kv_head, row);
                tops[at] = *(const float2 *)from, founds[at] = *(const float2 *)(from + 2 + element);
            }
#pragma unroll
            for (u32 at = 0; at < JOIN_AHEAD; at++) {
                if (first + at >= segments.count) break;
                float2 weights = join_weights(joined, tops[at].x, tops[at].y);
                found.x = join_found(found.x, founds[at].x, weights), found.y = join_found(found.y, founds[at].y, weights);
            }
        }
        float share = 1.0f / joined.sum;
        u64 to = (u64)(segments.first_token + token) * QUERIES_WIDTH + (kv_head * GROUP + row % GROUP) * HEAD_DIM;
        *(u32 *)(found_out + to + element) = pair_of(final_value(found.x, share), final_value(found.y, share));
    }
}

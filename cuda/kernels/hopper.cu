// Attention of many queries with Hopper's tensor-core instructions: a producer warp loads tiles,
// and two warp groups process them. The results equal those of `attend` to the bit.

#if HEAD_DIM == 128 && PAGE_SIZE >= 8 && defined(HOPPER)

// A tile is stored in halves of 64 elements, as the instructions require: eight rows of 128 bytes,
// swizzled, followed by the next eight rows.
#define HALF_BYTES (TILE * 128)
#define TILE_BYTES (2 * HALF_BYTES)
#define PLACES 8
#define HOPPER_THREADS 384

// Returns the descriptor of a part of shared memory: its start, the distance between groups of
// eight rows, and the distance between the halves.
__device__ __forceinline__ u64 descriptor_of(u32 address) {
    return (u64)1 << 62 | (u64)(1024 >> 4) << 32 | (u64)(HALF_BYTES >> 4) << 16 | (address & 0x3ffff) >> 4;
}

// Tokens of one copy.
#define BOX (PAGE_SIZE < TILE ? PAGE_SIZE : TILE)
// Copies of a tile's keys, or of its values: one for each half of each box.
#define COPIES (TILE / BOX * 2)

// State of the warp that loads tiles: keys and values use buffers in turn.
struct Copies {
    const Map *map;
    const u32 *table;
    u32 row_entries, layer_block;
    u32 tiles_at, full, empty, places;
    u32 sent;
};

// Loads the tiles of an item as buffers become free. With WAITS, keys and values of the step itself
// are loaded only after the previous kernel has ended.
template <bool WAITS>
__device__ __forceinline__ void send(Copies &copies, const Item &item, u32 kv_head) {
    static_assert(COPIES <= 32, "a lane has one copy");
    u32 lane = threadIdx.x % 32, half = lane % 2, offset = lane / 2 * BOX;
    const u32 *table = copies.table + (u64)item.row * copies.row_entries;
    // Reads outside of the map return zero.
    auto block_of = [&](u32 tile_start) -> u32 {
        u32 position = tile_start + offset;
        if (lane >= COPIES || position >= item.keys_end) return 0x7ffffffe;
        return table[position / PAGE_SIZE] * (LAYERS * KV_HEADS * 2) + copies.layer_block + kv_head * 2;
    };
    u32 next = block_of(item.keys_from);
    for (u32 tile_start = item.keys_from; tile_start < item.keys_end; tile_start += TILE) {
        // Looked up ahead, so that a free buffer is filled at once.
        u32 block = next;
        next = block_of(tile_start + TILE);
        if (WAITS && tile_start + TILE > item.position) wait_for_previous_kernel();
#pragma unroll
        for (u32 is_value = 0; is_value < 2; is_value++, copies.sent++) {
            u32 place = copies.sent % copies.places, turn = copies.sent / copies.places;
            if (turn > 0) wait(copies.empty + place * 8, (turn - 1) % 2);
            u32 barrier = copies.full + place * 8;
            if (lane == 0) arrive_and_expect(barrier, TILE_BYTES);
            __syncwarp();
            u32 to = copies.tiles_at + place * TILE_BYTES + half * HALF_BYTES + offset * 128;
            if (lane < COPIES) copy_page(to, copies.map, (tile_start + offset) % PAGE_SIZE, half, block + is_value, barrier);
        }
    }
}

// Zeroes a tile's values from key `left` on, as far as they were loaded. A page is loaded as a
// whole, with stale data behind the sequence's last token, and a weight of zero times NaN is NaN.
// `SHARING` threads do this; a barrier must follow.
template <int SHARING>
__device__ __forceinline__ void clear_tail(u32 values_at, u32 left, u32 thread) {
    u32 end = (left + BOX - 1) / BOX * BOX;
    for (u32 at = values_at + left * 128 + thread * 16; at < values_at + end * 128; at += SHARING * 16) {
        put_zeros(at);
        put_zeros(at + HALF_BYTES);
    }
    publish_to_products();
}

extern "C" __global__ void __launch_bounds__(HOPPER_THREADS, 1)
attend_on_hopper(
    const u16 *qkv, u16 *found_out, Pages pages, const Item *items, float *partials, const __grid_constant__ Map map,
    u32 layer) {
    follow();
    extern __shared__ __align__(1024) u8 memory[];
    __shared__ u64 barriers[2 * PLACES];
    u32 tiles_at = shared_address(memory), queries_at = tiles_at + PLACES * TILE_BYTES;
    float *joined_found = (float *)(memory + PLACES * TILE_BYTES + ROWS * DEPTH * 2);
    u32 full = shared_address(barriers), empty = full + PLACES * 8;
    u32 item_count = gridDim.x / KV_HEADS;
    Item item = items[blockIdx.x % item_count];
    // Blocks of one head are consecutive, so that its keys and values stay in the L2 cache.
    u32 kv_head = blockIdx.x / item_count;
    if (threadIdx.x == 0) {
        for (u32 place = 0; place < PLACES; place++) {
            prepare(full + place * 8, 1);
            prepare(empty + place * 8, 8);
        }
        publish_barriers();
    }
    load_queries<ROWS, HOPPER_THREADS>(queries_at, qkv, item, kv_head);
    end_group();
    wait_for_groups<0>();
    __syncthreads();
    if (threadIdx.x < 128) {
        set_registers<40>();
        if (threadIdx.x < 32) {
            Copies copies = {&map, pages.table, pages.row_entries, layer * KV_HEADS * 2, tiles_at, full, empty, PLACES, 0};
            send<false>(copies, item, kv_head);
        }
        return;
    }
    take_registers<232>();
    u32 warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32, quad = lane / 4, column = lane % 4 * 2;
    float scale = score_scale();
    u32 queries[DEPTH / 16][4];
#pragma unroll
    for (int step = 0; step < DEPTH / 16; step++)
        load_four(queries[step], queries_at + spot(warp * 16 + lane % 16, step * 2 + lane / 16));
    u32 positions[2];
    for (int half = 0; half < 2; half++)
        positions[half] = item.position + (warp * 16 + quad + half * 8) / GROUP;
    u32 first_of_warp = item.position + warp * 16 / GROUP;
    u32 tile_count = (item.keys_end - item.keys_from + TILE - 1) / TILE;
    const u32 SEGMENT_TILES = SEGMENT / TILE;

    Running running[2];
    Joined joined[2] = {{-INFINITE, 0.0f}, {-INFINITE, 0.0f}};
    float found[DEPTH / 2], scores[TILE / 2], corrections[2];
    u32 weights[TILE / 16][4];
    bool is_higher;

    auto begin_segment = [&]() {
        for (int half = 0; half < 2; half++) {
            running[half].highest = -INFINITE;
            for (int part = 0; part < TILE / PART; part++) running[half].sums[part] = 0.0f;
        }
    };
    auto score = [&](u32 tile) {
        u32 at = tile * 2;
        wait(full + at % PLACES * 8, at / PLACES % 2);
        begin_products();
        u64 keys = descriptor_of(tiles_at + at % PLACES * TILE_BYTES);
#pragma unroll
        for (int step = 0; step < DEPTH / 16; step++)
            multiply_keys(scores, queries[step], keys + (step / 4 * HALF_BYTES + step % 4 * 32) / 16, step > 0);
        end_products();
    };
    auto add_values = [&](u32 tile, bool adds) {
        u32 at = tile * 2 + 1;
        wait(full + at % PLACES * 8, at / PLACES % 2);
        begin_products();
        u64 values = descriptor_of(tiles_at + at % PLACES * TILE_BYTES);
#pragma unroll
        for (int step = 0; step < TILE / 16; step++)
            multiply_values(found, weights[step], values + step * 2048 / 16, adds || step > 0);
        end_products();
    };
    auto let_go = [&](u32 at) {
        if (lane == 0) arrive(empty + at % PLACES * 8);
    };
    // Converts scores to softmax weights.
    auto softmax_weights = [&](u32 tile) {
        u32 tile_start = item.keys_from + tile * TILE;
        if (tile_start + TILE - 1 > first_of_warp) {
#pragma unroll
            for (int at = 0; at < TILE / 2; at++)
                if (tile_start + at / 4 * 8 + column + at % 2 > positions[at / 2 % 2]) scores[at] = -INFINITE;
        }
        is_higher = false;
        float references[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float highest = -INFINITE;
#pragma unroll
            for (int block = 0; block < TILE / 8; block++)
                highest = fmaxf(highest, fmaxf(scores[block * 4 + half * 2], scores[block * 4 + half * 2 + 1]));
            highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
            highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
            highest = fmaxf(running[half].highest, __fmul_rn(highest, scale));
            references[half] = reference(highest);
            corrections[half] = power_of_two(running[half].highest - references[half]);
            is_higher |= running[half].highest != highest;
            running[half].highest = highest;
            for (int part = 0; part < TILE / PART; part++) running[half].sums[part] *= corrections[half];
        }
#pragma unroll
        for (int at = 0; at < TILE / 2; at++) {
            scores[at] = weight_of(scores[at], scale, references[at / 2 % 2]);
            float *sum = &running[at / 2 % 2].sums[at / 4 * 8 / PART];
            *sum = __fadd_rn(*sum, scores[at]);
        }
    };
    auto pack = [&]() {
#pragma unroll
        for (int at = 0; at < TILE / 4; at++) weights[at / 4][at % 4] = pair_of(scores[at * 2], scores[at * 2 + 1]);
    };
    auto correct = [&]() {
        if (__any_sync(~0u, is_higher)) {
#pragma unroll
            for (int at = 0; at < DEPTH / 2; at++) found[at] *= corrections[at / 2 % 2];
        }
    };
    auto end_segment = [&](bool is_first) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float *row = joined_found + (warp * 16 + quad + half * 8) * DEPTH + column;
            join_segment(joined[half], running[half], half, (float(*)[4])found, row, is_first);
        }
    };

    begin_segment();
    score(0);
    wait_for_products<0>();
    let_go(0);
    softmax_weights(0);
    pack();
    bool adds = false;
    for (u32 tile = 0; tile + 1 < tile_count; tile++) {
        score(tile + 1);
        add_values(tile, adds);
        adds = true;
        wait_for_products<1>();
        let_go(tile * 2 + 2);
        if ((tile + 1) % SEGMENT_TILES == 0) {
            wait_for_products<0>();
            let_go(tile * 2 + 1);
            end_segment(tile < SEGMENT_TILES);
            begin_segment();
            softmax_weights(tile + 1);
            adds = false;
        } else {
            softmax_weights(tile + 1);
            wait_for_products<0>();
            let_go(tile * 2 + 1);
            correct();
        }
        pack();
    }
    u32 last = tile_count * 2 - 1, left = item.keys_end - item.keys_from - (tile_count - 1) * TILE;
    if (left < TILE) {
        wait(full + last % PLACES * 8, last / PLACES % 2);
        // Each warp group clears its own copy, so that groups need not wait for each other.
        clear_tail<128>(tiles_at + last % PLACES * TILE_BYTES, left, threadIdx.x % 128);
        if (warp < 4) meet<1, 128>();
        else meet<2, 128>();
    }
    add_values(tile_count - 1, adds);
    wait_for_products<0>();
    float sums[2] = {segment_sum(running[0]), segment_sum(running[1])};
    if (tile_count > SEGMENT_TILES) {
        end_segment(false);
        sums[0] = joined[0].sum, sums[1] = joined[1].sum;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        // The accumulators have the same layout as in `attend`.
        put_row(
            item, kv_head, warp * 16 + quad + half * 8, column, half, running[half].highest, sums[half],
            (const float(*)[4])found, found_out, partials);
    }
}

// `attend_few` with tiles loaded by the copy engine. The results are the same to the bit.
#define FEW_HOPPER_THREADS 160

__device__ __forceinline__ void meet() { meet<1, 128>(); }
__device__ __forceinline__ u32 spot_in_tile(u32 row, u32 chunk) {
    return chunk / 8 * HALF_BYTES + row * 128 + ((chunk % 8) ^ (row % 8)) * 16;
}

// Queries are reloaded for every tile: the saved registers make room for another block.
extern "C" __global__ void __launch_bounds__(FEW_HOPPER_THREADS, FEW_BLOCKS)
attend_few_on_hopper(
    const u16 *qkv, u16 *found_out, Pages pages, const Item *items, const u32 *item_count, float *partials,
    const __grid_constant__ Map map, u32 layer) {
    extern __shared__ __align__(1024) u8 memory[];
    __shared__ u64 barriers[2 * FEW_PLACES];
    __shared__ float highest_of[4][FEW_ROWS], sum_of[4][FEW_ROWS];
    u32 tiles_at = shared_address(memory), queries_at = tiles_at + FEW_PLACES * TILE_BYTES;
    u32 weights_at = queries_at + FEW_ROWS * DEPTH * 2;
    u32 full = shared_address(barriers), empty = full + FEW_PLACES * 8;
    if (threadIdx.x == 0) {
        for (u32 place = 0; place < FEW_PLACES; place++) {
            prepare(full + place * 8, 1);
            prepare(empty + place * 8, 4);
        }
        publish_barriers();
    }
    __syncthreads();
    launch_next_kernel();
    u32 jobs = *item_count * KV_HEADS;
    if (threadIdx.x >= 128) {
        Copies copies = {&map, pages.table, pages.row_entries, layer * KV_HEADS * 2, tiles_at, full, empty, FEW_PLACES, 0};
        for (u32 job = blockIdx.x; job < jobs; job += gridDim.x) send<true>(copies, items[job / KV_HEADS], job % KV_HEADS);
        return;
    }
    wait_for_previous_kernel();
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, taken = 0;
    float scale = score_scale();
    const int BLOCKS = DEPTH / 8 / 4;
    for (u32 job = blockIdx.x; job < jobs; job += gridDim.x) {
        Item item = items[job / KV_HEADS];
        u32 kv_head = job % KV_HEADS;
        load_queries<FEW_ROWS, 128>(queries_at, qkv, item, kv_head);
        end_group();
        wait_for_groups<0>();
        meet();
        Few<BLOCKS> few(item);
        for (u32 tile_start = item.keys_from; tile_start < item.keys_end; tile_start += TILE) {
            u32 place = taken % FEW_PLACES, keys_at = tiles_at + place * TILE_BYTES;
            wait(full + place * 8, taken++ / FEW_PLACES % 2);
            float scores[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll
            for (int step = 0; step < DEPTH / 16; step++) {
                u32 queries[4], keys[4];
                load_four(queries, queries_at + spot(lane % 16, step * 2 + lane / 16));
                load_four(keys, keys_at + spot_in_tile(warp * PART + lane % 8 + lane / 16 * 8, step * 2 + lane / 8 % 2));
                multiply(scores[0], queries, keys[0], keys[1]);
                multiply(scores[1], queries, keys[2], keys[3]);
            }
            if (lane == 0) arrive(empty + place * 8);
            few.mask(scores, tile_start, highest_of);
            meet();
            few.softmax_weights(scores, scale, highest_of, weights_at);
            meet();
            place = taken % FEW_PLACES;
            u32 values_at = tiles_at + place * TILE_BYTES;
            wait(full + place * 8, taken++ / FEW_PLACES % 2);
            if (tile_start + TILE > item.keys_end) {
                clear_tail<128>(values_at, item.keys_end - tile_start, threadIdx.x);
                meet();
            }
#pragma unroll
            for (int step = 0; step < TILE / 16; step++) {
                u32 weights[4];
                few.load_weights(weights, weights_at, step);
#pragma unroll
                for (int block = 0; block < BLOCKS; block += 2) {
                    u32 values[4];
                    load_four_turned(values, values_at + spot_in_tile(step * 16 + lane % 16, warp * BLOCKS + block + lane / 16));
                    multiply(few.found[block], weights, values[0], values[1]);
                    multiply(few.found[block + 1], weights, values[2], values[3]);
                }
            }
            if (lane == 0) arrive(empty + place * 8);
        }
        few.publish_sums(sum_of);
        meet();
        few.put(item, kv_head, sum_of, found_out, partials);
    }
}

#endif

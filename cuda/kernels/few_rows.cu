// Products of a matrix with few rows on Hopper. Their time is that of one read of the matrix, so
// every multiprocessor reads a part of it. The sum over inputs is not split, so results equal those
// of cuBLASLt's algorithms without splitting, to the bit.

#ifdef HOPPER

// Rows of an instruction. The content of unused rows does not matter.
#define PRODUCT_ROWS 64
// Inputs of a part: 128 bytes, swizzled, with eight rows or outputs in sequence.
#define PART_INPUTS 64
#define PART_ROW_BYTES 128
// Blocks that share rows: each loads half of them for both. With four, some multiprocessors would
// have no block.
#define SHARERS 2
// Four warps compute, one loads weights, and one loads rows.
#define COMPUTING_THREADS 128
#define PRODUCT_THREADS 192
#define PRODUCT_BYTES_MAX (216 << 10)

__device__ __forceinline__ u64 described_part(u32 address) {
    return (u64)1 << 62 | (u64)(1024 >> 4) << 32 | (u64)1 << 16 | (address & 0x3ffff) >> 4;
}

// The sums of a tile of outputs: 32 at a time, and a remainder of 16.
template <int TILE_OUTPUTS>
struct Sums {
    static constexpr int THIRTY_TWOS = TILE_OUTPUTS / 32;
    static constexpr bool HAS_SIXTEEN = TILE_OUTPUTS % 32 != 0;
    float wide[THIRTY_TWOS ? THIRTY_TWOS : 1][16];
    float last[8];

    __device__ __forceinline__ void add(u64 rows, u32 outputs_at, bool adds) {
#pragma unroll
        for (int at = 0; at < THIRTY_TWOS; at++)
            multiply_outputs(wide[at], rows, described_part(outputs_at + at * 32 * PART_ROW_BYTES), adds);
        if (HAS_SIXTEEN) multiply_outputs(last, rows, described_part(outputs_at + THIRTY_TWOS * 32 * PART_ROW_BYTES), adds);
    }

    // This thread's sums of eight outputs: two outputs of two rows, at 0 and 1, and at 2 and 3.
    __device__ __forceinline__ const float *eight(int at) const {
        return at < THIRTY_TWOS * 4 ? &wide[at / 4][at % 4 * 4] : &last[(at - THIRTY_TWOS * 4) * 4];
    }
};

// The form in which sums are stored.
enum Outcome { KEPT_NARROW, KEPT_WIDE, GATED };

template <int TILE_OUTPUTS, Outcome OUTCOME>
struct Product {
    // Gates and the values that they scale are two tiles.
    static constexpr int TILES = OUTCOME == GATED ? 2 : 1;
    static constexpr u32 WEIGHT_BYTES = TILES * TILE_OUTPUTS * PART_ROW_BYTES, ROW_BYTES = PRODUCT_ROWS * PART_ROW_BYTES;
    static constexpr u32 PARTS = TILES * TILE_OUTPUTS > 96 ? 1 : 2;
    static constexpr u32 PLACE_BYTES = PARTS * (WEIGHT_BYTES + ROW_BYTES);
    static constexpr u32 PLACE_COUNT = PRODUCT_BYTES_MAX / PLACE_BYTES;

    const Map *weights, *rows;
    u32 inputs, outputs, rows_each;
    u32 memory, full, empty;

    __device__ __forceinline__ u32 weights_at(u32 place, u32 part) const { return memory + place * PLACE_BYTES + part * WEIGHT_BYTES; }
    __device__ __forceinline__ u32 rows_at(u32 place, u32 part) const {
        return memory + place * PLACE_BYTES + PARTS * WEIGHT_BYTES + part * ROW_BYTES;
    }
    __device__ __forceinline__ u32 steps() const { return inputs / (PARTS * PART_INPUTS); }
    __device__ __forceinline__ u32 turns() const { return (outputs + TILE_OUTPUTS * gridDim.x - 1) / (TILE_OUTPUTS * gridDim.x); }
    __device__ __forceinline__ u32 first_output(u32 turn) const { return (turn * gridDim.x + blockIdx.x) * TILE_OUTPUTS; }

    // Cursor over the copies of weights, or of rows, in order: the next destination and source.
    struct Next {
        u32 place, use, input, first_output;

        __device__ __forceinline__ void advance(u32 inputs) {
            if (++place == PLACE_COUNT) place = 0, use++;
            input += PARTS * PART_INPUTS;
            if (input == inputs) input = 0, first_output += TILE_OUTPUTS * gridDim.x;
        }
    };

    __device__ __forceinline__ void wait_for_place(const Next &next) const {
        if (next.use > 0) wait(empty + next.place * 8, (next.use - 1) % 2);
    }

    // Issues the copies of all weights as buffers become free. The first ones start before the
    // previous kernel has ended.
    __device__ __forceinline__ void send_weights() const {
        u32 all = steps() * turns(), bytes = PARTS * (WEIGHT_BYTES + SHARERS * rows_each * PART_ROW_BYTES);
        Next next = {0, 0, 0, first_output(0)};
        for (u32 sent = 0; sent < all; sent++, next.advance(inputs)) {
            wait_for_place(next);
            u32 barrier = full + next.place * 8;
            arrive_and_expect(barrier, bytes);
#pragma unroll
            for (u32 part = 0; part < PARTS; part++)
#pragma unroll
                for (u32 tile = 0; tile < TILES; tile++)
                    copy_part(
                        weights_at(next.place, part) + tile * TILE_OUTPUTS * PART_ROW_BYTES, weights,
                        next.input + part * PART_INPUTS, next.first_output + tile * outputs, barrier);
        }
    }

    // Issues the copies of this block's share of the rows to all blocks that share them.
    __device__ __forceinline__ void send_rows(u32 sharer) const {
        u32 all = steps() * turns(), row = sharer * rows_each;
        Next next = {0, 0, 0, 0};
        wait_for_previous_kernel();
        for (u32 sent = 0; sent < all; sent++, next.advance(inputs)) {
            wait_for_place(next);
#pragma unroll
            for (u32 part = 0; part < PARTS; part++)
                copy_part_to_all(
                    rows_at(next.place, part) + row * PART_ROW_BYTES, rows, next.input + part * PART_INPUTS, row,
                    full + next.place * 8, (1 << SHARERS) - 1);
        }
        // Waits until the sharing blocks have released these rows: this block must exist until
        // then.
        for (u32 place = 0; place < PLACE_COUNT && place < all; place++) {
            u32 uses = (all - place + PLACE_COUNT - 1) / PLACE_COUNT;
            wait(empty + place * 8, (uses - 1) % 2);
        }
    }

    __device__ __forceinline__ void release(u32 place) const {
        if (threadIdx.x % 32 < SHARERS) arrive_at(empty + place * 8, threadIdx.x % 32);
    }

    __device__ __forceinline__ void compute(void *out, u32 row_count) const {
        u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, taken = 0;
        for (u32 turn = 0; turn < turns(); turn++) {
            Sums<TILE_OUTPUTS> sums[TILES];
            for (u32 step = 0; step < steps(); step++, taken++) {
                u32 place = taken % PLACE_COUNT;
                wait(full + place * 8, taken / PLACE_COUNT % 2);
                begin_products();
#pragma unroll
                for (u32 part = 0; part < PARTS; part++)
#pragma unroll
                    for (u32 at = 0; at < PART_INPUTS * 2; at += 32)
#pragma unroll
                        for (u32 tile = 0; tile < TILES; tile++)
                            sums[tile].add(
                                described_part(rows_at(place, part) + at),
                                weights_at(place, part) + tile * TILE_OUTPUTS * PART_ROW_BYTES + at, step + part + at > 0);
                end_products();
                // Freeing a buffer for weights early matters more than back-to-back products.
                wait_for_products<0>();
                release(place);
            }
            u32 first = first_output(turn);
#pragma unroll
            for (int at = 0; at < TILE_OUTPUTS / 8; at++) {
                u32 output = first + at * 8 + lane % 4 * 2;
                if (output >= outputs) break;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    u32 row = warp * 16 + half * 8 + lane / 4;
                    const float *two = sums[0].eight(at) + half * 2;
                    u64 to = (u64)row * outputs + output;
                    if (row >= row_count) continue;
                    if (OUTCOME == KEPT_WIDE) {
                        *(float2 *)((float *)out + to) = make_float2(two[0], two[1]);
                    } else if (OUTCOME == KEPT_NARROW) {
                        *(u32 *)((u16 *)out + to) = pair_of(two[0], two[1]);
                    } else {
                        const float *values = sums[TILES - 1].eight(at) + half * 2;
                        *(u32 *)((u16 *)out + to) = gated_pair(pair_of(two[0], two[1]), pair_of(values[0], values[1]));
                    }
                }
            }
        }
    }

    __device__ __forceinline__ void run(void *out, u32 row_count, u64 *barriers) {
        full = shared_address(barriers), empty = full + PLACE_COUNT * 8;
        u32 sharer = blockIdx.x % SHARERS;
        if (threadIdx.x == 0) {
            for (u32 place = 0; place < PLACE_COUNT; place++) {
                prepare(full + place * 8, 1);
                prepare(empty + place * 8, SHARERS * 4);
            }
            publish_barriers();
        }
        wait_for_sharers();
        launch_next_kernel();
        u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, senders = COMPUTING_THREADS / 32;
        if (warp < senders) {
            compute(out, row_count);
        } else if (lane == 0) {
            if (warp == senders)
                send_weights();
            else
                send_rows(sharer);
        }
    }
};

// `outputs` is the number of outputs after gating. The number of rows is `rows_each` times SHARERS.
#define PRODUCT(NAME, TILE_OUTPUTS, OUTCOME)                                                                            \
    extern "C" __global__ void __cluster_dims__(SHARERS) __launch_bounds__(PRODUCT_THREADS, 1) NAME(                    \
        const __grid_constant__ Map weights, const __grid_constant__ Map rows, void *out, u32 inputs,                   \
        u32 outputs, u32 rows_each, u32 row_count) {                                                                    \
        extern __shared__ __align__(1024) u8 memory[];                                                                  \
        typedef Product<TILE_OUTPUTS, OUTCOME> Here;                                                                    \
        __shared__ u64 barriers[2 * Here::PLACE_COUNT];                                                                 \
        Here product = {&weights, &rows, inputs, outputs, rows_each, shared_address(memory), 0, 0};                     \
        product.run(out, row_count, barriers);                                                                          \
    }

PRODUCT(few_rows_to_qkv, QKV_TILE, KEPT_NARROW)
PRODUCT(few_rows_to_out, OUT_TILE, KEPT_NARROW)
PRODUCT(few_rows_to_gated, GATED_TILE, GATED)
PRODUCT(few_rows_to_down, DOWN_TILE, KEPT_NARROW)
PRODUCT(few_rows_to_logits, LOGITS_TILE, KEPT_WIDE)

#endif

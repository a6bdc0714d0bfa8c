// Computations for each token separately: embeddings, norms, rotary positions, storing keys and
// values in pages, and gates. Numbers between kernels are bf16. Intermediate results are rounded to
// bf16 where transformers rounds.

// A token of a step: its position, and the place of its keys and values, counted in tokens from the
// start of the first page. NOWHERE marks a token of no sequence.
struct Token { u32 token, position, place, unused; };
#define NOWHERE 0xffffffffu

// Applies the page-table changes, and stores the tokens that the step before has chosen.
struct Change { u32 row, first_entry, first_page, pages; };
struct Awaited { u32 token, output; };

extern "C" __global__ void take_in(
    u32 *table, u32 row_entries, const Change *changes, u32 change_count, const u32 *pages,
    Token *tokens, const Awaited *awaited, u32 awaited_count, const u32 *chosen_before) {
    for (u32 at = blockIdx.x; at < change_count; at += gridDim.x) {
        Change change = changes[at];
        u32 *entries = table + (u64)change.row * row_entries + change.first_entry;
        for (u32 page = threadIdx.x; page < change.pages; page += blockDim.x)
            entries[page] = pages[change.first_page + page];
    }
    for (u32 at = blockIdx.x * blockDim.x + threadIdx.x; at < awaited_count; at += gridDim.x * blockDim.x)
        tokens[awaited[at].token].token = chosen_before[awaited[at].output];
}

// x[token] = the token's embedding. This is the first kernel of a step, and the only one that lets
// no other start before it has ended. Later kernels need not wait for anything that existed before
// it, such as lists or pages of earlier steps.
extern "C" __global__ void embed(const u16 *embeddings, const Token *tokens, u16 *x) {
    wait_for_previous_kernel();
    const uint4 *from = (const uint4 *)(embeddings + (u64)tokens[blockIdx.x].token * DIM);
    uint4 *to = (uint4 *)(x + (u64)blockIdx.x * DIM);
    for (u32 at = threadIdx.x; at < DIM / 8; at += blockDim.x) to[at] = from[at];
}

// Returns eight numbers, scaled by their norm and their weights.
__device__ __forceinline__ uint4 normed(uint4 numbers, uint4 weights, float factor) {
    u32 *number = (u32 *)&numbers;
    const u32 *weight = (const u32 *)&weights;
    for (int at = 0; at < 4; at++) {
        float first = rounded(low(number[at]) * factor) * low(weight[at]);
        float second = rounded(high(number[at]) * factor) * high(weight[at]);
        number[at] = pair_of(first, second);
    }
    return numbers;
}

#define NORM_THREADS 256
// Groups of eight numbers of a token that a thread processes.
#define EIGHTS ((DIM / 8 + NORM_THREADS - 1) / NORM_THREADS)

template <class Each>
__device__ __forceinline__ void for_eights(Each each) {
#pragma unroll
    for (u32 n = 0; n < EIGHTS; n++)
        if (n * NORM_THREADS + threadIdx.x < DIM / 8) each(n, n * NORM_THREADS + threadIdx.x);
}

// x[token] += y[token], if there is a y; out[row] = norm(x[token]). Row and token are equal unless
// `rows` selects tokens.
extern "C" __global__ void __launch_bounds__(NORM_THREADS)
add_norm(u16 *x, const u16 *y, const u16 *weights, u16 *out, const u32 *rows, float epsilon) {
    launch_next_kernel();
    __shared__ float sums[NORM_THREADS / 32];
    uint4 by[EIGHTS], numbers[EIGHTS], added[EIGHTS];
    for_eights([&](u32 n, u32 at) { by[n] = ((const uint4 *)weights)[at]; });
    wait_for_previous_kernel();
    u64 token = rows ? rows[blockIdx.x] : blockIdx.x;
    uint4 *place = (uint4 *)(x + token * DIM);
    for_eights([&](u32 n, u32 at) {
        numbers[n] = place[at];
        if (y) added[n] = ((const uint4 *)(y + token * DIM))[at];
    });
    float squares = 0.0f;
    for_eights([&](u32 n, u32 at) {
        u32 *pairs = (u32 *)&numbers[n];
        if (y) {
            const u32 *others = (const u32 *)&added[n];
            for (int pair = 0; pair < 4; pair++)
                pairs[pair] = pair_of(low(pairs[pair]) + low(others[pair]), high(pairs[pair]) + high(others[pair]));
            place[at] = numbers[n];
        }
        for (int pair = 0; pair < 4; pair++) {
            squares = fmaf(low(pairs[pair]), low(pairs[pair]), squares);
            squares = fmaf(high(pairs[pair]), high(pairs[pair]), squares);
        }
    });
    float factor = rsqrtf(block_sum<NORM_THREADS / 32>(squares, sums) / (float)DIM + epsilon);
    uint4 *to = (uint4 *)(out + (u64)blockIdx.x * DIM);
    for_eights([&](u32 n, u32 at) { to[at] = normed(numbers[n], by[n], factor); });
}

#ifdef HEAD_DIM

// Returns the place of a token's keys or values of a head in a layer: for each head, a page holds
// the keys of its tokens and then the values.
__device__ __forceinline__ u64 place_in_layer(u32 head, u32 is_value, u32 within) {
    return ((u64)(head * 2 + is_value) * PAGE_SIZE + within) * HEAD_DIM;
}

// Adds biases, rotates queries and keys by their positions, and stores keys and values in their
// pages. Queries stay in place.
extern "C" __global__ void __launch_bounds__(256)
turn_and_keep(
    u16 *qkv, const u16 *bias, const Token *tokens, const float *cosines, const float *sines,
    u8 *kv, u64 page_bytes, u64 layer_offset, u32 token_count) {
    launch_next_kernel();
    const u32 HALF = HEAD_DIM / 2, PAIRS = HALF / 2, HEADS = KV_HEADS * (GROUP + 2);
    const u32 KEYS_FROM = KV_HEADS * GROUP, VALUES_FROM = KEYS_FROM + KV_HEADS;
    u64 index = (u64)blockIdx.x * 256 + threadIdx.x;
    u32 token = (u32)(index / (HEADS * PAIRS)), rest = (u32)(index % (HEADS * PAIRS));
    if (token >= token_count) return;
    u32 head = rest / PAIRS, at = rest % PAIRS * 2;
    // Lists and tables exist before the step: only the results of the previous kernel are waited
    // for.
    u32 place = tokens[token].place, position = tokens[token].position;
    float2 cosine = make_float2(1.0f, 1.0f), sine = make_float2(0.0f, 0.0f);
    if (head < VALUES_FROM) {
        cosine = *(const float2 *)(cosines + (u64)position * HALF + at);
        sine = *(const float2 *)(sines + (u64)position * HALF + at);
    }
    wait_for_previous_kernel();
    u16 *numbers = qkv + ((u64)token * HEADS + head) * HEAD_DIM;
    u32 first = *(u32 *)(numbers + at), second = *(u32 *)(numbers + at + HALF);
    float a0 = low(first), a1 = high(first), b0 = low(second), b1 = high(second);
    if (bias) {
        u32 first_bias = *(u32 *)(bias + head * HEAD_DIM + at);
        u32 second_bias = *(u32 *)(bias + head * HEAD_DIM + at + HALF);
        a0 = rounded(a0 + low(first_bias)), a1 = rounded(a1 + high(first_bias));
        b0 = rounded(b0 + low(second_bias)), b1 = rounded(b1 + high(second_bias));
    }
    if (head < VALUES_FROM) {
        float c0 = a0 * cosine.x - b0 * sine.x, c1 = a1 * cosine.y - b1 * sine.y;
        b0 = b0 * cosine.x + a0 * sine.x, b1 = b1 * cosine.y + a1 * sine.y;
        a0 = c0, a1 = c1;
    }
    u16 *to = numbers;
    if (head >= KEYS_FROM) {
        if (place == NOWHERE) return;
        u32 kv_head = (head - KEYS_FROM) % KV_HEADS;
        u8 *layer = kv + (place / PAGE_SIZE) * page_bytes + layer_offset;
        to = (u16 *)layer + place_in_layer(kv_head, head >= VALUES_FROM, place % PAGE_SIZE);
    }
    *(u32 *)(to + at) = pair_of(a0, a1);
    *(u32 *)(to + at + HALF) = pair_of(b0, b1);
}

#endif

// Returns the gated pair of values.
__device__ __forceinline__ u32 gated_pair(u32 gates, u32 values) {
    float first = low(gates), second = high(gates);
    first = rounded(first / (1.0f + power_of_two(first * -1.4426950408889634f)));
    second = rounded(second / (1.0f + power_of_two(second * -1.4426950408889634f)));
    return pair_of(first * low(values), second * high(values));
}

// Applies gates: gate_up[token] holds the gates, followed by the values that they scale.
extern "C" __global__ void __launch_bounds__(256)
gate(const u16 *gate_up, u16 *gated, u32 hidden, u64 count) {
    follow();
    u64 index = (u64)blockIdx.x * 256 + threadIdx.x;
    if (index >= count) return;
    u64 token = index / (hidden / 8), at = index % (hidden / 8);
    uint4 gates = ((const uint4 *)(gate_up + token * 2 * hidden))[at];
    uint4 values = ((const uint4 *)(gate_up + token * 2 * hidden + hidden))[at];
    const u32 *gate = (const u32 *)&gates;
    u32 *value = (u32 *)&values;
    for (int pair = 0; pair < 4; pair++) value[pair] = gated_pair(gate[pair], value[pair]);
    ((uint4 *)(gated + token * hidden))[at] = values;
}

// Fills weights with pseudo-random numbers of mean zero, for measurements.
extern "C" __global__ void fill(u16 *numbers, u64 count, u64 seed, float scale) {
    for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < count; at += (u64)gridDim.x * blockDim.x) {
        u64 mixed = (at + seed) * 0x9e3779b97f4a7c15ull;
        mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9ull;
        mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebull;
        u32 sum = 0;
        for (int part = 0; part < 4; part++) sum += (u32)(mixed >> 16 * part) & 0xffff;
        numbers[at] = narrow(((float)sum / 65535.0f - 2.0f) * 1.7320508f * scale);
    }
}

// Fills an array with one number.
extern "C" __global__ void fill_with(u16 *numbers, u64 count, float number) {
    for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < count; at += (u64)gridDim.x * blockDim.x)
        numbers[at] = narrow(number);
}

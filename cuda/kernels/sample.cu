// Sampling on the device. Weights are summed as integers, so that the order of summation does not
// matter. Candidates are found by the digits of a sort key.

// The changes to an output's logits before sampling. They are applied to a copy: log-probabilities
// use the raw logits.
struct Bias { u32 token; float bias; };
struct Shaping {
    u32 row;
    u32 first_forbidden, forbidden;
    u32 first_bias, biases;
    u32 awaited;  // output of the step before whose token is counted as well, or NONE
    u32 counts;   // row of the table of counts, or NONE
    u32 mask;     // index of the mask of allowed tokens, or NONE
    u32 output;
    float repetition, frequency, presence;
};
#define NONE 0xffffffffu

// The table of counts has an entry for each token of each row: its occurrences in the answer, and
// whether the prompt contains it.
struct Count { u32 row, token, by; };
#define OF_PROMPT 0x80000000u

// Adds to the table. The list of a row contains a token of the prompt at most once, so entries do
// not overflow.
extern "C" __global__ void count(u32 *counts, u32 vocabulary, const Count *all, u32 number) {
    for (u32 at = blockIdx.x * blockDim.x + threadIdx.x; at < number; at += gridDim.x * blockDim.x)
        atomicAdd(&counts[(u64)all[at].row * vocabulary + all[at].token], all[at].by);
}

__device__ __forceinline__ void penalise(float *logit, const Shaping &by, u32 times) {
    float now = *logit;
    if (by.repetition != 1.0f) now = now > 0.0f ? now / by.repetition : now * by.repetition;
    if (times > 0) now -= __fadd_rn(__fmul_rn(by.frequency, (float)times), by.presence);
    *logit = now;
}

#define SHAPE_THREADS 1024
extern "C" __global__ void __launch_bounds__(SHAPE_THREADS)
shape(const float *logits, float *shaped, u32 vocabulary, const Shaping *all, const u32 *forbidden, const Bias *biases,
      const u32 *counts, const u32 *masks, const u32 *chosen_before, u32 *is_complete) {
    __shared__ u32 is_possible;
    Shaping by = all[blockIdx.x];
    const float *from = logits + (u64)by.row * vocabulary;
    float *row = shaped + (u64)by.row * vocabulary;
    if (by.mask == NONE) {
        for (u32 token = threadIdx.x; token < vocabulary; token += SHAPE_THREADS) row[token] = from[token];
    } else {
        // One bit per token.
        const u32 *mask = masks + (u64)by.mask * ((vocabulary + 31) / 32);
        for (u32 token = threadIdx.x; token < vocabulary; token += SHAPE_THREADS)
            row[token] = mask[token / 32] >> token % 32 & 1 ? from[token] : -INFINITE;
    }
    if (threadIdx.x == 0) is_possible = 0;
    __syncthreads();
    for (u32 at = threadIdx.x; at < by.forbidden; at += SHAPE_THREADS) row[forbidden[by.first_forbidden + at]] = -INFINITE;
    __syncthreads();
    if (by.mask != NONE) {
        // A complete grammar allows only stop tokens, which the minimum length forbids here.
        for (u32 token = threadIdx.x; token < vocabulary; token += SHAPE_THREADS)
            if (row[token] != -INFINITE) is_possible = 1;
        __syncthreads();
        if (threadIdx.x == 0) is_complete[by.output] = !is_possible;
    }
    if (by.counts != NONE) {
        const u32 *seen = counts + (u64)by.counts * vocabulary;
        u32 awaited = by.awaited == NONE ? NONE : chosen_before[by.awaited];
        for (u32 token = threadIdx.x; token < vocabulary; token += SHAPE_THREADS) {
            u32 known = seen[token] + (token == awaited);
            if (known > 0) penalise(row + token, by, known & ~OF_PROMPT);
        }
    }
    __syncthreads();
    for (u32 at = threadIdx.x; at < by.biases; at += SHAPE_THREADS) row[biases[by.first_bias + at].token] += biases[by.first_bias + at].bias;
}

// Sampling parameters of an output.
struct Draw {
    float temperature, top_p, min_p;
    u32 top_k;
    u64 drawn;  // from 0 to 2^53
    u32 row, is_shaped, output, unused;
};

// Weights are counted in units of 2^-40 of the likeliest token's weight.
#define WEIGHT_UNIT 1099511627776.0f
#define INDEX_BITS 24
#define KEY_BITS (32 + INDEX_BITS)
#define SAMPLE_THREADS 1024


// Keys order tokens: by logit and then the lower id first, or by id alone.
__device__ __forceinline__ u64 token_key(u32 token) { return (1u << INDEX_BITS) - 1 - token; }
__device__ __forceinline__ u64 likelihood_key(float logit, u32 token) {
    u32 bits = __float_as_uint(logit);
    u32 order = logit != logit ? 0 : (bits & 0x80000000u ? ~bits : bits | 0x80000000u);
    return (u64)order << INDEX_BITS | token_key(token);
}

// Candidates are sorted into bins by their distance from the highest logit; candidates within one
// bin are sorted individually.
#define BINS 2048
#define DIGIT_BITS 11
#define LISTED_MAX 2048
struct Selection {
    u64 sums[BINS];
    u64 keys[LISTED_MAX], measures[LISTED_MAX];
    u64 parts[32], left, found;
    u32 bin, listed;
};

// Returns the bin of a logit. Logits whose weight rounds to zero fall into the last bin.
__device__ __forceinline__ u32 bin_of(float logit, float highest, float scale) {
    return min((u32)((highest - logit) * scale * (BINS / 40.0f)), BINS - 1);
}

// Finds the part at which the running sum of `count` numbers reaches `target`, and the remainder of
// the target in it.
__device__ __forceinline__ void find_part(const u64 *parts, u32 count, u64 target, u32 *part, u64 *left) {
    u32 at = 0;
    // The last part takes any rounding remainder.
    while (at + 1 < count && parts[at] < target) target -= parts[at++];
    *part = at, *left = target;
}

// Sums the measures of candidates by bin, and finds the bin in which the running sum reaches
// `target`: `selection.bin`, with the remaining target in `selection.left`. `selection.found` is 0
// if the total is below the target. `candidate` returns the bin and the measure of a token; 0
// excludes the token.
template <typename Candidate>
__device__ void find_bin(Selection &selection, u32 vocabulary, u64 target, Candidate candidate) {
    for (u32 bin = threadIdx.x; bin < BINS; bin += SAMPLE_THREADS) selection.sums[bin] = 0;
    __syncthreads();
    for (u32 token = threadIdx.x; token < vocabulary; token += SAMPLE_THREADS) {
        u32 bin;
        u64 measure = candidate(token, bin);
        if (measure > 0) atomicAdd(&selection.sums[bin], measure);
    }
    __syncthreads();
    const u32 EACH = BINS / 32;
    if (threadIdx.x < 32) {
        u64 own = 0;
        for (u32 bin = 0; bin < EACH; bin++) own += selection.sums[threadIdx.x * EACH + (bin + threadIdx.x) % EACH];
        selection.parts[threadIdx.x] = own;
        __syncwarp();
        if (threadIdx.x == 0) {
            u32 part, bin;
            u64 left;
            u64 all = 0;
            for (part = 0; part < 32; part++) all += selection.parts[part];
            selection.found = all < target ? 0 : ~0ull;
            find_part(selection.parts, 32, target, &part, &left);
            find_part(selection.sums + part * EACH, EACH, left, &bin, &left);
            selection.bin = part * EACH + bin, selection.left = left;
        }
    }
    __syncthreads();
}

// Returns the key of the candidate at which the running sum of measures, from the highest key down,
// reaches `target`; 0, which precedes all keys, if the total is below it. `candidate` returns the
// key and the measure of a token; 0 excludes the token. Equal logits share a bin. If a bin holds
// more candidates than the list has room for, it is divided by the digits of their keys. All keys
// differ, so five divisions leave at most two candidates.
template <typename Candidate>
__device__ u64 select(
    Selection &selection, const float *row, u32 vocabulary, float highest, float scale, u64 target, Candidate candidate) {
    find_bin(selection, vocabulary, target, [&](u32 token, u32 &bin) -> u64 {
        u64 key, measure = candidate(token, key);
        if (measure > 0) bin = bin_of(row[token], highest, scale);
        return measure;
    });
    u32 chosen_bin = selection.bin, shift = KEY_BITS, listed;
    u64 left = selection.left, prefix = 0;
    if (selection.found == 0) {
        __syncthreads();
        return 0;
    }
    // Candidates in the bin whose keys start with the digits found so far.
    auto near = [&](u32 token, u64 &key) -> u64 {
        u64 measure = candidate(token, key);
        bool is_near = measure > 0 && key >> shift == prefix && bin_of(row[token], highest, scale) == chosen_bin;
        return is_near ? measure : 0;
    };
    for (;;) {
        __syncthreads();
        if (threadIdx.x == 0) selection.listed = 0;
        __syncthreads();
        for (u32 token = threadIdx.x; token < vocabulary; token += SAMPLE_THREADS) {
            u64 key, measure = near(token, key);
            if (measure == 0) continue;
            u32 place = atomicAdd(&selection.listed, 1u);
            if (place < LISTED_MAX) selection.keys[place] = key, selection.measures[place] = measure;
        }
        __syncthreads();
        listed = selection.listed;
        if (listed <= LISTED_MAX) break;
        // The highest digit first.
        u32 digit_shift = shift - DIGIT_BITS;
        find_bin(selection, vocabulary, left, [&](u32 token, u32 &bin) -> u64 {
            u64 key, measure = near(token, key);
            bin = BINS - 1 - (u32)(key >> digit_shift) % BINS;
            return measure;
        });
        left = selection.left, shift = digit_shift;
        prefix = prefix << DIGIT_BITS | (BINS - 1 - selection.bin);
    }
    for (u32 at = threadIdx.x; at < listed; at += SAMPLE_THREADS) {
        u64 key = selection.keys[at], measure = selection.measures[at], before = 0;
        for (u32 other = 0; other < listed; other++)
            if (selection.keys[other] > key) before += selection.measures[other];
        if (before < left && left <= before + measure) selection.found = key;
    }
    __syncthreads();
    u64 found = selection.found;
    __syncthreads();
    return found;
}

// Returns the token at which the running sum of weights, in token order, reaches `target`. Each
// warp processes a contiguous range of tokens.
template <typename Candidate>
__device__ u32 walk(Selection &selection, u32 vocabulary, u64 target, Candidate candidate) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 each = (vocabulary + 31) / 32, first = warp * each, end = min(first + each, vocabulary);
    u64 own = 0;
    for (u32 token = first + lane; token < end; token += 32) {
        u64 key;
        own += candidate(token, key);
    }
    for (int step = 16; step > 0; step >>= 1) own += __shfl_xor_sync(~0u, own, step);
    if (lane == 0) selection.parts[warp] = own;
    __syncthreads();
    u32 part;
    u64 left;
    find_part(selection.parts, 32, target, &part, &left);
    if (warp == part) {
        u32 found = end - 1;
        for (u32 from = first; from < end; from += 32) {
            u64 key, sum = from + lane < end ? candidate(from + lane, key) : 0;
            for (int step = 1; step < 32; step <<= 1) {
                u64 other = __shfl_up_sync(~0u, sum, step);
                if (lane >= step) sum += other;
            }
            u32 reached = __ballot_sync(~0u, sum >= left);
            if (reached) {
                found = from + __ffs(reached) - 1;
                break;
            }
            left -= __shfl_sync(~0u, sum, 31);
        }
        if (lane == 0) selection.bin = found;
    }
    __syncthreads();
    return selection.bin;
}

template <typename Candidate>
__device__ u64 total(Selection &selection, u32 vocabulary, Candidate candidate) {
    if (threadIdx.x == 0) selection.sums[0] = 0;
    __syncthreads();
    u64 own = 0;
    for (u32 token = threadIdx.x; token < vocabulary; token += SAMPLE_THREADS) {
        u64 key;
        own += candidate(token, key);
    }
    atomicAdd(&selection.sums[0], own);
    __syncthreads();
    u64 all = selection.sums[0];
    __syncthreads();
    return all;
}

extern "C" __global__ void __launch_bounds__(SAMPLE_THREADS)
sample(const float *logits, const float *shaped, u32 vocabulary, const Draw *draws, u32 *chosen) {
    extern __shared__ __align__(1024) u8 memory[];
    Selection &selection = *(Selection *)memory;
    Draw draw = draws[blockIdx.x];
    const float *row = (draw.is_shaped ? shaped : logits) + (u64)draw.row * vocabulary;
    u64 likeliest = 0;
    for (u32 token = threadIdx.x; token < vocabulary; token += SAMPLE_THREADS) {
        u64 key = likelihood_key(row[token], token);
        likeliest = key > likeliest ? key : likeliest;
    }
    if (threadIdx.x == 0) selection.found = 0;
    __syncthreads();
    for (int step = 16; step > 0; step >>= 1) {
        u64 other = __shfl_xor_sync(~0u, likeliest, step);
        likeliest = other > likeliest ? other : likeliest;
    }
    if (threadIdx.x % 32 == 0) atomicMax(&selection.found, likeliest);
    __syncthreads();
    likeliest = selection.found;
    __syncthreads();
    u64 found = likeliest;
    const u32 MASK = (1u << INDEX_BITS) - 1;
    float highest = row[MASK - (u32)(likeliest & MASK)];
    if (draw.temperature > 0.0f && fabsf(highest) < INFINITE) {
        float scale = 1.4426950408889634f / draw.temperature;
        u64 lowest = 0;
        auto weighed = [&](u32 token, u64 &key) -> u64 {
            float logit = row[token], weight = power_of_two((logit - highest) * scale);
            key = likelihood_key(logit, token);
            return weight >= draw.min_p && key >= lowest ? (u64)(weight * WEIGHT_UNIT) : 0;
        };
        auto counted = [&](u32 token, u64 &key) -> u64 { return weighed(token, key) > 0; };
        bool is_cut = draw.top_k > 0 || draw.top_p < 1.0f;
        if (draw.top_k > 0 && draw.top_k < vocabulary) 
            lowest = select(selection, row, vocabulary, highest, scale, draw.top_k, counted);
        if (draw.top_p < 1.0f) {
            double share = (double)draw.top_p * (double)total(selection, vocabulary, weighed);
            u64 target = share < 1.0 ? 1 : (u64)ceil(share);
            lowest = select(selection, row, vocabulary, highest, scale, target, weighed);
        }
        u64 all = total(selection, vocabulary, weighed);
        // The first token at which the running sum exceeds the drawn share.
        u64 target = __umul64hi(all, draw.drawn << 11) + 1;
        if (is_cut) found = select(selection, row, vocabulary, highest, scale, target, weighed);
        else found = token_key(walk(selection, vocabulary, target, weighed));
    }
    if (threadIdx.x == 0) chosen[draw.output] = MASK - (u32)(found & MASK);
}

// A request for a log-probability: of `token`, or of the token that an output has chosen.
struct Score { u32 row, token, output, top; };
struct Likelihood { u32 token; float logprob; };

extern "C" __global__ void __launch_bounds__(SAMPLE_THREADS)
score(const float *logits, u32 vocabulary, const Score *scores, const u32 *chosen, Likelihood *found, u32 stride) {
    __shared__ u64 keys[32];
    __shared__ double sums[32];
    Score wanted = scores[blockIdx.x];
    const float *row = logits + (u64)wanted.row * vocabulary;
    u32 token = wanted.output == NONE ? wanted.token : chosen[wanted.output];
    const u32 MASK = (1u << INDEX_BITS) - 1;
    Likelihood *to = found + (u64)blockIdx.x * stride;
    double highest = 0.0, total = 0.0;
    u64 last = ~0ull;
    // The likeliest token is always needed: it is the reference of the sums.
    for (u32 place = 0; place < max(wanted.top, 1u); place++) {
        u64 best = 0;
        for (u32 at = threadIdx.x; at < vocabulary; at += SAMPLE_THREADS) {
            u64 key = likelihood_key(row[at], at);
            if (key < last && key > best) best = key;
        }
        for (int step = 16; step > 0; step >>= 1) {
            u64 other = __shfl_xor_sync(~0u, best, step);
            best = other > best ? other : best;
        }
        if (threadIdx.x % 32 == 0) keys[threadIdx.x / 32] = best;
        __syncthreads();
        for (int warp = 0; warp < 32; warp++) best = keys[warp] > best ? keys[warp] : best;
        last = best;
        u32 likeliest = MASK - (u32)(best & MASK);
        if (place == 0) {
            highest = row[likeliest];
            double own = 0.0;
            for (u32 at = threadIdx.x; at < vocabulary; at += SAMPLE_THREADS) {
                double weight = exp((double)row[at] - highest);
                if (weight < 2.0) own += weight;
            }
            for (int step = 16; step > 0; step >>= 1) own += __shfl_xor_sync(~0u, own, step);
            if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = own;
            __syncthreads();
            for (int warp = 0; warp < 32; warp++) total += sums[warp];
            total = log(total);
        }
        if (threadIdx.x == 0 && place < wanted.top)
            to[1 + place] = Likelihood{likeliest, (float)((double)row[likeliest] - highest - total)};
        __syncthreads();
    }
    if (threadIdx.x == 0) to[0] = Likelihood{token, (float)((double)row[token] - highest - total)};
}

// Hopper's instructions in plain C++, in addition to shim.h: barriers that count copied bytes,
// copies of boxes of memory, asynchronous products of warp groups, and clusters of blocks.
//
// Background operations complete as early as possible under one schedule and as late as possible
// under the other. Copies complete when they are issued, or one by one, in order, when all threads
// wait. Products complete when they are waited for and other threads have run, or when they are
// issued. A missing fence, by which one part of the GPU would miss another's writes, is a failure.

// A tensor map: the values that tests set, in the size of the driver's.
struct Map {
    const unsigned char *base;
    unsigned long long rank, sizes[4], strides[3], box[4], unused[3];
};
static_assert(sizeof(Map) == 128);

namespace on_cpu {

// A barrier that counts arrivals and bytes; it advances to the next phase when all expected ones
// have arrived.
struct Barrier {
    unsigned count, pending, phase = 0;
    long long bytes = 0;
    bool is_shown = false;
    const Thread *by;
    std::vector<Thread *> waiting;
};
static std::map<std::pair<unsigned, unsigned>, Barrier> barriers;

struct BoxCopy {
    Map map;
    unsigned to, at[4], barrier, ranks;
};
static std::vector<BoxCopy> box_copies;

// A warp's part of a product: 16 rows by `width` columns.
struct Product {
    float *sums[32];
    const unsigned *a[32];  // null if they are in shared memory, too
    unsigned long long rows, columns;
    unsigned width, rank, warp;  // of four
    bool adds, is_turned;
};
// Pending products of a warp.
struct Products {
    std::vector<Product> all;
    std::vector<size_t> groups;
    unsigned count = 0;
};
static Products products_of[THREADS_MAX / 32];
static bool has_fence[THREADS_MAX];
// Written groups of sixteen bytes that products and copies would not see yet.
static unsigned char is_hidden[CLUSTER_MAX][SHARED_MAX / 16];
static std::vector<std::pair<unsigned, unsigned>> hidden_by[THREADS_MAX];
// Threads at barriers other than barrier 0.
static std::map<std::pair<unsigned, unsigned>, std::vector<Thread *>> meetings;

static void begin_on_hopper() {
    barriers.clear(), box_copies.clear(), meetings.clear();
    for (Products &products : products_of) products = Products();
    memset(is_hidden, 0, sizeof(is_hidden));
    for (unsigned at = 0; at < THREADS_MAX; at++) has_fence[at] = false, hidden_by[at].clear();
}

static const char *left_on_hopper() {
    for (auto &[place, waiting] : meetings)
        if (!waiting.empty()) return "a block has ended before its threads have met";
    for (auto &[place, barrier] : barriers)
        if (barrier.bytes != 0) return "a block has ended before the bytes that it expects have come";
    for (unsigned warp = 0; warp < thread_count() / 32; warp++) {
        const Products &products = products_of[warp];
        if (!products.all.empty()) return "a block has ended before its products";
        unsigned first = warp - warp % (block_size.x / 32) % 4;
        if (products.count != products_of[first].count) return "four warps have not computed the same products";
    }
    return box_copies.empty() ? nullptr : "a block has ended before its copies";
}

inline Barrier &barrier_at(unsigned rank, unsigned address) {
    auto found = barriers.find({rank, address});
    if (found == barriers.end()) fail("a barrier is used that is not prepared");
    return found->second;
}
// A barrier that another part of the GPU has made visible.
inline Barrier &shown_barrier_at(unsigned rank, unsigned address) {
    Barrier &barrier = barrier_at(rank, address);
    if (!barrier.is_shown) fail("the copy engine, or another block, does not know a barrier");
    if (ended_in[rank] == block_size.x) fail("a block is reached that has ended");
    return barrier;
}
inline void look_at(Barrier &barrier) {
    if (barrier.pending > 0 || barrier.bytes != 0) return;
    barrier.phase++, barrier.pending = barrier.count;
    for (Thread *thread : barrier.waiting) make_ready(thread);
    barrier.waiting.clear();
}
inline void arrive_at_barrier(Barrier &barrier) {
    if (barrier.pending == 0) fail("more have arrived at a barrier than it counts");
    barrier.pending--;
    look_at(barrier);
}

// Rows of 128 bytes, in groups of eight, whose sixteen-byte chunks are permuted by row.
inline unsigned swizzled(unsigned address) { return address ^ (address >> 7 & 7) << 4; }

// Reads eight operands of a product at a fixed distance.
inline void read_eight(unsigned rank, unsigned address, float *to, unsigned stride) {
    address = swizzled(address);
    if (address % 16 != 0 || address + 16 > shared_bytes) fail("a product reads outside of shared memory");
    if (is_hidden[rank][address / 16]) fail("a product reads what a thread has written and not shown to it");
    unsigned pairs[4];
    memcpy(pairs, memory[rank] + address, 16);
    for (unsigned at = 0; at < 4; at++) number_pair(pairs[at], to + at * 2 * stride, to + (at * 2 + 1) * stride);
}

inline void finish(const BoxCopy &copy) {
    const Map &map = copy.map;
    unsigned rows = map.box[1] * map.box[2] * map.box[3];
    if (map.box[0] != 64) fail("a row of a box has another size than rows in shared memory");
    for (unsigned rank = 0; rank < cluster_size; rank++) {
        if (!(copy.ranks >> rank & 1)) continue;
        for (unsigned row = 0; row < rows; row++) {
            unsigned long long place[4] = {
                copy.at[0], copy.at[1] + row % map.box[1], copy.at[2] + row / map.box[1] % map.box[2],
                copy.at[3] + row / map.box[1] / map.box[2]};
            bool is_there = true;
            const unsigned char *from = map.base + place[0] * 2;
            for (unsigned at = 0; at < 4; at++) {
                is_there &= place[at] < map.sizes[at];
                if (at > 0) from += place[at] * map.strides[at - 1];
            }
            for (unsigned chunk = 0; chunk < 8; chunk++) {
                unsigned to = swizzled(copy.to + row * 128 + chunk * 16);
                if (to + 16 > shared_bytes) fail("a copy to outside of shared memory");
                if (is_hidden[rank][to / 16]) fail("a copy to what a thread has written and not shown to the copy engine");
                // Reads outside of the memory return zero.
                if (is_there) memcpy(memory[rank] + to, from + chunk * 16, 16);
                else memset(memory[rank] + to, 0, 16);
            }
        }
        Barrier &barrier = shown_barrier_at(rank, copy.barrier);
        barrier.bytes -= rows * 128;
        look_at(barrier);
    }
}
static bool finish_one_copy() {
    if (box_copies.empty()) return false;
    BoxCopy copy = box_copies.front();
    box_copies.erase(box_copies.begin());
    finish(copy);
    return true;
}
inline void copy_box(const BoxCopy &copy) {
    if (copy.to % 1024 != 0) fail("a copy to what does not begin with eight rows");
    for (unsigned rank = 0; rank < cluster_size; rank++)
        if (copy.ranks >> rank & 1) shown_barrier_at(rank, copy.barrier);
    if (is_hasty) finish(copy);
    else box_copies.push_back(copy);
}

template <unsigned WIDTH>
void add_up(float (*sums)[128], const float (*a)[16], const float (*b)[128]) {
    for (unsigned row = 0; row < 16; row++)
        for (unsigned k = 0; k < 16; k++)
            for (unsigned column = 0; column < WIDTH; column++) sums[row][column] += a[row][k] * b[k][column];
}

inline void finish(const Product &product) {
    float a[16][16], b[16][128], sums[16][128];
    auto begin = [](unsigned long long descriptor_of) { return (unsigned)(descriptor_of & 0x3fff) << 4; };
    auto next_half = [](unsigned long long descriptor_of) { return (unsigned)(descriptor_of >> 16 & 0x3fff) << 4; };
    auto next_eight = [](unsigned long long descriptor_of) { return (unsigned)(descriptor_of >> 32 & 0x3fff) << 4; };
    unsigned long long columns = product.columns;
    if (product.is_turned) {
        for (unsigned k = 0; k < 16; k++)
            for (unsigned at = 0; at < product.width / 8; at++)
                read_eight(
                    product.rank,
                    begin(columns) + at / 8 * next_half(columns) + k / 8 * next_eight(columns) + k % 8 * 128 + at % 8 * 16,
                    &b[k][at * 8], 1);
    } else {
        for (unsigned column = 0; column < product.width; column++)
            for (unsigned half = 0; half < 2; half++)
                read_eight(
                    product.rank, begin(columns) + column / 8 * next_eight(columns) + column % 8 * 128 + half * 16,
                    &b[half * 8][column], 128);
    }
    if (!product.a[0]) {
        for (unsigned row = 0; row < 16; row++)
            for (unsigned half = 0; half < 2; half++)
                read_eight(
                    product.rank,
                    begin(product.rows) + (product.warp * 2 + row / 8) * next_eight(product.rows) + row % 8 * 128 + half * 16,
                    &a[row][half * 8], 1);
    }
    for (unsigned lane = 0; lane < 32; lane++) {
        unsigned row = lane / 4, column = lane % 4 * 2;
        for (unsigned at = 0; product.a[0] && at < 4; at++) {
            float *to = &a[row + at % 2 * 8][column + at / 2 * 8];
            number_pair(product.a[lane][at], to, to + 1);
        }
        for (unsigned at = 0; at < product.width / 2; at++)
            sums[row + at / 2 % 2 * 8][at / 4 * 8 + column + at % 2] = product.adds ? product.sums[lane][at] : 0.0f;
    }
    switch (product.width) {
        case 16: add_up<16>(sums, a, b); break;
        case 32: add_up<32>(sums, a, b); break;
        case 64: add_up<64>(sums, a, b); break;
        case 128: add_up<128>(sums, a, b); break;
    }
    for (unsigned lane = 0; lane < 32; lane++) {
        unsigned row = lane / 4, column = lane % 4 * 2;
        for (unsigned at = 0; at < product.width / 2; at++)
            product.sums[lane][at] = sums[row + at / 2 % 2 * 8][at / 4 * 8 + column + at % 2];
    }
}

inline Products &own_products() { return products_of[number_of(current) / 32]; }

// The four warps of a product may arrive at different times.
__attribute__((noinline)) void multiply_by_four(
    float *sums, const unsigned *a, unsigned long long rows, unsigned long long columns, unsigned width, bool adds,
    bool is_turned) {
    if (!has_fence[number_of(current)]) fail("products begin without their fence");
    unsigned own = current->index.x % 32;
    Product mine;
    mine.sums[own] = sums, mine.a[own] = a, mine.rows = rows, mine.columns = columns, mine.width = width;
    mine.rank = current->rank, mine.warp = current->index.x / 32 % 4, mine.adds = adds, mine.is_turned = is_turned;
    meet(&mine, [](void **lanes) {
        Product product = *(Product *)lanes[0];
        for (unsigned lane = 0; lane < 32; lane++) {
            const Product &other = *(Product *)lanes[lane];
            if (other.columns != product.columns || other.rows != product.rows || other.adds != product.adds)
                fail("lanes of a warp do different things");
            product.sums[lane] = other.sums[lane], product.a[lane] = other.a[lane];
        }
        if (!is_hasty) finish(product);
        own_products().all.push_back(product);
        own_products().count++;
    });
}

__attribute__((noinline)) void wait_for_groups_of_products(size_t left) {
    if (is_hasty) {
        // Released blocks run first: a release that is too early lets them overwrite operands
        // before the products read them.
        make_ready(current);
        wait();
    }
    meet(&left, [](void **lanes) {
        Products &products = own_products();
        size_t left = *(size_t *)lanes[0];
        if (products.groups.size() <= left) return;
        size_t done = products.groups.size() - left, end = products.groups[done - 1];
        for (size_t at = 0; is_hasty && at < end; at++) finish(products.all[at]);
        products.all.erase(products.all.begin(), products.all.begin() + end);
        products.groups.erase(products.groups.begin(), products.groups.begin() + done);
        for (size_t &group : products.groups) group -= end;
    });
}

__attribute__((noinline)) void meet_some(unsigned rank, unsigned barrier, unsigned count) {
    std::vector<Thread *> &here = meetings[{rank, barrier}];
    here.push_back(current);
    if (here.size() == count) {
        for (Thread *thread : here) make_ready(thread);
        here.clear();
    }
    wait();
}

}  // namespace on_cpu

inline void begin_products() { on_cpu::has_fence[on_cpu::number_of(on_cpu::current)] = true; }
inline void end_products() {
    on_cpu::has_fence[on_cpu::number_of(on_cpu::current)] = false;
    on_cpu::meet(nullptr, [](void **) {
        on_cpu::Products &products = on_cpu::own_products();
        products.groups.push_back(products.all.size());
    });
}
template <int LEFT>
void wait_for_products() { on_cpu::wait_for_groups_of_products(LEFT); }

inline void prepare(unsigned address, unsigned count) {
    on_cpu::Barrier barrier;
    barrier.count = barrier.pending = count, barrier.by = on_cpu::current;
    if (!on_cpu::barriers.insert({{on_cpu::current->rank, address}, barrier}).second)
        on_cpu::fail("a barrier is prepared twice");
}
inline void publish_barriers() {
    for (auto &[place, barrier] : on_cpu::barriers) barrier.is_shown |= barrier.by == on_cpu::current;
}
inline void arrive(unsigned address) {
    on_cpu::arrive_at_barrier(on_cpu::barrier_at(on_cpu::current->rank, address));
}
inline void arrive_and_expect(unsigned address, unsigned bytes) {
    on_cpu::Barrier &barrier = on_cpu::barrier_at(on_cpu::current->rank, address);
    barrier.bytes += bytes;
    on_cpu::arrive_at_barrier(barrier);
}
inline void arrive_at(unsigned address, unsigned rank) {
    on_cpu::arrive_at_barrier(on_cpu::shown_barrier_at(rank, address));
}
inline void wait(unsigned address, unsigned parity) {
    on_cpu::Barrier &barrier = on_cpu::barrier_at(on_cpu::current->rank, address);
    while (barrier.phase % 2 == parity) {
        barrier.waiting.push_back(on_cpu::current);
        on_cpu::wait();
    }
}

inline void put_zeros(unsigned address) {
    memset(on_cpu::shared(address, 16), 0, 16);
    on_cpu::is_hidden[on_cpu::current->rank][address / 16]++;
    on_cpu::hidden_by[on_cpu::number_of(on_cpu::current)].push_back({on_cpu::current->rank, address / 16});
}
inline void publish_to_products() {
    auto &hidden = on_cpu::hidden_by[on_cpu::number_of(on_cpu::current)];
    for (auto [rank, place] : hidden) on_cpu::is_hidden[rank][place]--;
    hidden.clear();
}

template <int BARRIER, int MEETING>
void meet() { on_cpu::meet_some(on_cpu::current->rank, BARRIER, MEETING); }
inline void wait_for_sharers() { on_cpu::meet_some(0, 0, on_cpu::thread_count()); }
template <int REGISTERS>
void set_registers() {}
template <int REGISTERS>
void take_registers() {}

inline void multiply_keys(float *sums, const unsigned *a, unsigned long long b, bool adds) {
    on_cpu::multiply_by_four(sums, a, 0, b, 64, adds, false);
}
inline void multiply_values(float *sums, const unsigned *a, unsigned long long b, bool adds) {
    on_cpu::multiply_by_four(sums, a, 0, b, 128, adds, true);
}
template <int COUNT>
void multiply_outputs(float (&sums)[COUNT], unsigned long long rows, unsigned long long outputs, bool adds) {
    on_cpu::multiply_by_four(sums, nullptr, rows, outputs, COUNT * 2, adds, false);
}

inline void copy_page(unsigned to, const Map *map, unsigned within, unsigned half, unsigned block, unsigned barrier) {
    on_cpu::copy_box({*map, to, {0, within, half, block}, barrier, 1u << on_cpu::current->rank});
}
inline void copy_part(unsigned to, const Map *map, unsigned input, unsigned row, unsigned barrier) {
    on_cpu::copy_box({*map, to, {input, row, 0, 0}, barrier, 1u << on_cpu::current->rank});
}
inline void copy_part_to_all(
    unsigned to, const Map *map, unsigned input, unsigned row, unsigned barrier, unsigned short sharers) {
    on_cpu::copy_box({*map, to, {input, row, 0, 0}, barrier, sharers});
}

// Attention of tiles of query rows by the keys of their visits on a CPU, its gradients, and the table of tiles of lists.
//
// Online softmax over blocks of keys, as in FlashAttention-2 (arXiv 2307.08691). Scores are held as (keys, queries):
// maxima and sums over keys then go down whole vectors, and k is read without a transpose. Products and sums are fp32.
// Where the CPU multiplies bf16 itself (AVX512-BF16), the forward of bf16 does so, with sums in fp32.

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

#ifdef __AVX512F__
constexpr int WIDTH = 16, COLUMNS = 4;  // floats of a vector; vectors of a register tile
#else
constexpr int WIDTH = 8, COLUMNS = 2;
#endif
constexpr int ROWS = 6;                  // of a register tile
constexpr int QUERIES = 64, KEYS = 96;   // of a block of scores
constexpr int FEW_ROWS = 8, SPAN = 128;  // so few rows read each key where it lies, in blocks of so many
constexpr float LOG2E = 1.44269504088896341f, INF = INFINITY;

typedef float vec __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t uvec __attribute__((vector_size(4 * WIDTH)));
typedef float unaligned __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
#define INLINE static inline __attribute__((always_inline))

INLINE vec load(const float* p) { return *(const unaligned*)p; }
INLINE void store(float* p, vec x) { *(unaligned*)p = x; }
INLINE vec all(float x) { return x - vec{}; }  // no addition is made of it, which bits of two bf16 would not survive
INLINE vec larger(vec a, vec b) { return a > b ? a : b; }

// 2^x as a power times (1 + rest), to about 1e-7; not below 2^-126.
struct Power { vec power, rest; };
INLINE Power power_of(vec x) {
  const vec magic = all(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer, which its low bits then hold
  const vec whole = x + magic, f = x - (whole - magic);
  vec p = all(1.326472731e-3f);
  p = p * f + all(9.671512991e-3f);
  p = p * f + all(5.550733581e-2f);
  p = p * f + all(2.402224243e-1f);
  p = p * f + all(6.931470037e-1f);
  return {(vec)(((uvec)whole - (0x4b400000u - 127u)) << 23), p * f};
}
// 2^x, 0 below 2^-126. NaN stays NaN.
INLINE vec exp2_of(vec x) {
  const Power y = power_of(x);
  return x < all(-126.f) ? vec{} : y.power * (y.rest + all(1.f));
}

// How an item of A, for all columns alike, multiplies vectors of B: a float each, or two bf16, neighbours along k.
struct Single {
  INLINE vec add(vec sum, vec a, vec b) { return sum + a * b; }
};
#ifdef __AVX512BF16__
struct Pairs {
  INLINE vec add(vec sum, vec a, vec b) { return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }
};
#endif

// Rows of a matrix that are so far apart; elsewhere an array of pointers says where each begins.
template <class T>
struct Spaced {
  T* first;
  long step;
  T* operator[](long i) const { return first + i * step; }
  Spaced operator+(long i) const { return {first + i * step, step}; }
};

template <class Kind, bool ADD, int R, int N, class As, class Bs, class Cs>
INLINE void register_tile(As A, long k_step, Bs B, Cs C, long column, long count) {
  vec sum[R][N];
  const float* a_row[R];
  for (int r = 0; r < R; r++) a_row[r] = A[r];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < N; c++) sum[r][c] = ADD ? load(C[r] + column + c * WIDTH) : vec{};
  for (long k = 0; k < count; k++) {
    vec b[N];
    const float* b_row = B[k] + column;
    for (int c = 0; c < N; c++) b[c] = load(b_row + c * WIDTH);
    for (int r = 0; r < R; r++) {
      const vec a = all(a_row[r][k * k_step]);
      for (int c = 0; c < N; c++) sum[r][c] = Kind::add(sum[r][c], a, b[c]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < N; c++) store(C[r] + column + c * WIDTH, sum[r][c]);
}

template <class Kind, bool ADD, int N, int R = ROWS, class As, class Bs, class Cs>
INLINE void register_strip(long rows, As A, long k_step, Bs B, Cs C, long column, long count) {
  long r = 0;
  for (; r + R <= rows; r += R) register_tile<Kind, ADD, R, N>(A + r, k_step, B, C + r, column, count);
  if constexpr (R > 1)
    if (r < rows) register_strip<Kind, ADD, N, R - 1>(rows - r, A + r, k_step, B, C + r, column, count);
}

// C (rows, columns) = A B, or added to C. Item (row, k) of A is at A[row] + k * k_step; B is (count, columns).
template <class Kind, bool ADD, class As, class Bs, class Cs>
void multiply_rows(long rows, long columns, long count, As A, long k_step, Bs B, Cs C) {
  long c = 0;
  for (; c + COLUMNS * WIDTH <= columns; c += COLUMNS * WIDTH)
    register_strip<Kind, ADD, COLUMNS>(rows, A, k_step, B, C, c, count);
  for (; c < columns; c += WIDTH) register_strip<Kind, ADD, 1>(rows, A, k_step, B, C, c, count);
}

struct Bfloat { uint16_t bits; };
INLINE float number(float x) { return x; }
INLINE float number(_Float16 x) { return x; }
INLINE float number(Bfloat x) {
  const uint32_t bits = (uint32_t)x.bits << 16;
  float found;
  memcpy(&found, &bits, 4);
  return found;
}
INLINE void put(float* to, float x) { *to = x; }
INLINE void put(_Float16* to, float x) { *to = (_Float16)x; }
INLINE void put(Bfloat* to, float x) {  // rounded to the nearest, or to even
  uint32_t bits;
  memcpy(&bits, &x, 4);
  to->bits = x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
}
INLINE float pair(Bfloat low, Bfloat high) {
  const uint32_t bits = low.bits | (uint32_t)high.bits << 16;
  float found;
  memcpy(&found, &bits, 4);
  return found;
}

// The first ``count`` items from p on, others 0.
template <class T>
INLINE vec read(const T* p, long count) {
  vec found{};
  if (count >= WIDTH)
    for (int i = 0; i < WIDTH; i++) found[i] = number(p[i]);
  else
    for (int i = 0; i < count; i++) found[i] = number(p[i]);
  return found;
}

// Row i of the matrix x becomes its column i: at each bit of a place (row, lane), halves change sides.
template <int BIT, int... I>
INLINE void swap_halves(vec& x, vec& y, std::integer_sequence<int, I...>) {
  const vec a = x, b = y;
  x = __builtin_shufflevector(a, b, (I & BIT ? WIDTH + (I ^ BIT) : I)...);
  y = __builtin_shufflevector(a, b, (I & BIT ? WIDTH + I : I ^ BIT)...);
}
template <int BIT = WIDTH / 2>
INLINE void transpose(vec* x) {
  for (int i = 0; i < WIDTH; i++)
    if (!(i & BIT)) swap_halves<BIT>(x[i], x[i | BIT], std::make_integer_sequence<int, WIDTH>{});
  if constexpr (BIT > 1) transpose<BIT / 2>(x);
}

// Copies of rows of the inputs in the order in which products read them; what is padded is 0.
template <class Kind, class T>
struct Reader {
  static constexpr int item = 1;  // of a row along d
  template <class Rows>
  INLINE void rows(float* __restrict to, Rows from, long count, long d, long padded) {  // (count, padded)
    for (long r = 0; r < count; r++, to += padded) {
      const T* __restrict row = from[r];
      for (long x = 0; x < padded; x += WIDTH) store(to + x, read(row + x, d - x));
    }
  }
  template <class Rows>
  INLINE void columns(float* to, Rows from, long count, long d, long width = QUERIES) {  // (d, width)
    for (long r = 0; r < width; r += WIDTH)
      for (long x = 0; x < d; x += WIDTH) {
        vec square[WIDTH] = {};
        for (int i = 0; i < WIDTH && r + i < count; i++) square[i] = read(from[r + i] + x, d - x);
        transpose(square);
        for (int i = 0; i < WIDTH && x + i < d; i++) store(to + (x + i) * width + r, square[i]);
      }
  }
  template <class Rows>
  INLINE void values(float* to, Rows from, long count, long d, long padded) {
    rows(to, from, count, d, padded);
  }
  INLINE void probabilities(float*, long, long) {}
};

#ifdef __AVX512BF16__
template <>
struct Reader<Pairs, Bfloat> {
  static constexpr int item = 2;
  template <class Rows>
  INLINE void rows(float* to, Rows from, long count, long d, long padded) {  // (count, padded pairs)
    for (long r = 0; r < count; r++, to += padded) {
      memcpy(to, from[r], d * 2);
      if (d % 2) ((Bfloat*)to)[d] = Bfloat{0};
    }
  }
  template <class Rows>
  INLINE void columns(float* to, Rows from, long count, long d, long width = QUERIES) {  // (pairs, width)
    for (long r = 0; r < width; r++)
      for (long x = 0; x < d; x += 2)
        to[x / 2 * width + r] = r < count ? pair(from[r][x], x + 1 < d ? from[r][x + 1] : Bfloat{0}) : 0;
  }
  template <class Rows>
  INLINE void values(float* to, Rows from, long count, long d, long padded) {  // (pairs of keys, padded)
    for (long r = 0; r < count; r += 2, to += padded) {
      for (long x = 0; x < d; x++) to[x] = pair(from[r][x], r + 1 < count ? from[r + 1][x] : Bfloat{0});
      for (long x = d; x < padded; x++) to[x] = 0;
    }
  }
  INLINE void probabilities(float* p, long keys, long c) {  // rounded, two keys to an item, in place
    for (long j = 0; j < keys; j += 2) {
      const __m512 first = (__m512)load(p + j * QUERIES + c);
      const __m512 second = j + 1 < keys ? (__m512)load(p + (j + 1) * QUERIES + c) : _mm512_setzero_ps();
      const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(first));
      const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(second));
      store(p + j / 2 * QUERIES + c, (vec)_mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
  }
};
#endif

// A tensor: its first item, and how far apart its entries, rows, heads and the items of a row are.
struct Rows {  // (batch, rows, heads, d), or without d
  void* data;
  int64_t batch, row, head, item;
  template <class T>
  T* at(long b, long h, long r = 0) const { return (T*)data + b * batch + h * head + r * row; }
};

INLINE void add_scaled(float* __restrict to, const float* __restrict from, long d, float keep, float by) {
  for (long x = 0; x < d; x++) to[x] = to[x] * keep + from[x] * by;
}
template <class T>
INLINE void write_scaled(T* __restrict to, const float* __restrict from, long d, float by) {
  for (long x = 0; x < d; x++) put(to + x, from[x] * by);
}
struct Memory {  // for the arrays of all threads, made before these start: there is no way out of them for an error
  long floats;
  std::unique_ptr<float[]> memory;
  Memory(long threads, long each) : floats(each + 512), memory(new float[threads * floats]) {}
};
struct Scratch {  // the part of one thread
  float* next;
  explicit Scratch(const Memory& all) : next(all.memory.get() + omp_get_thread_num() * all.floats) {}
  float* take(long floats) {
    float* found = (float*)(((uintptr_t)next + 63) & ~(uintptr_t)63);
    next = found + floats;
    return found;
  }
};

// Lanes of x with this bit unset and of y with it set, each with its partner, whose bit is the other one.
template <int BIT, int... I>
INLINE vec add_halves(vec x, vec y, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(x, y, (I & BIT ? WIDTH + I : I)...) +
         __builtin_shufflevector(x, y, ((I & BIT ? WIDTH : 0) + (I ^ BIT))...);
}
// Lane i of the result is the sum of all lanes of x[i].
template <int BIT = WIDTH / 2>
INLINE vec sums_of(vec* x) {
  for (int i = 0; i < BIT; i++) x[i] = add_halves<BIT>(x[i], x[i + BIT], std::make_integer_sequence<int, WIDTH>{});
  if constexpr (BIT > 1) return sums_of<BIT / 2>(x);
  return x[0];
}

// Products of one register tile in the nearest cache, again and again; the FLOPs of all threads.
template <class Kind>
double run_multiply(long threads, long rounds) {
  constexpr long columns = COLUMNS * WIDTH, depth = 64;
  const Memory memory(threads, (ROWS + columns) * depth + ROWS * columns);
#pragma omp parallel num_threads(threads)
  {
    Scratch own(memory);
    float *a = own.take(ROWS * depth), *b = own.take(columns * depth), *c = own.take(ROWS * columns);
    std::fill(a, c + ROWS * columns, 0.f);
    for (long i = 0; i < rounds; i++) {
      register_tile<Kind, true, ROWS, COLUMNS>(Spaced<const float>{a, depth}, 1, Spaced<const float>{b, columns}, Spaced<float>{c, columns}, 0, depth);
      asm volatile("" : : "r"(a), "r"(b), "r"(c) : "memory");  // none of the rounds is left out
    }
  }
  return 2.0 * ROWS * columns * depth * threads * rounds;
}

// ---- A table of tiles: tiles/table.py explains its columns. ----

struct Tile { int32_t batch, head, heads, first, step, count, position, from, to; };
struct Visit {
  int32_t key, key_step, keys, key_list, key_position;  // of keys; a list of them if key_list >= 0
  int32_t row, row_step, rows, row_list;                // of the tile's rows, of each of its heads
  int32_t band, ranges, grain, weights;                 // below 0: none; a range of keys for each ``grain`` rows of a head
  float log_m;
};
// A key is seen whose position less the query's is from -before to after, and not from -inner_before to inner_after.
struct Band { int32_t before, after, inner_before, inner_after; };

struct Walk {
  double scale, softcap;  // softcap 0: none
  int64_t tiles, weight_count;
  const Tile* tile;
  const Visit* visit;
  const Band* band;
  const int32_t* numbers;  // lists of keys and rows, ranges
  const float* weights;    // added to scores: a number for each listed key, or for each row where keys are a run
  const float* sinks;      // (heads,)
  // merge: a forward continues the result that is there, a backward adds to dq.
  int64_t heads, kv_heads, keys, d, dtype, merge, narrow, threads, copies;
  float* dweights;         // (copies, weights): one for each of the tiles that share visits
  Rows q, k, v, out, lse, dout, dq, dk, dv, dlse;
};

typedef int32_t ivec __attribute__((vector_size(4 * WIDTH)));
typedef int32_t unaligned_ints __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

struct Capped { vec value, slope; };
// tanh and its derivative by e = e^(-2|x|): -(e - 1) / (e + 1) and 4 e / (e + 1)^2, exact for small and for large x, too.
INLINE Capped tanh_of(vec x) {
  const vec far = (x < vec{} ? -x : x) * all(-2 * LOG2E), least = all(-126.f);
  const Power y = power_of(far < least ? least : far);
  const vec less = y.power * y.rest + (y.power - all(1.f)), e = y.power * y.rest + y.power;
  const vec t = -less / (less + all(2.f));
  return {x < vec{} ? -t : t, all(4.f) * e / ((e + all(1.f)) * (e + all(1.f)))};
}

// What a pass does to scores after the product: scale, soft cap, weights. Without the last two the scale is left to the
// exponential, which then is 1 for the largest.
struct Shape {
  float scale, softcap;
  bool scaled;  // scores are multiplied by the scale before they are compared
  float factor() const { return scaled ? 1.f : scale; }
};

// One visit as a kernel runs it: rows of the tile in groups, and which keys each group sees.
struct Plan {
  const Tile* tile;
  const Visit* visit;
  long rows, groups, width;  // of all heads; columns that hold a group
  int32_t *index;            // of the tile's rows
  int32_t *position;         // of each, if the visit has a band
  int32_t *start, *low, *high;  // of each group: its first row, the keys that it sees; one group more begins at the end
  long first, stop;             // the keys that any group sees
};

INLINE long key_row(const Walk& walk, const Visit& visit, long j) {
  return visit.key_list < 0 ? visit.key + j * visit.key_step : walk.numbers[visit.key_list + j];
}

INLINE long width_of(long grain) { return (grain + WIDTH - 1) / WIDTH * WIDTH; }

// Fill the plan of a visit.
INLINE void plan_visit(const Walk& walk, const Tile& tile, const Visit& visit, Plan& plan) {
  plan.tile = &tile, plan.visit = &visit;
  long s = 0, g = 0;
  const long heads = visit.ranges < 0 ? 1 : tile.heads, grain = visit.ranges < 0 ? QUERIES : visit.grain;
  for (long h = 0; h < tile.heads; h++)
    for (long i = 0; i < visit.rows; i++, s++)
      plan.index[s] = h * tile.count + (visit.row_list < 0 ? visit.row + i * visit.row_step : walk.numbers[visit.row_list + i]);
  plan.rows = s, plan.width = width_of(grain);
  for (long h = 0; h < heads; h++)
    for (long r = 0; r < s / heads; r += grain) plan.start[g++] = h * (s / heads) + r;
  plan.start[g] = s, plan.groups = g;
  const Band* band = visit.band < 0 ? nullptr : walk.band + visit.band;
  if (band)
    for (long i = 0; i < s; i++) plan.position[i] = tile.position + tile.step * (plan.index[i] % tile.count);
  plan.first = visit.keys, plan.stop = 0;
  for (g = 0; g < plan.groups; g++) {
    long low = 0, high = visit.keys;
    if (visit.ranges >= 0) {
      const int32_t* range = walk.numbers + visit.ranges + 2 * (g % (plan.groups / heads));
      low = range[0], high = range[1];
    }
    if (band) {
      long least = plan.position[plan.start[g]], most = least;
      for (long i = plan.start[g] + 1; i < plan.start[g + 1]; i++)
        least = std::min<long>(least, plan.position[i]), most = std::max<long>(most, plan.position[i]);
      const long before = least - band->before - visit.key_position, after = most + band->after - visit.key_position;
      if (before > 0) low = std::max(low, (before + visit.key_step - 1) / visit.key_step);
      high = after < 0 ? 0 : std::min(high, after / visit.key_step + 1);
    }
    if (low >= high)
      low = high = 0;
    else
      plan.first = std::min(plan.first, low), plan.stop = std::max(plan.stop, high);
    plan.low[g] = low, plan.high[g] = high;
  }
}

// Hide what a band does: scores (keys, QUERIES) of keys from ``key`` on and ``count`` rows from ``row`` on.
INLINE void hide_by_band(const Walk& walk, const Plan& plan, float* scores, long key, long keys, long row, long count) {
  const Visit& visit = *plan.visit;
  if (visit.band < 0) return;
  const Band& band = walk.band[visit.band];
  int32_t position[QUERIES], least = INT32_MAX, most = INT32_MIN;
  for (long i = 0; i < QUERIES; i++) {
    position[i] = plan.position[row + std::min(i, count - 1)];
    least = std::min(least, position[i]), most = std::max(most, position[i]);
  }
  const bool inner = band.inner_before >= 0;
  const long begin = visit.key_position + key * visit.key_step, end = begin + (keys - 1) * visit.key_step;
  if (!inner && begin - most >= -band.before && end - least <= band.after) return;
  for (long j = 0; j < keys; j++) {
    const int32_t at = visit.key_position + (key + j) * visit.key_step;
    const bool seen = at - most >= -band.before && at - least <= band.after;
    const bool met = inner && at - least >= -band.inner_before && at - most <= band.inner_after;
    if (seen && !met) continue;
    for (long c = 0; c < count; c += WIDTH) {
      const ivec apart = at - *(const unaligned_ints*)(position + c);
      ivec hidden = (apart < -band.before) | (apart > band.after);
      if (inner) hidden |= (apart >= -band.inner_before) & (apart <= band.inner_after);
      store(scores + j * QUERIES + c, hidden ? all(-INF) : load(scores + j * QUERIES + c));
    }
  }
}

// Scale, cap and weigh scores (keys, QUERIES); ``slope``: with the derivative of the soft cap, if it is asked for.
INLINE void shape_scores(const Shape& shape, float* scores, long keys, long columns, const float* by_row, const float* by_key, float log_m, float* slope) {
  for (long j = 0; j < keys; j++) {
    const vec whole = all(by_key ? log_m + by_key[j] : log_m);
    for (long c = 0; c < columns; c += WIDTH) {
      vec x = load(scores + j * QUERIES + c) * all(shape.scale);
      if (shape.softcap) {
        const Capped t = tanh_of(x * all(1 / shape.softcap));
        x = t.value * all(shape.softcap);
        if (slope) store(slope + j * QUERIES + c, t.slope);
      }
      store(scores + j * QUERIES + c, by_row ? x + load(by_row + c) + whole : x + whole);
    }
  }
}

// Scores (keys, QUERIES) to probabilities against the largest so far; rescale what was summed up of each row.
template <class Kind, class T>
INLINE void soften(float* scores, long keys, long columns, float factor, float* top, float* sum, float* const* out, long D) {
  const vec by = all(factor * LOG2E);
  for (long c = 0; c < columns; c += WIDTH) {
    const vec before = load(top + c);
    vec most = before, total{};
    for (long j = 0; j < keys; j++) most = larger(most, load(scores + j * QUERIES + c));
    const vec shift = most == all(-INF) ? vec{} : most;
    for (long j = 0; j < keys; j++) {
      const vec p = exp2_of((load(scores + j * QUERIES + c) - shift) * by);
      store(scores + j * QUERIES + c, p);
      total += p;
    }
    const vec less = before == all(-INF) ? all(1.f) : exp2_of((before - shift) * by);
    store(top + c, most);
    store(sum + c, load(sum + c) * less + total);
    for (int i = 0; i < WIDTH; i++)
      if (less[i] != 1.f)
        for (long x = 0; x < D; x += WIDTH) store(out[c + i] + x, load(out[c + i] + x) * all(less[i]));
    Reader<Kind, T>::probabilities(scores, keys, c);
  }
}

constexpr int PARTS = 8;     // of dk and dv, where K/V heads are fewer: so many threads have work, and sums one order

INLINE long most_rows(const Walk& walk) {
  long most = 1;
  for (long i = 0; i < walk.tiles; i++) most = std::max<long>(most, (long)walk.tile[i].heads * walk.tile[i].count);
  return (most + QUERIES - 1) / QUERIES * QUERIES;
}
// Of rows that stand transposed, each group of them in columns of its own.
INLINE long most_columns(const Walk& walk) {
  long most = most_rows(walk);
  for (long i = 0; i < walk.tiles; i++)
    for (long n = walk.tile[i].from; n < walk.tile[i].to; n++) {
      const Visit& visit = walk.visit[n];
      if (visit.ranges >= 0) most = std::max<long>(most, walk.tile[i].heads * ((visit.rows + visit.grain - 1) / visit.grain) * width_of(visit.grain));
    }
  return most;
}
INLINE Shape shape_of(const Walk& walk) {
  bool scaled = walk.softcap || walk.weights || walk.sinks || walk.scale < 1e-20;  // by which an lse is not divided
  for (long i = 0; !scaled && i < walk.tiles; i++)
    for (long n = walk.tile[i].from; !scaled && n < walk.tile[i].to; n++) scaled = walk.visit[n].log_m != 0;
  return {(float)walk.scale, (float)walk.softcap, scaled};
}

// What is added to the scores of keys from ``key`` on, or of ``count`` rows from ``row`` on; null: nothing.
INLINE const float* key_weights(const Walk& walk, const Visit& visit, long key) {
  return visit.weights < 0 || visit.key_list < 0 ? nullptr : walk.weights + visit.weights + key;
}
INLINE const float* row_weights(const Walk& walk, const Plan& plan, long row, long count, float* to) {
  const Visit& visit = *plan.visit;
  if (visit.weights < 0 || visit.key_list >= 0) return nullptr;
  for (long i = 0; i < QUERIES; i++) to[i] = i < count ? walk.weights[visit.weights + (row + i) % visit.rows] : 0;
  return to;
}

// Scale out (D,) and add rows times weights p (count,), from column x on.
template <int N = COLUMNS, class Bs>
INLINE void add_weighted(float* out, long D, float keep, const float* p, Bs rows, long count, long x = 0) {
  for (; x + N * WIDTH <= D; x += N * WIDTH) {
    vec sum[N];
    for (int c = 0; c < N; c++) sum[c] = load(out + x + c * WIDTH) * all(keep);
    for (long j = 0; j < count; j++) {
      const float* row = rows[j] + x;
      for (int c = 0; c < N; c++) sum[c] += all(p[j]) * load(row + c * WIDTH);
    }
    for (int c = 0; c < N; c++) store(out + x + c * WIDTH, sum[c]);
  }
  if constexpr (N > 1)
    if (x < D) add_weighted<1>(out, D, keep, p, rows, count, x);
}

INLINE vec probability(vec x) { return exp2_of((x > vec{} ? vec{} : x) * all(LOG2E)); }  // none is above 1

// What a thread holds of the tile that it works on: the rows of a visit, and where each lies.
template <class Kind, class T>
struct Held {
  typedef Reader<Kind, T> Read;
  const Walk& walk;
  const Tile* tile;
  Plan plan;
  Visit shown;  // whose rows stand transposed
  const T **q, **k, **v;
  float* own_sums = nullptr;  // of dk and dv (keys, 2, d), if this thread does not add to those of the call
  Held(const Walk& walk, Scratch& own, long most)
      : walk(walk), tile(nullptr), shown{}, q((const T**)own.take(2 * most)), k((const T**)own.take(2 * SPAN)), v((const T**)own.take(2 * SPAN)) {
    plan.index = (int32_t*)own.take(most), plan.position = (int32_t*)own.take(most);
    plan.start = (int32_t*)own.take(most + 1), plan.low = (int32_t*)own.take(most), plan.high = (int32_t*)own.take(most);
  }
  static long floats(long most) { return 7 * most + 4 * SPAN + 256; }

  long rows() const { return (long)tile->heads * tile->count; }
  template <class X>
  X* row(const Rows& t, long i) const {
    const long head = tile->heads == 1 ? 0 : i / tile->count;  // a division takes long
    return t.at<X>(tile->batch, tile->head + head, tile->first + (i - head * tile->count) * tile->step);
  }
  long kv_head() const { return tile->head / (walk.heads / walk.kv_heads); }
  std::pair<float*, float*> gradients(long row) const {
    if (own_sums) return {own_sums + 2 * row * walk.d, own_sums + (2 * row + 1) * walk.d};
    return {walk.dk.at<float>(tile->batch, kv_head(), row), walk.dv.at<float>(tile->batch, kv_head(), row)};
  }
  void start(const Tile& next) {
    tile = &next, shown.rows = -1;
    for (long i = 0; i < rows(); i++) q[i] = row<const T>(walk.q, i);
  }
  // Whether the visit is of few rows. Not asked of lists: how many rows see a block depends on what other rows list.
  bool has_few() const { return plan.visit->row_list < 0 && plan.rows <= FEW_ROWS; }
  // Plan a visit; whether its rows are not those that stand transposed.
  bool visit(const Visit& visit) {
    plan_visit(walk, *tile, visit, plan);
    if (visit.row_list < 0 && visit.row == shown.row && visit.row_step == shown.row_step && visit.rows == shown.rows && visit.grain == shown.grain &&
        (visit.ranges < 0) == (shown.ranges < 0))  // groups of one head, or of all
      return false;
    shown = visit;
    if (visit.row_list >= 0) shown.rows = -1;
    return true;
  }
  // Bring keys into the cache, while others are worked on. In line, as gcc else finds no effect and leaves it out.
  __attribute__((always_inline)) void fetch(long key, long stop) const {
    const T *k_in = walk.k.at<const T>(tile->batch, kv_head()), *v_in = walk.v.at<const T>(tile->batch, kv_head());
    for (; key < stop; key++) {
      const long at = key_row(walk, *plan.visit, key);
      for (long x = 0; x < walk.d; x += 64 / sizeof(T)) {
        __builtin_prefetch(k_in + at * walk.k.row + x, 0, 2);
        __builtin_prefetch(v_in + at * walk.v.row + x, 0, 2);
      }
    }
  }
  // Where the keys from ``key`` on lie.
  void find_keys(long key, long count) {
    const T *k_in = walk.k.at<const T>(tile->batch, kv_head()), *v_in = walk.v.at<const T>(tile->batch, kv_head());
    for (long j = 0; j < count; j++) {
      const long at = key_row(walk, *plan.visit, key + j);
      k[j] = k_in + at * walk.k.row, v[j] = v_in + at * walk.v.row;
    }
  }
};

// Products of rows a (few,) and b (count,), as many floats of whole vectors each: (few, SPAN).
template <class Bs>
INLINE void dot_rows(float* to, const float* a, long few, Bs b, long count, long D) {
  for (long j = 0; j < count; j += WIDTH)
    for (long i = 0; i < few; i++) {
      vec sum[WIDTH] = {};
      for (long x = 0; x < D; x += WIDTH) {
        const vec y = load(a + i * D + x);
        for (int c = 0; c < WIDTH; c++) sum[c] += y * load(b[std::min(j + c, count - 1)] + x);
      }
      store(to + i * SPAN + j, sums_of(sum));
    }
}

// Scale, cap, weigh and hide the scores (few, SPAN) of keys from ``key`` on.
INLINE void shape_few(const Walk& walk, const Plan& plan, const Shape& shape, float* scores, long key, long count, float* slope) {
  const Visit& visit = *plan.visit;
  const Band* band = visit.band < 0 ? nullptr : walk.band + visit.band;
  for (long i = 0; i < plan.rows; i++) {
    float* row = scores + i * SPAN;
    if (shape.scaled) {
      const float* weights = visit.weights < 0 ? nullptr : walk.weights + visit.weights;
      const float whole = visit.log_m + (weights && visit.key_list < 0 ? weights[i % visit.rows] : 0);
      for (long j = 0; j < count; j += WIDTH) {
        vec x = load(row + j) * all(shape.scale);
        if (shape.softcap) {
          const Capped t = tanh_of(x * all(1 / shape.softcap));
          x = t.value * all(shape.softcap);
          if (slope) store(slope + i * SPAN + j, t.slope);
        }
        store(row + j, x + all(whole));
      }
      if (weights && visit.key_list >= 0)
        for (long j = 0; j < count; j++) row[j] += weights[key + j];
    }
    for (long j = 0; band && j < count; j++) {
      const long apart = visit.key_position + (key + j) * visit.key_step - plan.position[i];
      const bool met = band->inner_before >= 0 && apart >= -band->inner_before && apart <= band->inner_after;
      if (apart < -band->before || apart > band->after || met) row[j] = -INF;
    }
    for (long j = count; j % WIDTH; j++) row[j] = -INF;
  }
}

// Keys of a visit as floats of whole vectors: where they lie, or copied.
template <class T>
INLINE const float* const* as_floats(const T* const* rows, long count, long d, long D, float* copy, const float** at) {
  if (sizeof(T) == 4 && d == D) return (const float* const*)rows;
  Reader<Single, T>::rows(copy, rows, count, d, D);
  for (long j = 0; j < count; j++) at[j] = copy + j * D;
  return at;
}

struct Few {  // of a thread, for visits of few rows
  float *q, *p, *k, *v;
  const float **k_at, **v_at;
  float *dout, *out, *ds, *slope;  // of a backward
};

// Some keys of a visit of few rows.
template <class Kind, class T, class Rows>
INLINE void add_keys(const Held<Kind, T>& held, const Shape& shape, const Few& few, Rows keys, Rows values, long key, long count, float* sums, float* top, float* sum, long D) {
  const Plan& plan = held.plan;
  dot_rows(few.p, few.q, plan.rows, keys, count, D);
  shape_few(held.walk, plan, shape, few.p, key, count, nullptr);
  for (long i = 0; i < plan.rows; i++) {
    float *p = few.p + i * SPAN, *out = sums + plan.index[i] * D, *largest = top + plan.index[i];
    vec most = all(*largest), total{};
    for (long j = 0; j < count; j += WIDTH) most = larger(most, load(p + j));
    float highest = *largest, added = 0;
    for (int c = 0; c < WIDTH; c++) highest = most[c] > highest ? most[c] : highest;
    const vec shift = all(highest == -INF ? 0 : highest), by = all(shape.factor() * LOG2E);
    for (long j = 0; j < count; j += WIDTH) {
      const vec x = exp2_of((load(p + j) - shift) * by);
      store(p + j, x);
      total += x;
    }
    for (int c = 0; c < WIDTH; c++) added += total[c];
    const float less = *largest == -INF ? 1 : exp2_of((all(*largest) - shift) * by)[0];
    *largest = highest, sum[plan.index[i]] = sum[plan.index[i]] * less + added;
    add_weighted(out, D, less, p, values, count);
  }
}

// A visit of few rows: a matrix product is not worth its copies.
template <class Kind, class T>
void visit_few(Held<Kind, T>& held, const Shape& shape, const Few& few, float* sums, float* top, float* sum, long D) {
  const Walk& walk = held.walk;
  const Plan& plan = held.plan;
  const Visit& visit = *plan.visit;
  const bool apart = visit.key_list >= 0 || visit.key_step * walk.k.row != walk.d;  // else the CPU sees what comes next
  for (long i = 0; i < plan.rows; i++) Reader<Single, T>::rows(few.q + i * D, held.q + plan.index[i], 1, walk.d, D);
  for (long key = plan.first; key < plan.stop; key += SPAN) {
    const long count = std::min<long>(SPAN, plan.stop - key);
    if (apart) held.fetch(key + count, std::min(plan.stop, key + count + SPAN));
    if (sizeof(T) == 4 && walk.d == D && visit.key_list < 0) {
      const long at = key_row(walk, visit, key), k_step = visit.key_step * walk.k.row, v_step = visit.key_step * walk.v.row;
      const Spaced<const float> k_rows{walk.k.at<const float>(held.tile->batch, held.kv_head(), at), k_step};
      const Spaced<const float> v_rows{walk.v.at<const float>(held.tile->batch, held.kv_head(), at), v_step};
      add_keys(held, shape, few, k_rows, v_rows, key, count, sums, top, sum, D);
    } else {
      held.find_keys(key, count);
      const float* const* k_rows = as_floats(held.k, count, walk.d, D, few.k, few.k_at);
      const float* const* v_rows = as_floats(held.v, count, walk.d, D, few.v, few.v_at);
      add_keys(held, shape, few, k_rows, v_rows, key, count, sums, top, sum, D);
    }
  }
}

// A tile, or one of the parts of the keys of a tile of few rows, which threads share.
struct Item {
  int32_t tile, part, parts;
  int64_t place;  // of the result of a part
};
constexpr int64_t PART = 1024;  // keys of a part at least

// The result of a part: sums (rows, D), then the largest score and the sum of each row.
INLINE long part_floats(const Tile& tile, long D) { return (long)tile.heads * tile.count * D + 2 * QUERIES; }

// Tiles are cut that have one visit, of all rows. So bits depend neither on the number of threads nor on other tiles, nor
// on what other rows list.
INLINE std::vector<Item> split_tiles(const Walk& walk, long D, long* floats) {
  std::vector<Item> items;
  for (int32_t i = 0; i < walk.tiles; i++) {
    const Tile& tile = walk.tile[i];
    const Visit& visit = walk.visit[tile.from];
    const bool whole = tile.to == tile.from + 1 && visit.rows == tile.count && visit.row_list < 0 && visit.ranges < 0;
    const int32_t parts = whole && tile.heads * tile.count <= QUERIES ? std::max<int64_t>(1, visit.keys / PART) : 1;
    const long each = parts > 1 ? part_floats(tile, D) : 0;
    for (int32_t part = 0; part < parts; part++, *floats += each) items.push_back({i, part, parts, *floats});
  }
  return items;
}

// Add the results of all parts to that of the first one, in their order.
INLINE void add_parts(const Item& item, long rows, long D, long floats, float factor, float* sums) {
  for (long part = 1; part < item.parts; part++)
    for (long i = 0; i < rows; i++) {
      float *out = sums + i * D, *top = sums + rows * D + i, *sum = top + QUERIES;
      const float other = top[part * floats], highest = std::max(*top, other);
      if (other == -INF) continue;
      const float keep = expf((*top - highest) * factor), add = expf((other - highest) * factor);
      add_scaled(out, out + part * floats, D, keep, add);
      *sum = *sum * keep + sum[part * floats] * add, *top = highest;
    }
}

// The result of a tile, but for rows that have what was there.
template <class Kind, class T>
INLINE void write_tile(const Held<Kind, T>& held, const float* sums, const float* top, const float* sum, float factor, long D) {
  const Walk& walk = held.walk;
  for (long i = 0; i < held.rows(); i++) {
    float* lse = held.template row<float>(walk.lse, i);
    if (walk.merge && sum[i] == 1 && top[i] == *lse / factor) continue;
    const float over = sum[i] == 0 ? 0 : 1 / sum[i];
    *lse = sum[i] == 0 ? -INF : top[i] * factor + logf(sum[i]);
    if (walk.narrow)
      write_scaled(held.template row<T>(walk.out, i), sums + i * D, walk.d, over);
    else
      write_scaled(held.template row<float>(walk.out, i), sums + i * D, walk.d, over);
  }
}

template <class Kind, class T>
void walk_forward(const Walk& walk) {
  typedef Reader<Kind, T> Read;
  const long d = walk.d, D = (d + WIDTH - 1) / WIDTH * WIDTH, depth = (d + Read::item - 1) / Read::item;
  const long most = most_rows(walk), columns_of_all = most_columns(walk);
  const Shape shape = shape_of(walk);
  const bool in_place = sizeof(T) == 4 || (Read::item == 2 && d % 2 == 0);
  long part_memory = 0;
  const std::vector<Item> items = split_tiles(walk, D, &part_memory);
  const Memory part_results(1, part_memory);
  float* parts = (float*)(((uintptr_t)part_results.memory.get() + 63) & ~(uintptr_t)63);
  const Memory memory(walk.threads, Held<Kind, T>::floats(most) + (most + columns_of_all) * D + 4 * most + QUERIES * KEYS + (2 * SPAN + FEW_ROWS) * D +
                                        FEW_ROWS * SPAN + 4 * SPAN + 4 * QUERIES);
#pragma omp parallel num_threads(walk.threads)
  {
    Scratch own(memory);
    Held<Kind, T> held(walk, own, most);
    const Plan& plan = held.plan;
    float *own_sums = own.take(most * D), *q_t = own.take(columns_of_all * D), *own_top = own.take(most), *own_sum = own.take(most);
    float *scores = own.take(QUERIES * KEYS), *k = own.take(SPAN * D), *v = own.take(SPAN * D);
    float *largest = own.take(QUERIES), *total = own.take(QUERIES), *weights = own.take(QUERIES);
    float** out = (float**)own.take(2 * most);
    const float **at = (const float**)own.take(2 * SPAN), **v_at = (const float**)own.take(2 * SPAN);
    const Few few{own.take(FEW_ROWS * D), own.take(FEW_ROWS * SPAN), k, v, at, v_at};
#pragma omp for schedule(dynamic)
    for (long number = 0; number < (long)items.size(); number++) {
      const Item& item = items[number];
      const Tile& tile = walk.tile[item.tile];
      held.start(tile);
      const long rows = held.rows();
      float *sums = own_sums, *top = own_top, *sum = own_sum;
      if (item.parts > 1) sums = parts + item.place, top = sums + rows * D, sum = top + QUERIES;
      for (long i = 0; i < rows; i++) {
        const float there = walk.merge ? *held.template row<float>(walk.lse, i) : walk.sinks ? walk.sinks[tile.head + i / tile.count] : -INF;
        const float before = item.part ? -INF : there;
        top[i] = before / shape.factor(), sum[i] = before != -INF;
        if (walk.merge && before != -INF)
          Reader<Single, float>::rows(sums + i * D, Spaced<const float>{held.template row<const float>(walk.out, i), 0}, 1, d, D);
        else
          std::fill(sums + i * D, sums + (i + 1) * D, 0.f);
      }
      for (long n = tile.from; n < tile.to; n++) {
        const Visit& visit = walk.visit[n];
        const bool changed = held.visit(visit);
        held.plan.first = std::max<long>(plan.first, (int64_t)visit.keys * item.part / item.parts);
        held.plan.stop = std::min<long>(plan.stop, (int64_t)visit.keys * (item.part + 1) / item.parts);
        if (held.has_few()) {
          held.shown.rows = -1;
          visit_few(held, shape, few, sums, top, sum, D);
          continue;
        }
        for (long g = 0; changed && g < plan.groups; g++) {
          const T* from[QUERIES];
          const long r = plan.start[g], count = plan.start[g + 1] - r;
          for (long i = 0; i < count; i++) from[i] = held.q[plan.index[r + i]], out[r + i] = sums + plan.index[r + i] * D;
          Read::columns(q_t + g * plan.width * depth, from, count, d, plan.width);
        }
        for (long key = plan.first; key < plan.stop; key += KEYS) {
          const long count = std::min<long>(KEYS, plan.stop - key);
          held.find_keys(key, count);
          const float* const* keys = (const float* const*)held.k;
          if (!in_place) {
            Read::rows(k, held.k, count, d, D);
            for (long j = 0; j < count; j++) at[j] = k + j * D;
            keys = at;
          }
          Read::values(v, held.v, count, d, D);
          const long next = std::min<long>(KEYS, plan.stop - key - count);
          for (long g = 0; g < plan.groups; g++) {
            held.fetch(key + count + next * g / plan.groups, key + count + next * (g + 1) / plan.groups);
            const long first = std::max<long>(plan.low[g], key) - key, high = std::min<long>(plan.high[g], key + count) - key;
            if (first >= high) continue;
            const long r = plan.start[g], here = plan.start[g + 1] - r, low = first - first % Read::item, mine = high - low;
            const long columns = (here + WIDTH - 1) / WIDTH * WIDTH;
            multiply_rows<Kind, false>(mine, columns, depth, keys + low, 1, Spaced<float>{q_t + g * plan.width * depth, plan.width}, Spaced<float>{scores, QUERIES});
            if (shape.scaled) shape_scores(shape, scores, mine, columns, row_weights(walk, plan, r, here, weights), key_weights(walk, visit, key + low), visit.log_m, nullptr);
            if (low < first) std::fill(scores, scores + QUERIES, -INF);
            hide_by_band(walk, plan, scores, key + low, mine, r, here);
            for (long i = 0; i < columns; i++) {
              largest[i] = i < here ? top[plan.index[r + i]] : -INF;
              total[i] = i < here ? sum[plan.index[r + i]] : 0;
            }
            soften<Kind, T>(scores, mine, columns, shape.factor(), largest, total, out + r, D);
            for (long i = 0; i < here; i++) top[plan.index[r + i]] = largest[i], sum[plan.index[r + i]] = total[i];
            multiply_rows<Kind, true>(here, D, (mine + Read::item - 1) / Read::item, Spaced<float>{scores, 1}, QUERIES,
                                      Spaced<float>{v + low / Read::item * D, D}, out + r);
          }
        }
      }
      if (item.parts == 1) write_tile(held, sums, top, sum, shape.factor(), D);
    }
#pragma omp for schedule(dynamic)
    for (long number = 0; number < (long)items.size(); number++) {
      const Item& item = items[number];
      if (item.parts == 1 || item.part) continue;
      const Tile& tile = walk.tile[item.tile];
      held.start(tile);
      float *sums = parts + item.place, *top = sums + held.rows() * D;
      add_parts(item, held.rows(), D, part_floats(tile, D), shape.factor(), sums);
      write_tile(held, sums, top, top + QUERIES, shape.factor(), D);
    }
  }
}

// The backward of a visit of few rows, which adds to dk and dv row by row.
template <class T>
void visit_few_backward(Held<Single, T>& held, const Shape& shape, const Few& few, const float* const* q, const float* const* dout, float* const* dq,
                        const float* lse, const float* dlse, float* dweights, long D) {
  const Walk& walk = held.walk;
  const Plan& plan = held.plan;
  const Visit& visit = *plan.visit;
  const long d = walk.d;
  float delta[FEW_ROWS], product[WIDTH];
  for (long i = 0; i < plan.rows; i++) {
    memcpy(few.q + i * D, q[i], D * sizeof(float));
    memcpy(few.dout + i * D, dout[i], D * sizeof(float));
    const T* out = held.template row<const T>(walk.out, plan.index[i]);
    const float* at;
    dot_rows(product, dout[i], 1, as_floats(&out, 1, d, D, few.out, &at), 1, D);  // in the order of the products below
    delta[i] = product[0] - dlse[plan.index[i]];
  }
  for (long key = plan.first; key < plan.stop; key += SPAN) {
    const long count = std::min<long>(SPAN, plan.stop - key);
    held.find_keys(key, count);
    const float* const* keys = as_floats(held.k, count, d, D, few.k, few.k_at);
    const float* const* values = as_floats(held.v, count, d, D, few.v, few.v_at);
    dot_rows(few.p, few.q, plan.rows, keys, count, D);
    dot_rows(few.ds, few.dout, plan.rows, values, count, D);
    shape_few(walk, plan, shape, few.p, key, count, few.slope);
    for (long i = 0; i < plan.rows; i++) {
      float *p = few.p + i * SPAN, *ds = few.ds + i * SPAN;
      float weight = 0;
      for (long j = 0; j < count; j += WIDTH) {
        const vec y = probability(load(p + j) * all(shape.factor()) - all(lse[plan.index[i]]));
        store(p + j, y);
        store(ds + j, y * (load(ds + j) - all(delta[i])));
      }
      if (dweights && visit.weights >= 0) {
        float* to = dweights + visit.weights + (visit.key_list < 0 ? i % visit.rows : key);
        for (long j = 0; j < count; j++)
          if (visit.key_list < 0) weight += ds[j];
          else to[j] += ds[j];
        if (visit.key_list < 0) *to += weight;
      }
      for (long j = 0; shape.softcap && j < count; j += WIDTH) store(ds + j, load(ds + j) * load(few.slope + i * SPAN + j));
      add_weighted(dq[i], D, 1, ds, keys, count);
    }
    for (long j = 0; j < count; j++) {
      const auto [to_k, to_v] = held.gradients(key_row(walk, visit, key + j));
      for (long i = 0; i < plan.rows; i++) {
        add_scaled(to_k, few.q + i * D, d, 1, few.ds[i * SPAN + j] * shape.scale);
        add_scaled(to_v, few.dout + i * D, d, 1, few.p[i * SPAN + j]);
      }
    }
  }
}

// A tile owns its rows of dq; dk and dv of some keys are summed up over its rows, then added to memory. A thread owns a
// part of the tiles of a K/V head, so that sums have one order.
template <class T>
void walk_backward(const Walk& walk) {
  typedef Reader<Single, T> Read;
  const long d = walk.d, D = (d + WIDTH - 1) / WIDTH * WIDTH, most = most_rows(walk), columns_of_all = most_columns(walk);
  const Shape shape = shape_of(walk);
  const bool in_place = sizeof(T) == 4 && d == D;
  const long group = walk.heads / walk.kv_heads;
  long batch = 0;
  for (long i = 0; i < walk.tiles; i++) batch = std::max<long>(batch, walk.tile[i].batch + 1);
  const long items = batch * walk.kv_heads, parts = std::max(1L, PARTS / std::max(1L, items)), each = 2 * walk.keys * d;
  std::vector<std::vector<int32_t>> tiles(items * parts);  // of each K/V head part by part
  std::vector<int32_t> met(items, 0);
  for (long i = 0; i < walk.tiles; i++) {
    const long item = walk.tile[i].batch * walk.kv_heads + walk.tile[i].head / group;
    tiles[item * parts + met[item]++ % parts].push_back(i);
  }
  const std::unique_ptr<float[]> sums(parts > 1 ? new float[items * (parts - 1) * each]() : nullptr);
  const Memory memory(walk.threads, Held<Single, T>::floats(most) + (3 * most + 2 * columns_of_all) * D + 11 * most + 3 * QUERIES * KEYS + 4 * SPAN * D +
                                        (2 * FEW_ROWS + 1) * D + 3 * FEW_ROWS * SPAN + 4 * SPAN + 4 * QUERIES);
#pragma omp parallel num_threads(walk.threads)
  {
    Scratch own(memory);
    Held<Single, T> held(walk, own, most);
    const Plan& plan = held.plan;
    float *q_t = own.take(columns_of_all * D), *dout_t = own.take(columns_of_all * D), *dq = own.take(most * D);
    float *q_copy = own.take(most * D), *dout_copy = own.take(most * D), *lse = own.take(most), *delta = own.take(most), *dlse = own.take(most);
    float *p = own.take(QUERIES * KEYS), *ds = own.take(QUERIES * KEYS), *slope = own.take(QUERIES * KEYS);
    float *k = own.take(SPAN * D), *v = own.take(SPAN * D), *dk = own.take(SPAN * D), *dv = own.take(SPAN * D);
    float *row_lse = own.take(QUERIES), *row_delta = own.take(QUERIES), *weights = own.take(QUERIES);
    const T** dout_in = (const T**)own.take(2 * most);
    const float **q_rows = (const float**)own.take(2 * most), **dout_rows = (const float**)own.take(2 * most);
    const float **k_at = (const float**)own.take(2 * SPAN), **v_at = (const float**)own.take(2 * SPAN);
    float** dq_rows = (float**)own.take(2 * most);
    float *few_q = own.take(FEW_ROWS * D), *few_p = own.take(FEW_ROWS * SPAN);
    const Few few{few_q, few_p, k, v, k_at, v_at, own.take(FEW_ROWS * D), own.take(D), own.take(FEW_ROWS * SPAN), own.take(FEW_ROWS * SPAN)};
#pragma omp for schedule(dynamic)
    for (long item = 0; item < (long)tiles.size(); item++) {
      const long part = item % parts;
      float* own_sums = part ? sums.get() + (item / parts * (parts - 1) + part - 1) * each : nullptr;
      for (const int32_t number : tiles[item]) {
        const Tile& tile = walk.tile[number];
        held.start(tile);
        held.own_sums = own_sums;
        const long rows = held.rows();
        float* dweights = walk.dweights ? walk.dweights + tile.head / tile.heads % walk.copies * walk.weight_count : nullptr;
        std::fill(dq, dq + rows * D, 0.f);
        for (long i = 0; i < rows; i++) {
          dout_in[i] = held.template row<const T>(walk.dout, i);
          const float found = *held.template row<float>(walk.lse, i);
          lse[i] = found == -INF ? INF : found;  // a row that sees nothing has probabilities of 0
          dlse[i] = walk.dlse.data && found != -INF ? *held.template row<float>(walk.dlse, i) : 0;
        }
        for (long r = 0; r < rows; r += QUERIES) {
          const T* from[QUERIES];
          const long count = std::min<long>(QUERIES, rows - r);
          for (long i = 0; i < count; i++) from[i] = held.template row<const T>(walk.out, r + i);
          Read::columns(q_t, from, count, d);
          Read::columns(dout_t, dout_in + r, count, d);
          for (long c = 0; c < count; c += WIDTH) {
            vec sum{};  // in the order of the products below: what a row that sees one key subtracts is then 0
            for (long x = 0; x < d; x++) sum += load(q_t + x * QUERIES + c) * load(dout_t + x * QUERIES + c);
            for (long i = 0; i < WIDTH && c + i < count; i++) delta[r + c + i] = sum[i] - dlse[r + c + i];
          }
        }
        if (!in_place) {
          Read::rows(q_copy, held.q, rows, d, D);
          Read::rows(dout_copy, dout_in, rows, d, D);
        }
        for (long n = tile.from; n < tile.to; n++) {
          const Visit& visit = walk.visit[n];
          const bool changed = held.visit(visit);
          for (long s = 0; s < plan.rows; s++) {
            const long i = plan.index[s];
            q_rows[s] = in_place ? (const float*)held.q[i] : q_copy + i * D;
            dout_rows[s] = in_place ? (const float*)dout_in[i] : dout_copy + i * D;
            dq_rows[s] = dq + i * D;
          }
          if (held.has_few()) {
            held.shown.rows = -1;
            visit_few_backward(held, shape, few, q_rows, dout_rows, dq_rows, lse, dlse, dweights, D);
            continue;
          }
          for (long g = 0; changed && g < plan.groups; g++) {
            const T *q_from[QUERIES], *dout_from[QUERIES];
            const long r = plan.start[g], count = plan.start[g + 1] - r;
            for (long i = 0; i < count; i++) q_from[i] = held.q[plan.index[r + i]], dout_from[i] = dout_in[plan.index[r + i]];
            Read::columns(q_t + g * plan.width * d, q_from, count, d, plan.width);
            Read::columns(dout_t + g * plan.width * d, dout_from, count, d, plan.width);
          }
          for (long key = plan.first; key < plan.stop; key += KEYS) {
            const long count = std::min<long>(KEYS, plan.stop - key);
            held.find_keys(key, count);
            const float* const* keys = as_floats(held.k, count, d, D, k, k_at);
            const float* const* values = as_floats(held.v, count, d, D, v, v_at);
            std::fill(dk, dk + count * D, 0.f);
            std::fill(dv, dv + count * D, 0.f);
            for (long g = 0; g < plan.groups; g++) {
              const long low = std::max<long>(plan.low[g], key) - key, high = std::min<long>(plan.high[g], key + count) - key;
              if (low >= high) continue;
              const long r = plan.start[g], here = plan.start[g + 1] - r, mine = high - low, columns = (here + WIDTH - 1) / WIDTH * WIDTH;
              multiply_rows<Single, false>(mine, columns, d, keys + low, 1, Spaced<float>{q_t + g * plan.width * d, plan.width}, Spaced<float>{p, QUERIES});
              if (shape.scaled) shape_scores(shape, p, mine, columns, row_weights(walk, plan, r, here, weights), key_weights(walk, visit, key + low), visit.log_m, slope);
              hide_by_band(walk, plan, p, key + low, mine, r, here);
              multiply_rows<Single, false>(mine, columns, d, values + low, 1, Spaced<float>{dout_t + g * plan.width * d, plan.width}, Spaced<float>{ds, QUERIES});
              for (long i = 0; i < columns; i++) {
                row_lse[i] = i < here ? lse[plan.index[r + i]] : INF;
                row_delta[i] = i < here ? delta[plan.index[r + i]] : 0;
              }
              float* of_weights = dweights && visit.weights >= 0 ? dweights + visit.weights : nullptr;
              for (long c = 0; c < columns; c += WIDTH) {
                vec weight{};
                for (long j = 0; j < mine; j++) {
                  const long x = j * QUERIES + c;
                  const vec y = probability(load(p + x) * all(shape.factor()) - load(row_lse + c));
                  vec slope_of = y * (load(ds + x) - load(row_delta + c));
                  store(p + x, y);
                  weight += slope_of;
                  for (int i = 0; of_weights && visit.key_list >= 0 && i < WIDTH; i++) of_weights[key + low + j] += slope_of[i];
                  if (shape.softcap) slope_of *= load(slope + x);
                  store(ds + x, slope_of);
                }
                for (long i = 0; of_weights && visit.key_list < 0 && i < WIDTH && c + i < here; i++)
                  of_weights[(r + c + i) % visit.rows] += weight[i];
              }
              multiply_rows<Single, true>(mine, D, here, Spaced<float>{p, QUERIES}, 1, dout_rows + r, Spaced<float>{dv + low * D, D});
              multiply_rows<Single, true>(mine, D, here, Spaced<float>{ds, QUERIES}, 1, q_rows + r, Spaced<float>{dk + low * D, D});
              multiply_rows<Single, true>(here, D, mine, Spaced<float>{ds, 1}, QUERIES, keys + low, dq_rows + r);
            }
            for (long j = 0; j < count; j++) {
              const auto [to_k, to_v] = held.gradients(key_row(walk, visit, key + j));
              add_scaled(to_k, dk + j * D, d, 1, shape.scale);
              add_scaled(to_v, dv + j * D, d, 1, 1);
            }
          }
        }
        for (long i = 0; i < rows; i++) {
          if (walk.narrow)
            write_scaled(held.template row<T>(walk.dq, i), dq + i * D, d, shape.scale);
          else if (walk.merge)
            add_scaled(held.template row<float>(walk.dq, i), dq + i * D, d, 1, shape.scale);
          else
            write_scaled(held.template row<float>(walk.dq, i), dq + i * D, d, shape.scale);
        }
      }
    }
#pragma omp for
    for (long place = 0; place < (parts > 1 ? items * walk.keys : 0); place++) {
      const long item = place / walk.keys, row = place % walk.keys;
      for (long part = 0; part < parts - 1; part++) {
        const float* from = sums.get() + (item * (parts - 1) + part) * each + 2 * row * d;
        add_scaled(walk.dk.at<float>(item / walk.kv_heads, item % walk.kv_heads, row), from, d, 1, 1);
        add_scaled(walk.dv.at<float>(item / walk.kv_heads, item % walk.kv_heads, row), from + d, d, 1, 1);
      }
    }
  }
}

// ---- The table of lists. ----

struct Lists {  // tiles/lists.py explains them
  int64_t groups, list_rows, slots, documents, blocks, granularity, query_block, before, after, first, causal, units, heads, weighed;
  const int64_t *lists, *starts, *spans, *queries, *lists_before, *held;
};

constexpr int FEW_KEYS = 8;  // blocks of fewer are listed key by key
constexpr int FEW_QUERIES = 16;  // with fewer that share a list, rows are listed one by one

struct Table {
  std::vector<Tile> tiles;
  std::vector<Visit> visits;
  std::vector<int32_t> numbers;
  std::vector<int64_t> source;  // of each weight: its place in the lists
};

enum { PLAIN, NEAR, FAR };  // bands: all keys, those of the window, others

// The tiles of one document after the other.
struct Planner {
  const Lists& call;
  Table& table;
  struct Entry { int32_t block, row; int64_t place; };  // of a document, of the tile, in the lists
  std::vector<Entry> entries;
  std::vector<int32_t> last, count, found;  // of each block: the row that it was met in last, how many rows see it
  long start, end, blocks_before, lists_before;  // of the document: positions, and how many blocks and list rows come before it
  bool near_keys() const { return call.before >= 0 && call.after >= 0; }
  bool is_near(long key, long query) const { return near_keys() && key >= query - call.before && key <= query + call.after; }
  long block_start(long block) const { return start + block * call.granularity; }
  long block_end(long block) const { return std::min(end, block_start(block) + call.granularity); }
  long row_of(long block, long key) const {  // of k
    return call.held ? call.held[blocks_before + block] + key - block_start(block) : key;
  }
  long place_of(long group, long row) const {
    const long at = group * call.list_rows + lists_before + row;
    return call.starts ? call.starts[at] : at * call.slots;
  }

  void plan() {
    const long each = call.heads / call.units, step = call.query_block;
    const bool by_row = call.granularity < FEW_KEYS;
    long most = std::max(64L, (by_row || step >= FEW_QUERIES || !call.slots ? 512 : 1024) / each);
    if (step >= FEW_QUERIES) most = std::max(step, most / step * step);
    for (long group = 0; group < call.groups; group++) {
      blocks_before = 0;
      for (long document = 0; document < call.documents; document++) {
        start = call.spans[2 * document], end = call.spans[2 * document + 1], lists_before = call.lists_before[document];
        const long blocks = (end - start + call.granularity - 1) / call.granularity;
        const int64_t* queries = call.queries + 3 * document;
        last.assign(blocks, -1), count.assign(blocks, 0);
        for (long row = 0; row < queries[1]; row += most)
          add_tile(group, row, queries[0] + row, queries[2] + row, std::min<long>(most, queries[1] - row));
        blocks_before += blocks;
      }
    }
  }

  // Rows that see the keys of positions from ``from`` to ``stop``, which may lie in several places.
  void add_run(long from, long stop, Visit visit) {
    for (long at = from; at < stop;) {
      long block = (at - start) / call.granularity, next = call.held ? block_end(block) : stop;
      const long row = row_of(block, at);
      while (next < stop && row_of(block + 1, next) - next == row - at) next = block_end(++block);
      next = std::min(next, stop);
      visit.key = row, visit.keys = next - at, visit.key_position = at;
      table.visits.push_back(visit);
      at = next;
    }
  }

  // The tile of rows from ``row`` of the document on, which are those of q from ``first`` on.
  void add_tile(long group, long row, long first, long position, long rows) {
    const long from = table.visits.size(), high = position + rows - 1;
    const int32_t plain = near_keys() ? FAR : call.causal ? PLAIN : -1;
    const Visit all_rows{0, 1, 0, -1, 0, 0, 1, (int32_t)rows, -1, plain, -1, QUERIES, -1, 0};
    if (near_keys()) {
      Visit near = all_rows;
      near.band = NEAR;
      add_run(std::max(start, position - call.before), std::min(end, high + call.after + 1), near);
    }
    const long always = std::min(end, start + call.first);
    if (call.first) add_run(start, call.causal ? std::min(always, high + 1) : always, all_rows);
    entries.clear(), found.clear();
    const bool together = call.query_block >= FEW_QUERIES && call.granularity >= FEW_KEYS;  // queries of one list
    for (long i = 0; i < rows && call.lists; i += together ? call.query_block : 1) {
      const long at = together ? std::min(high, position + i + call.query_block - 1) : position + i;
      const long list = (row + i) / call.query_block, stop = place_of(group, list + 1);
      for (long place = place_of(group, list); place < stop; place++) {
        const long block = call.lists[place] - blocks_before;
        if (call.lists[place] == call.blocks || last[block] == row + i) continue;
        last[block] = row + i;
        const long low = std::max(block_start(block), always), top = call.causal ? std::min(block_end(block), at + 1) : block_end(block);
        if (low >= top || (!together && is_near(low, at) && is_near(top - 1, at))) continue;
        entries.push_back({(int32_t)block, (int32_t)i, place});
        if (!count[block]++) found.push_back(block);
      }
    }
    if (call.granularity < FEW_KEYS)
      add_by_rows(rows, position, always);
    else if (together && !call.weighed && grain_of(call.query_block) >= FEW_QUERIES)
      add_ranges(rows, position, always, all_rows);
    else
      add_by_blocks(rows, together ? call.query_block : 1, always, all_rows);
    for (const long block : found) count[block] = 0;
    const long each = call.heads / call.units, shared = call.units / call.groups;
    for (long unit = group * shared; unit < (group + 1) * shared; unit++)
      table.tiles.push_back({0, (int32_t)(unit * each), (int32_t)each, (int32_t)first, 1, (int32_t)rows, (int32_t)position, (int32_t)from, (int32_t)table.visits.size()});
  }

  static long grain_of(long step) {  // the most rows of a group that divide those of a list
    long grain = std::min<long>(step, QUERIES);
    while (step % grain) grain--;
    return grain;
  }
  // Runs of blocks, one for each list of queries; those that meet are one visit.
  void add_ranges(long rows, long position, long always, const Visit& all_rows) {
    const long step = call.query_block;
    const long grain = grain_of(step), groups = (rows + grain - 1) / grain, each = step / grain;
    struct Run { long from, stop, list; };
    std::vector<Run> runs;
    std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return std::pair(a.row, a.block) < std::pair(b.row, b.block); });
    for (const Entry& entry : entries) {
      const long from = std::max(block_start(entry.block), always), stop = block_end(entry.block), list = entry.row / step;
      const bool joins = runs.size() && runs.back().list == list && runs.back().stop == from && row_of(entry.block, from) - from == row_of((runs.back().from - start) / call.granularity, runs.back().from) - runs.back().from;
      if (joins)
        runs.back().stop = stop;
      else
        runs.push_back({from, stop, list});
    }
    std::sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return std::pair(a.from, a.list) < std::pair(b.from, b.list); });
    std::vector<std::pair<long, long>> open;  // a visit, the last key of it
    for (const Run& run : runs) {
      const long block = (run.from - start) / call.granularity, shift = row_of(block, run.from) - run.from;
      long number = -1;
      for (auto& [visit, stop] : open) {
        const Visit& other = table.visits[visit];
        if (stop < run.from || other.key - other.key_position != shift || table.numbers[other.ranges + 2 * run.list * each + 1]) continue;
        number = visit, stop = std::max(stop, run.stop);
        break;
      }
      if (number < 0) {
        Visit visit = all_rows;
        visit.key = run.from + shift, visit.key_position = run.from, visit.grain = grain, visit.ranges = table.numbers.size();
        visit.band = near_keys() ? FAR : -1;
        table.numbers.resize(table.numbers.size() + 2 * groups, 0);
        number = table.visits.size();
        table.visits.push_back(visit);
        open.push_back({number, run.stop});
      }
      Visit& visit = table.visits[number];
      visit.keys = std::max<long>(visit.keys, run.stop - visit.key_position);
      if (call.causal && visit.band < 0 && run.stop > position + run.list * step + 1) visit.band = PLAIN;
      for (long g = run.list * each; g < std::min(groups, (run.list + 1) * each); g++) {
        table.numbers[visit.ranges + 2 * g] = run.from - visit.key_position;
        table.numbers[visit.ranges + 2 * g + 1] = run.stop - visit.key_position;
      }
    }
  }

  // A visit for each block, of the rows that list it.
  void add_by_blocks(long rows, long each, long always, Visit visit) {
    std::sort(found.begin(), found.end());
    long total = table.numbers.size();
    for (const Entry& entry : entries) count[entry.block] += std::min<long>(each, rows - entry.row) - 1;
    std::vector<int32_t>& place = count;  // from here on where the rows of a block go next
    for (const long block : found) {
      const long number = count[block], low = std::max(block_start(block), always);
      visit.key_position = low, visit.key = row_of(block, low), visit.keys = block_end(block) - low;
      visit.row_list = total, visit.rows = number, visit.weights = call.weighed ? total : -1;
      table.visits.push_back(visit);
      place[block] = total, total += number;
    }
    table.numbers.resize(total);
    if (call.weighed) table.source.resize(total, 0);
    for (const Entry& entry : entries)
      for (long i = entry.row; i < std::min(rows, entry.row + each); i++) {
        if (call.weighed) table.source[place[entry.block]] = entry.place;
        table.numbers[place[entry.block]++] = i;
      }
  }

  // A visit for each row and panel of keys, with a list of those; panel by panel, so that keys stay in the cache.
  void add_by_rows(long rows, long position, long always) {
    if (entries.empty()) return;
    const long average = std::max<long>(1, entries.size() * call.granularity / rows);
    long bits = 9;  // of the number of keys of a panel
    while (1L << bits < 32 * (end - start) / average) bits++;
    const long panels = ((end - start - 1) >> bits) + 1;
    std::vector<int32_t> place(panels * rows, 0);
    auto each_key = [&](auto&& use) {
      for (const Entry& entry : entries) {
        const long query = position + entry.row, stop = call.causal ? std::min(block_end(entry.block), query + 1) : block_end(entry.block);
        for (long key = std::max(block_start(entry.block), always); key < stop; key++)
          if (!is_near(key, query)) use(((key - start) >> bits) * rows + entry.row, row_of(entry.block, key), entry.place);
      }
    };
    each_key([&](long cell, long, long) { place[cell]++; });
    long total = table.numbers.size();
    for (long cell = 0; cell < panels * rows; cell++) {
      const int32_t number = place[cell], list = total, weights = call.weighed ? total : -1;
      place[cell] = total, total += number;
      if (number) table.visits.push_back({0, 1, number, list, 0, (int32_t)(cell % rows), 1, 1, -1, -1, -1, QUERIES, weights, 0});
    }
    table.numbers.resize(total);
    if (call.weighed) table.source.resize(total, 0);
    each_key([&](long cell, long row, long at) {
      if (call.weighed) table.source[place[cell]] = at;
      table.numbers[place[cell]++] = row;
    });
  }
};

}  // namespace

extern "C" double multiply(int64_t threads, int64_t rounds, int64_t bf16) {
#ifdef __AVX512BF16__
  if (bf16) return 2 * run_multiply<Pairs>(threads, rounds);
#endif
  return run_multiply<Single>(threads, rounds);
}

// 1 where there is no memory, 0 else.
static int run(void (*pass)(const Walk&), const Walk* walk) {
  try {
    pass(*walk);
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}

extern "C" int walk_tiles(const Walk* walk) {
#ifdef __AVX512BF16__
  typedef Pairs Halves;
#else
  typedef Single Halves;
#endif
  constexpr void (*passes[])(const Walk&) = {walk_forward<Single, float>, walk_forward<Single, _Float16>, walk_forward<Halves, Bfloat>};
  return run(passes[walk->dtype], walk);
}
extern "C" int walk_tiles_backward(const Walk* walk) {
  constexpr void (*passes[])(const Walk&) = {walk_backward<float>, walk_backward<_Float16>, walk_backward<Bfloat>};
  return run(passes[walk->dtype], walk);
}

// The table of the lists, to be copied and deleted by take_table; its sizes. Null where there is no memory.
extern "C" Table* plan_table(const Lists* lists, int64_t* sizes) {
  try {
    std::unique_ptr<Table> table(new Table);
    Planner{*lists, *table}.plan();
    sizes[0] = table->tiles.size(), sizes[1] = table->visits.size(), sizes[2] = table->numbers.size(), sizes[3] = table->source.size();
    return table.release();
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
extern "C" void take_table(Table* table, Tile* tiles, Visit* visits, int32_t* numbers, int64_t* source) {
  const std::unique_ptr<Table> owned(table);
  std::copy(table->tiles.begin(), table->tiles.end(), tiles);
  std::copy(table->visits.begin(), table->visits.end(), visits);
  std::copy(table->numbers.begin(), table->numbers.end(), numbers);
  std::copy(table->source.begin(), table->source.end(), source);
}

// Dense attention of some query rows by some key rows on a CPU, softmax(scale * q k^T + bias) v, and its gradients.
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
constexpr int CHUNK = 512, PANEL = 192;  // queries that share a copy of the keys in a forward; keys in a backward
constexpr int FEW = 8, SPAN = 128;       // so few queries read each key where it lies, in blocks of so many
constexpr float LOG2E = 1.44269504088896341f, INF = INFINITY;

typedef float vec __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t uvec __attribute__((vector_size(4 * WIDTH)));
typedef float unaligned __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
#define INLINE static inline __attribute__((always_inline))

INLINE vec load(const float* p) { return *(const unaligned*)p; }
INLINE void store(float* p, vec x) { *(unaligned*)p = x; }
INLINE vec all(float x) { return x - vec{}; }  // no addition is made of it, which bits of two bf16 would not survive
INLINE vec larger(vec a, vec b) { return a > b ? a : b; }

// 2^x to about 1e-7, 0 below 2^-126: a polynomial of the fraction, which is 1 at 0, times a power. NaN stays NaN.
INLINE vec exp2_of(vec x) {
  const vec magic = all(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer, which its low bits then hold
  const vec whole = x + magic, f = x - (whole - magic);
  vec p = all(1.326472731e-3f);
  p = p * f + all(9.671512991e-3f);
  p = p * f + all(5.550733581e-2f);
  p = p * f + all(2.402224243e-1f);
  p = p * f + all(6.931470037e-1f);
  p = p * f + all(1.f);
  const vec power = (vec)(((uvec)whole - (0x4b400000u - 127u)) << 23);
  return x < all(-126.f) ? vec{} : p * power;
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

template <class Kind, bool ADD, int R, int N>
INLINE void tile(const float* A, long row_step, long k_step, const float* B, long b_row, float* C, long c_row, long count) {
  vec sum[R][N];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < N; c++) sum[r][c] = ADD ? load(C + r * c_row + c * WIDTH) : vec{};
  for (long k = 0; k < count; k++) {
    vec b[N];
    for (int c = 0; c < N; c++) b[c] = load(B + k * b_row + c * WIDTH);
    for (int r = 0; r < R; r++) {
      const vec a = all(A[r * row_step + k * k_step]);
      for (int c = 0; c < N; c++) sum[r][c] = Kind::add(sum[r][c], a, b[c]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < N; c++) store(C + r * c_row + c * WIDTH, sum[r][c]);
}

template <class Kind, bool ADD, int N, int R = ROWS>
INLINE void strip(long rows, const float* A, long row_step, long k_step, const float* B, long b_row, float* C, long c_row, long count) {
  for (; rows >= R; rows -= R, A += R * row_step, C += R * c_row)
    tile<Kind, ADD, R, N>(A, row_step, k_step, B, b_row, C, c_row, count);
  if constexpr (R > 1)
    if (rows) strip<Kind, ADD, N, R - 1>(rows, A, row_step, k_step, B, b_row, C, c_row, count);
}

// C (rows, columns) = A B, or added to C. Item (row, k) of A is at row * row_step + k * k_step; B is (count, columns),
// of whole vectors, with rows b_row apart.
template <class Kind, bool ADD>
void product(long rows, long columns, long count, const float* A, long row_step, long k_step, const float* B, long b_row, float* C, long c_row) {
  long c = 0;
  for (; c + COLUMNS * WIDTH <= columns; c += COLUMNS * WIDTH)
    strip<Kind, ADD, COLUMNS>(rows, A, row_step, k_step, B + c, b_row, C + c, c_row, count);
  for (; c < columns; c += WIDTH) strip<Kind, ADD, 1>(rows, A, row_step, k_step, B + c, b_row, C + c, c_row, count);
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
  INLINE void rows(float* __restrict to, const T* __restrict from, long step, long count, long d, long padded) {  // (count, padded)
    for (long r = 0; r < count; r++, from += step, to += padded)
      for (long x = 0; x < padded; x += WIDTH) store(to + x, read(from + x, d - x));
  }
  INLINE void columns(float* to, const T* from, long step, long count, long d) {  // (d, QUERIES)
    for (long r = 0; r < QUERIES; r += WIDTH)
      for (long x = 0; x < d; x += WIDTH) {
        vec square[WIDTH] = {};
        for (int i = 0; i < WIDTH && r + i < count; i++) square[i] = read(from + (r + i) * step + x, d - x);
        transpose(square);
        for (int i = 0; i < WIDTH && x + i < d; i++) store(to + (x + i) * QUERIES + r, square[i]);
      }
  }
  INLINE void values(float* to, const T* from, long step, long count, long d, long padded) {
    rows(to, from, step, count, d, padded);
  }
  INLINE void probabilities(float*, long, long) {}
};

#ifdef __AVX512BF16__
template <>
struct Reader<Pairs, Bfloat> {
  static constexpr int item = 2;
  INLINE void rows(float* to, const Bfloat* from, long step, long count, long d, long padded) {  // (count, padded pairs)
    for (long r = 0; r < count; r++, from += step, to += padded) {
      memcpy(to, from, d * 2);
      if (d % 2) ((Bfloat*)to)[d] = Bfloat{0};
    }
  }
  INLINE void columns(float* to, const Bfloat* from, long step, long count, long d) {  // (pairs, QUERIES)
    for (long r = 0; r < QUERIES; r++)
      for (long x = 0; x < d; x += 2) {
        const Bfloat* p = from + r * step + x;
        to[x / 2 * QUERIES + r] = r < count ? pair(p[0], x + 1 < d ? p[1] : Bfloat{0}) : 0;
      }
  }
  INLINE void values(float* to, const Bfloat* from, long step, long count, long d, long padded) {  // (pairs of keys, padded)
    for (long r = 0; r < count; r += 2, from += 2 * step, to += padded) {
      for (long x = 0; x < d; x++) to[x] = pair(from[x], r + 1 < count ? from[step + x] : Bfloat{0});
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

struct Call {  // kernels/compiled.py fills it; every field has 8 bytes
  double scale;
  // merge: of a forward, with what is there; of a backward, 1: add to dq, 2: to dk and dv.
  int64_t batch, heads, queries, keys, d, dtype, causal, merge, narrow, threads;
  Rows q, k, v, bias, out, lse;
  Rows index;  // of a forward: key j is row index[j] of k and v
  Rows rows;  // query i is row rows[i] of q, out, lse, dout and dq; none, read as 0 and not written, if it is below 0
  Rows dout, dq, dk, dv;  // of a backward

  // The row of query i of a head.
  long row(long b, long h, long i) const { return rows.data ? rows.at<int64_t>(b, h)[i * rows.row] : i; }
  // How many of so many queries from the first on there are, up to the last that is one.
  long there(long b, long h, long first, long count) const {
    while (count && rows.data && row(b, h, first + count - 1) < 0) count--;
    return count;
  }
};

// Queries [first, first + count) of a head of t: where they lie, or a copy of them, rows ``step`` apart.
template <class T>
INLINE const T* queries_of(const Call& call, const Rows& t, long b, long h, long first, long count, T* copy, long* step) {
  *step = call.rows.data ? call.d : t.row;
  if (!call.rows.data) return t.at<const T>(b, h, first);
  for (long i = 0; i < count; i++) {
    const long row = call.row(b, h, first + i);
    if (row < 0)
      memset(copy + i * call.d, 0, call.d * sizeof(T));
    else
      memcpy(copy + i * call.d, t.at<const T>(b, h, row), call.d * sizeof(T));
  }
  return copy;
}

// Add a bias, of the first query and key at ``bias``, over ``scale``, to scores (keys, QUERIES).
INLINE void add_bias(float* scores, const float* bias, long by_row, long by_key, long keys, long queries, float scale) {
  const float over = 1 / scale;
  auto add = [over](float x, float y) { return y == -INF ? -INF : x + y * over; };
  for (long j = 0; j < keys; j++, scores += QUERIES, bias += by_key) {
    long i = 0;
    for (; (by_row == 0 || by_row == 1) && i + WIDTH <= queries; i += WIDTH) {
      const vec y = by_row ? load(bias + i) : all(*bias);
      store(scores + i, y == all(-INF) ? y : load(scores + i) + y * all(over));
    }
    for (; i < queries; i++) scores[i] = add(scores[i], bias[i * by_row]);
  }
}

// Causal: of these keys the first query sees ``seen``, each later one another; scores (keys, QUERIES) of the rest are -inf.
INLINE void hide(float* scores, long keys, long seen) {
  for (long j = std::max(0L, seen); j < keys; j++)
    for (long i = 0; i < std::min<long>(QUERIES, j - seen + 1); i++) scores[j * QUERIES + i] = -INF;
}

// Scores (keys, QUERIES) to probabilities against the largest one so far; scale what was summed up before.
template <class Kind, class T>
INLINE void softmax(float* scores, long keys, float scale, float* top, float* sum, float* out, long d) {
  const vec by = all(scale);
  for (int c = 0; c < QUERIES; c += WIDTH) {
    const vec before = load(top + c);
    vec most = before, total{};
    for (long j = 0; j < keys; j++) most = larger(most, load(scores + j * QUERIES + c));
    const vec shift = most == all(-INF) ? vec{} : most;
    for (long j = 0; j < keys; j++) {
      const vec p = exp2_of((load(scores + j * QUERIES + c) - shift) * by);  // 1 for the largest, without rounding
      store(scores + j * QUERIES + c, p);
      total += p;
    }
    const vec less = before == all(-INF) ? all(1.f) : exp2_of((before - shift) * by);  // nothing is summed up yet
    store(top + c, most);
    store(sum + c, load(sum + c) * less + total);
    for (int i = 0; i < WIDTH; i++)
      if (less[i] != 1.f)
        for (long x = 0; x < d; x += WIDTH) store(out + (c + i) * d + x, load(out + (c + i) * d + x) * all(less[i]));
    Reader<Kind, T>::probabilities(scores, keys, c);
  }
}

INLINE void add_scaled(float* __restrict to, const float* __restrict from, long d, float keep, float by) {
  for (long x = 0; x < d; x++) to[x] = to[x] * keep + from[x] * by;
}
template <class T>
INLINE void write_scaled(T* __restrict to, const float* __restrict from, long d, float by) {
  for (long x = 0; x < d; x++) put(to + x, from[x] * by);
}
// Scale, then add, each rounded, as if the row were a result of its own.
INLINE void add_rounded(float* __restrict to, float* __restrict from, long d, float by) {
  for (long x = 0; x < d; x++) from[x] *= by;
  for (long x = 0; x < d; x++) to[x] += from[x];
}

// One row of the result: over all keys of this call, or merged with what is there, in fp32, over others.
template <class T>
INLINE void finish(const Call& call, const float* row, float top, float sum, T* out, float* lse) {
  const float over = sum == 0 ? 0 : 1 / sum, mine = sum == 0 ? -INF : top + logf(sum);
  if (call.merge && mine == -INF) return;
  if (call.merge) {
    const float apart = *lse - mine, weight = 1 / (1 + expf(apart));
    *lse = std::max(*lse, mine) + log1pf(expf(-fabsf(apart)));
    add_scaled((float*)out, row, call.d, 1 - weight, over * weight);
  } else {
    *lse = mine;
    write_scaled(out, row, call.d, over);
  }
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

// Add the products of weights p (count,) and rows of so many vectors to out, which is scaled before.
template <int N = COLUMNS>
INLINE void add_rows(float* out, int vectors, float keep, const float* p, const float* rows, long step, long count) {
  if constexpr (N > 1)
    if (vectors < N) return add_rows<N - 1>(out, vectors, keep, p, rows, step, count);
  vec sum[N];
  for (int c = 0; c < N; c++) sum[c] = load(out + c * WIDTH) * all(keep);
  for (long j = 0; j < count; j++)
    for (int c = 0; c < N; c++) sum[c] += all(p[j]) * load(rows + j * step + c * WIDTH);
  for (int c = 0; c < N; c++) store(out + c * WIDTH, sum[c]);
}

// Few queries, each of which sees all keys: a matrix product is not worth its copies, and reading k and v takes the
// time. Keys are shared out among threads, and their results merged at the end.
template <class T>
void run_few(const Call& call, float scale) {
  const long d = call.d, D = (d + WIDTH - 1) / WIDTH * WIDTH, few = call.queries, all_heads = call.batch * call.heads;
  const long most = std::max(1L, 256 / all_heads);  // parts of the keys of a head, however many threads there are
  const long part = std::max(8L * SPAN, (call.keys + most - 1) / most), parts = (call.keys + part - 1) / part;
  const long row = D + WIDTH;  // a result, its largest score and its sum
  const Memory results(1, all_heads * parts * few * row), memory(call.threads, few * (D + SPAN) + SPAN * D);
  float* found = (float*)(((uintptr_t)results.memory.get() + 63) & ~(uintptr_t)63);
  constexpr bool in_place = sizeof(T) == 4;
#pragma omp parallel num_threads(call.threads)
  {
    Scratch own(memory);
    float *q = own.take(few * D), *scores = own.take(few * SPAN), *copy = own.take(SPAN * D);
#pragma omp for schedule(dynamic)
    for (long item = 0; item < all_heads * parts; item++) {
      const long b = item / parts / call.heads, h = item / parts % call.heads, start = item % parts * part;
      const long end = std::min<long>(call.keys, start + part);
      const T *k_in = call.k.at<const T>(b, h), *v_in = call.v.at<const T>(b, h);
      float* mine = found + item * few * row;
      std::fill(mine, mine + few * row, 0.f);
      for (long i = 0; i < few; i++) {
        Reader<Single, T>::rows(q + i * D, call.q.at<const T>(b, h, i), 0, 1, d, D);
        mine[i * row + D] = -INF;
      }
      for (long key = start; key < end; key += SPAN) {
        const long count = std::min<long>(SPAN, end - key);
        const float* rows = (const float*)(k_in + key * call.k.row);
        long step = call.k.row;
        const bool there = in_place && d == D;
        if (!there) Reader<Single, T>::rows(copy, k_in + key * step, step, count, d, D), rows = copy, step = D;
        for (long j = 0; j < count; j += WIDTH)
          for (long i = 0; i < few; i++) {
            vec sum[WIDTH] = {};
            for (long x = 0; x < D; x += WIDTH) {
              const vec a = load(q + i * D + x);
              for (int c = 0; c < WIDTH; c++) sum[c] += a * load(rows + std::min(j + c, count - 1) * step + x);
            }
            store(scores + i * SPAN + j, sums_of(sum));
          }
        rows = (const float*)(v_in + key * call.v.row), step = call.v.row;
        if (!there) Reader<Single, T>::rows(copy, v_in + key * step, step, count, d, D), rows = copy, step = D;
        for (long i = 0; i < few; i++) {
          float *p = scores + i * SPAN, *out = mine + i * row, *top = out + D;
          const float* bias = call.bias.data ? call.bias.at<float>(b, h, i) + key * call.bias.item : nullptr;
          vec most = all(*top);
          for (long j = count; j % WIDTH; j++) p[j] = -INF;
          if (bias)
            for (long j = 0; j < count; j++)
              p[j] = bias[j * call.bias.item] == -INF ? -INF : p[j] + bias[j * call.bias.item] / scale;
          for (long j = 0; j < count; j += WIDTH) most = larger(most, load(p + j));
          float highest = *top, total = 0;
          for (int c = 0; c < WIDTH; c++) highest = most[c] > highest ? most[c] : highest;
          const vec shift = all(highest == -INF ? 0 : highest), by = all(scale * LOG2E);
          vec sum{};
          for (long j = 0; j < count; j += WIDTH) {
            const vec found = exp2_of((load(p + j) - shift) * by);
            store(p + j, found);
            sum += found;
          }
          for (int c = 0; c < WIDTH; c++) total += sum[c];
          const float less = *top == -INF ? 1 : exp2_of((all(*top) - shift) * by)[0];
          *top = highest, top[1] = top[1] * less + total;
          for (long x = 0; x < D; x += COLUMNS * WIDTH)
            add_rows(out + x, std::min<long>(COLUMNS, (D - x) / WIDTH), less, p, rows + x, step, count);
        }
      }
    }
#pragma omp for
    for (long item = 0; item < all_heads * few; item++) {
      const long b = item / few / call.heads, h = item / few % call.heads, i = item % few;
      float *first = found + (item / few * parts * few + i) * row, *top = first + D;
      for (long n = 1; n < parts; n++) {
        const float *next = first + n * few * row, *other = next + D, highest = std::max(*top, *other);
        if (*other == -INF) continue;
        const float keep = expf((*top - highest) * scale), add = expf((*other - highest) * scale);
        add_scaled(first, next, d, keep, add);
        top[1] = top[1] * keep + other[1] * add, *top = highest;
      }
      float* lse = call.lse.at<float>(b, h, i);
      if (call.narrow)
        finish(call, first, *top * scale, top[1], call.out.at<T>(b, h, i), lse);
      else
        finish(call, first, *top * scale, top[1], call.out.at<float>(b, h, i), lse);
    }
  }
}

template <class Kind, class T>
void run_forward(const Call& call, float scale) {
  if (!call.index.data && !call.rows.data && (call.queries == 1 || (call.queries <= FEW && !call.causal))) return run_few<T>(call, scale);
  typedef Reader<Kind, T> Read;
  const long d = call.d, D = (d + WIDTH - 1) / WIDTH * WIDTH, chunks = (call.queries + CHUNK - 1) / CHUNK;
  const long depth = (d + Read::item - 1) / Read::item;
  const Memory memory(call.threads, 2 * CHUNK * D + QUERIES * KEYS + 2 * KEYS * D + 2 * CHUNK + QUERIES * D);
#pragma omp parallel num_threads(call.threads)
  {
    Scratch own(memory);
    float *sums = own.take(CHUNK * D), *q = own.take(CHUNK * D), *scores = own.take(QUERIES * KEYS);
    float *k = own.take(KEYS * D), *v = own.take(KEYS * D), *top = own.take(CHUNK), *sum = own.take(CHUNK);
    T* copy = (T*)own.take(QUERIES * D);
#pragma omp for schedule(dynamic)
    for (long item = 0; item < call.batch * call.heads * chunks; item++) {
      const long b = item / (call.heads * chunks), h = item / chunks % call.heads, start = item % chunks * CHUNK;
      const long rows = call.there(b, h, start, std::min<long>(CHUNK, call.queries - start));
      const long ahead = start + call.keys - call.queries;
      const T *k_in = call.k.at<const T>(b, h), *v_in = call.v.at<const T>(b, h);
      const float* bias = call.bias.data ? call.bias.at<float>(b, h, start) : nullptr;
      const int64_t* index = call.index.data ? call.index.at<int64_t>(b, h) : nullptr;
      const long s_k = call.k.row, s_v = call.v.row, s_i = call.index.row;
      for (long r = 0; r < rows; r += QUERIES) {
        const long some = std::min<long>(QUERIES, rows - r);
        long step;
        const T* from = queries_of(call, call.q, b, h, start + r, some, copy, &step);
        Read::columns(q + r * D, from, step, some, d);
      }
      const long padded = (rows + QUERIES - 1) / QUERIES * QUERIES;
      std::fill(sums, sums + padded * D, 0.f);
      std::fill(top, top + padded, -INF);
      std::fill(sum, sum + padded, 0.f);
      const long end = call.causal ? ahead + rows : call.keys;
      for (long key = 0; key < end; key += KEYS) {
        const long count = std::min<long>(KEYS, end - key);
        if (index) {
          for (long j = 0; j < count; j++) Read::rows(k + j * D, k_in + index[(key + j) * s_i] * s_k, 0, 1, d, D);
          for (long j = 0; j < count; j += Read::item) {
            const long some = std::min<long>(Read::item, count - j), at = index[(key + j) * s_i];
            const long next = index[(key + j + some - 1) * s_i];
            Read::values(v + j / Read::item * D, v_in + at * s_v, (next - at) * s_v, some, d, D);
          }
        } else {
          Read::rows(k, k_in + key * s_k, s_k, count, d, D);
          Read::values(v, v_in + key * s_v, s_v, count, d, D);
        }
        const long next = std::max(0L, std::min<long>(KEYS, end - key - KEYS));
        for (long r = 0; r < rows; r += QUERIES) {
          // Memory reads a part of the next block of keys while the products are computed.
          for (long j = next * r / padded; j < next * (r + QUERIES) / padded; j++) {
            const long at = index ? index[(key + KEYS + j) * s_i] : key + KEYS + j;
            for (long x = 0; x < d; x += 64 / sizeof(T)) {
              __builtin_prefetch(k_in + at * s_k + x, 0, 2);
              __builtin_prefetch(v_in + at * s_v + x, 0, 2);
            }
          }
          const long some = std::min<long>(QUERIES, rows - r), seen = ahead + r + 1 - key;
          const long mine = call.causal ? std::min(count, seen + some - 1) : count;
          if (mine <= 0) continue;
          product<Kind, false>(mine, QUERIES, depth, k, D, 1, q + r * D, QUERIES, scores, QUERIES);
          if (bias) add_bias(scores, bias + r * call.bias.row + key * call.bias.item, call.bias.row, call.bias.item, mine, some, scale);
          if (call.causal) hide(scores, mine, seen);
          softmax<Kind, T>(scores, mine, scale * LOG2E, top + r, sum + r, sums + r * D, D);
          const long items = (mine + Read::item - 1) / Read::item;
          product<Kind, true>(some, D, items, scores, 1, QUERIES, v, D, sums + r * D, D);
        }
      }
      for (long r = 0; r < rows; r++) {
        const long row = call.row(b, h, start + r);
        if (row < 0) continue;
        float* lse = call.lse.at<float>(b, h, row);
        if (call.narrow)
          finish(call, sums + r * D, top[r] * scale, sum[r], call.out.at<T>(b, h, row), lse);
        else
          finish(call, sums + r * D, top[r] * scale, sum[r], call.out.at<float>(b, h, row), lse);
      }
    }
  }
}

// Keys a panel at a time: its gradients are summed up over all queries, those of the queries over all panels.
template <class T>
void run_backward(const Call& call, float scale) {
  typedef Reader<Single, T> Read;
  const long d = call.d, D = (d + WIDTH - 1) / WIDTH * WIDTH, ahead = call.keys - call.queries;
  const long padded = (call.queries + QUERIES - 1) / QUERIES * QUERIES;
  const long summed = call.merge & 1 ? padded * D : 0;  // dq of all panels, to be added at once
  const Memory memory(call.threads, 7 * QUERIES * D + 4 * PANEL * D + 2 * KEYS * QUERIES + 2 * padded + summed);
#pragma omp parallel num_threads(call.threads)
  {
    Scratch own(memory);
    float *q = own.take(QUERIES * D), *q_t = own.take(QUERIES * D), *dout = own.take(QUERIES * D);
    float *dout_t = own.take(QUERIES * D), *dq = own.take(QUERIES * D), *k = own.take(PANEL * D), *v = own.take(PANEL * D);
    float *dk = own.take(PANEL * D), *dv = own.take(PANEL * D), *p = own.take(KEYS * QUERIES), *ds = own.take(KEYS * QUERIES);
    float *lse = own.take(padded), *delta = own.take(padded), *sums = own.take(summed);
    T *q_copy = (T*)own.take(QUERIES * D), *dout_copy = (T*)own.take(QUERIES * D);
#pragma omp for schedule(dynamic)
    for (long item = 0; item < call.batch * call.heads; item++) {
      const long b = item / call.heads, h = item % call.heads;
      const T *k_in = call.k.at<const T>(b, h), *v_in = call.v.at<const T>(b, h);
      const long queries = call.there(b, h, 0, call.queries);
      long q_step, dout_step;
      for (long r = 0; r < padded; r++) {
        const long row = r < queries ? call.row(b, h, r) : -1;
        const float found = row < 0 ? -INF : *call.lse.at<float>(b, h, row);
        lse[r] = found == -INF ? INF : found;  // a row that sees nothing has probabilities of 0
      }
      for (long r = 0; r < queries; r += QUERIES) {
        const long some = std::min<long>(QUERIES, queries - r);
        const T* out_in = queries_of(call, call.out, b, h, r, some, q_copy, &q_step);
        const T* dout_in = queries_of(call, call.dout, b, h, r, some, dout_copy, &dout_step);
        Read::columns(q_t, out_in, q_step, some, d);
        Read::columns(dout_t, dout_in, dout_step, some, d);
        for (int c = 0; c < QUERIES; c += WIDTH) {
          vec sum{};  // in the order of the products below: what a row that sees one key subtracts is then 0
          for (long x = 0; x < d; x++) sum += load(q_t + x * QUERIES + c) * load(dout_t + x * QUERIES + c);
          store(delta + r + c, sum);
        }
      }
      for (long first = 0; first < call.keys; first += PANEL) {
        const long held = std::min<long>(PANEL, call.keys - first);
        Read::rows(k, k_in + first * call.k.row, call.k.row, held, d, D);
        Read::rows(v, v_in + first * call.v.row, call.v.row, held, d, D);
        std::fill(dk, dk + held * D, 0.f);
        std::fill(dv, dv + held * D, 0.f);
        for (long r = 0; r < queries; r += QUERIES) {
          const long some = std::min<long>(QUERIES, queries - r), seen = ahead + r + 1 - first;
          const long end = call.causal ? std::min(held, seen + some - 1) : held;
          if (end <= 0) continue;
          const T* q_in = queries_of(call, call.q, b, h, r, some, q_copy, &q_step);
          const T* dout_in = queries_of(call, call.dout, b, h, r, some, dout_copy, &dout_step);
          Read::rows(q, q_in, q_step, some, d, D);
          Read::rows(dout, dout_in, dout_step, some, d, D);
          Read::columns(q_t, q_in, q_step, some, d);
          Read::columns(dout_t, dout_in, dout_step, some, d);
          std::fill(dq, dq + QUERIES * D, 0.f);
          for (long key = 0; key < end; key += KEYS) {
            const long mine = std::min<long>(KEYS, end - key);
            product<Single, false>(mine, QUERIES, d, k + key * D, D, 1, q_t, QUERIES, p, QUERIES);
            if (call.bias.data) {
              const float* bias = call.bias.at<float>(b, h, r) + (first + key) * call.bias.item;
              add_bias(p, bias, call.bias.row, call.bias.item, mine, some, scale);
            }
            if (call.causal) hide(p, mine, seen - key);
            product<Single, false>(mine, QUERIES, d, v + key * D, D, 1, dout_t, QUERIES, ds, QUERIES);
            for (long j = 0; j < mine; j++)
              for (int c = 0; c < QUERIES; c += WIDTH) {
                const vec x = load(p + j * QUERIES + c) * all(scale) - load(lse + r + c);
                const vec found = exp2_of((x > vec{} ? vec{} : x) * all(LOG2E));  // no probability is above 1
                store(p + j * QUERIES + c, found);
                store(ds + j * QUERIES + c, found * (load(ds + j * QUERIES + c) - load(delta + r + c)));
              }
            product<Single, true>(mine, D, some, p, QUERIES, 1, dout, D, dv + key * D, D);
            product<Single, true>(mine, D, some, ds, QUERIES, 1, q, D, dk + key * D, D);
            product<Single, true>(some, D, mine, ds, 1, QUERIES, k + key * D, D, dq, D);
          }
          for (long i = 0; i < some; i++) {
            const long row = call.row(b, h, r + i);
            if (row < 0) continue;
            float* to = call.merge & 1 ? sums + (r + i) * D : call.dq.at<float>(b, h, row);
            if (first)
              add_scaled(to, dq + i * D, d, 1, scale);
            else
              write_scaled(to, dq + i * D, d, scale);
          }
        }
        for (long j = 0; j < held; j++) {
          float *to_k = call.dk.at<float>(b, h, first + j), *to_v = call.dv.at<float>(b, h, first + j);
          if (call.merge & 2)
            add_rounded(to_k, dk + j * D, d, scale), add_rounded(to_v, dv + j * D, d, 1);
          else
            write_scaled(to_k, dk + j * D, d, scale), write_scaled(to_v, dv + j * D, d, 1);
        }
      }
      for (long r = 0; call.merge & 1 && r < queries; r++) {
        const long row = call.row(b, h, r);
        if (row >= 0) add_rounded(call.dq.at<float>(b, h, row), sums + r * D, d, 1);
      }
    }
  }
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
      tile<Kind, true, ROWS, COLUMNS>(a, depth, 1, b, columns, c, columns, depth);
      asm volatile("" : : "r"(a), "r"(b), "r"(c) : "memory");  // none of the rounds is left out
    }
  }
  return 2.0 * ROWS * columns * depth * threads * rounds;
}

}  // namespace

extern "C" double multiply(int64_t threads, int64_t rounds, int64_t bf16) {
#ifdef __AVX512BF16__
  if (bf16) return 2 * run_multiply<Pairs>(threads, rounds);
#endif
  return run_multiply<Single>(threads, rounds);
}

static void any_forward(const Call* call) {
  const float scale = call->scale;
  if (call->dtype == 0) run_forward<Single, float>(*call, scale);
  if (call->dtype == 1) run_forward<Single, _Float16>(*call, scale);
#ifdef __AVX512BF16__
  if (call->dtype == 2) run_forward<Pairs, Bfloat>(*call, scale);
#else
  if (call->dtype == 2) run_forward<Single, Bfloat>(*call, scale);
#endif
}

static void any_backward(const Call* call) {
  const float scale = call->scale;
  if (call->dtype == 0) run_backward<float>(*call, scale);
  if (call->dtype == 1) run_backward<_Float16>(*call, scale);
  if (call->dtype == 2) run_backward<Bfloat>(*call, scale);
}

// 1 where there is no memory, 0 else.
static int run(void (*pass)(const Call*), const Call* call) {
  try {
    pass(call);
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}
extern "C" int forward(const Call* call) { return run(any_forward, call); }
extern "C" int backward(const Call* call) { return run(any_backward, call); }

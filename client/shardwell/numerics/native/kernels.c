/* Elementwise arithmetic on one block. Compiled once for each set of instructions, as VARIANT.

   Every operation rounds as NumPy's does: products and sums one by one (-ffp-contract=off), to
   nearest, denormals kept. So results have the same bits as without this code. */
#include <math.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels.h"

static inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* fp16: as the processor converts it. */

#if defined(__x86_64__)
static inline float from_half(uint16_t half) { return _cvtsh_ss(half); }
static inline uint16_t to_half(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
#else
static inline float from_half(uint16_t half) {
  __fp16 value;
  memcpy(&value, &half, sizeof value);
  return (float)value;
}
static inline uint16_t to_half(float value) {
  __fp16 half = (__fp16)value;
  uint16_t bits;
  memcpy(&bits, &half, sizeof bits);
  return bits;
}
#endif

static void read_halves(float *to, const uint16_t *from, float factor, size_t count) {
  size_t i = 0;
#if defined(__AVX512F__)
  const __m512 factors = _mm512_set1_ps(factor);
  for (; i + 16 <= count; i += 16) {
    __m512 values = _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(from + i)));
    _mm512_storeu_ps(to + i, _mm512_mul_ps(values, factors));
  }
#elif defined(__F16C__)
  const __m256 factors = _mm256_set1_ps(factor);
  for (; i + 8 <= count; i += 8) {
    __m256 values = _mm256_cvtph_ps(_mm_loadu_si128((const void *)(from + i)));
    _mm256_storeu_ps(to + i, _mm256_mul_ps(values, factors));
  }
#endif
  for (; i < count; i++) to[i] = from_half(from[i]) * factor;
}

static void write_halves(uint16_t *to, const float *from, float factor, size_t count) {
  size_t i = 0;
#if defined(__AVX512F__)
  const __m512 factors = _mm512_set1_ps(factor);
  for (; i + 16 <= count; i += 16) {
    __m512 values = _mm512_mul_ps(_mm512_loadu_ps(from + i), factors);
    __m256i halves = _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256((void *)(to + i), halves);
  }
#elif defined(__F16C__)
  const __m256 factors = _mm256_set1_ps(factor);
  for (; i + 8 <= count; i += 8) {
    __m256 values = _mm256_mul_ps(_mm256_loadu_ps(from + i), factors);
    _mm_storeu_si128((void *)(to + i), _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
  }
#endif
  for (; i < count; i++) to[i] = to_half(from[i] * factor);
}

/* fp32. */

static void scale(float *to, const float *from, float factor, size_t count) {
  if (factor == 1.0f) { /* as it is, a signalling NaN included */
    if (to != from) memmove(to, from, count * sizeof(float));
    return;
  }
  for (size_t i = 0; i < count; i++) to[i] = from[i] * factor;
}

/* fp32: as it is. */
#define read_fp32 scale
#define write_fp32 scale
#define read_fp32_away scale_away

/* bf16: the upper half of a float32, rounded to nearest even; NaN stays NaN. */

static void read_bf16(float *to, const uint16_t *from, float factor, size_t count) {
  for (size_t i = 0; i < count; i++) to[i] = float_of((uint32_t)from[i] << 16);
  scale(to, to, factor, count);
}

static uint32_t write_bf16(uint16_t *to, const float *from, size_t count) {
  enum { NEARLY_INFINITE = 0x7f7f8000u }; /* what would be rounded to infinity is the largest below */
  uint32_t largest = 0;
  for (size_t i = 0; i < count; i++) {
    uint32_t bits = bits_of(from[i]), magnitude = bits & 0x7fffffffu;
    uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    uint32_t quiet = bits >> 16 | 0x40u;
    to[i] = (uint16_t)(magnitude > 0x7f800000u ? quiet : rounded);
    largest = magnitude > largest ? magnitude : largest;
  }
  for (size_t i = 0; largest >= NEARLY_INFINITE && i < count; i++) {
    uint32_t magnitude = bits_of(from[i]) & 0x7fffffffu;
    to[i] -= magnitude >= NEARLY_INFINITE && magnitude < 0x7f800000u;
  }
  return largest;
}

/* Past the caches. A line that is written whole need not be fetched first, which spares a third of
   what a conversion to float32 moves; where there is no such store, it is as ever. */

#if defined(__AVX512F__)
#define HAS_AWAY 1
typedef __m512 line_part;
static inline line_part halves_of(const uint16_t *from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)from));
}
static inline line_part uppers_of(const uint16_t *from) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
static inline line_part floats_of(const float *from) { return _mm512_loadu_ps(from); }
static inline line_part times(line_part values, float factor) {
  return _mm512_mul_ps(values, _mm512_set1_ps(factor));
}
static inline void store_away(float *to, line_part values) { _mm512_stream_ps(to, values); }
#elif defined(__F16C__) && defined(__AVX2__)
#define HAS_AWAY 1
typedef __m256 line_part;
static inline line_part halves_of(const uint16_t *from) {
  return _mm256_cvtph_ps(_mm_loadu_si128((const void *)from));
}
static inline line_part uppers_of(const uint16_t *from) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
static inline line_part floats_of(const float *from) { return _mm256_loadu_ps(from); }
static inline line_part times(line_part values, float factor) {
  return _mm256_mul_ps(values, _mm256_set1_ps(factor));
}
static inline void store_away(float *to, line_part values) { _mm256_stream_ps(to, values); }
#endif

#if defined(HAS_AWAY)
enum { PART = sizeof(line_part) / sizeof(float) };

/* Elements before the first whole line, of float32 that lie at `to`. */
static size_t before_line(const float *to, size_t count) {
  size_t before = (64 - (uintptr_t)to % 64) % 64 / sizeof(float);
  return before < count ? before : count;
}

/* NAME does what PLAIN does; whole lines, which PART_OF reads in parts, go past the caches. */
#define AWAY(NAME, FROM, PLAIN, PART_OF)                                            \
  static void NAME(float *to, const FROM *from, float factor, size_t count) {       \
    size_t i = before_line(to, count);                                              \
    const int as_it_is = factor == 1.0f;                                            \
    PLAIN(to, from, factor, i);                                                     \
    for (; i + PART <= count; i += PART) {                                          \
      line_part values = PART_OF(from + i);                                         \
      store_away(to + i, as_it_is ? values : times(values, factor));                \
    }                                                                               \
    PLAIN(to + i, from + i, factor, count - i);                                     \
  }
AWAY(read_halves_away, uint16_t, read_halves, halves_of)
AWAY(read_bf16_away, uint16_t, read_bf16, uppers_of)
AWAY(scale_away, float, scale, floats_of)

static void copy_16_away(uint16_t *to, const uint16_t *from, size_t count) {
  size_t first = (64 - (uintptr_t)to % 64) % 64 / sizeof(uint16_t);
  first = first < count ? first : count;
  memmove(to, from, first * sizeof(uint16_t));
  const size_t pairs = (count - first) / 2; /* as float32, of which nothing is computed */
  scale_away((void *)(to + first), (const void *)(from + first), 1.0f, pairs);
  memmove(to + first + 2 * pairs, from + first + 2 * pairs, (count - first - 2 * pairs) * sizeof(uint16_t));
}
#else
#define read_halves_away read_halves
#define read_bf16_away read_bf16
#define scale_away scale
#define copy_16_away(to, from, count) memmove(to, from, (count) * sizeof(uint16_t))
#endif

/* Looks: the largest magnitude, as bits. */

static uint32_t look_32(const uint32_t *from, size_t count) {
  uint32_t largest = 0;
  for (size_t i = 0; i < count; i++) {
    uint32_t found = from[i] & 0x7fffffffu;
    largest = found > largest ? found : largest;
  }
  return largest;
}

static uint32_t look_16(const uint16_t *from, size_t count) {
  uint16_t largest = 0;
  for (size_t i = 0; i < count; i++) {
    uint16_t found = from[i] & 0x7fffu;
    largest = found > largest ? found : largest;
  }
  return largest;
}

/* fp16 with a power of two for each block: its exponent. */

enum { EXPONENT_MIN = -126, EXPONENT_MAX = 113, TOP = 15, LARGEST_HALF = 0x7800 };

static inline float power_of_two(int exponent) {
  return float_of(exponent < -126 ? 1u << (exponent + 149) : (uint32_t)(exponent + 127) << 23);
}

/* That which brings finite values with this largest magnitude below 2^TOP, the largest above half. */
static inline int exponent_of(uint32_t peak) {
  int exponent = (int)(peak >> 23) - 126 - TOP;
  return peak == 0 ? 0 : exponent < EXPONENT_MIN ? EXPONENT_MIN : exponent;
}

static uint32_t look_at_finite(const float *from, size_t count) {
  uint32_t largest = 0;
  for (size_t i = 0; i < count; i++) {
    uint32_t found = bits_of(from[i]) & 0x7fffffffu;
    largest = found < 0x7f800000u && found > largest ? found : largest;
  }
  return largest;
}

static uint32_t write_fp16(uint16_t *to, const float *from, int8_t *exponents, size_t block,
                           size_t count) {
  uint32_t largest = 0;
  for (size_t start = 0; start < count; start += block) {
    const size_t size = count - start < block ? count - start : block;
    uint32_t peak = look_32((const void *)(from + start), size);
    largest = peak > largest ? peak : largest;
    if (peak >= 0x7f800000u) peak = look_at_finite(from + start, size);
    const int exponent = exponent_of(peak);
    *exponents++ = (int8_t)exponent;
    write_halves(to + start, from + start, power_of_two(-exponent), size);
    if (exponent == EXPONENT_MAX) /* 2^128 is beyond float32: the largest below it */
      for (size_t i = start; i < start + size; i++) to[i] -= (to[i] & 0x7fffu) == LARGEST_HALF;
  }
  return largest;
}

static void read_fp16(float *to, const uint16_t *from, const int8_t *exponents, size_t block,
                      size_t count) {
  for (size_t start = 0; start < count; start += block)
    read_halves(to + start, from + start, power_of_two(*exponents++),
                count - start < block ? count - start : block);
}

static void read_fp16_away(float *to, const uint16_t *from, const int8_t *exponents, size_t block,
                           size_t count) {
  size_t start = 0;
#if defined(HAS_AWAY)
  const int has_lines = (uintptr_t)to % 64 == 0 && block % PART == 0;
  for (; has_lines && start + block <= count; start += block) {
    const float factor = power_of_two(*exponents++);
    for (size_t i = start; i < start + block; i += PART)
      store_away(to + i, times(halves_of(from + i), factor));
  }
#endif
  for (; start < count; start += block)
    read_halves_away(to + start, from + start, power_of_two(*exponents++),
                     count - start < block ? count - start : block);
}

static uint32_t look_fp16(const uint16_t *from, const int8_t *exponents, size_t block, size_t count) {
  uint32_t largest = 0;
  for (size_t start = 0; start < count; start += block) {
    const uint16_t half = (uint16_t)look_16(from + start, count - start < block ? count - start : block);
    const uint32_t found = bits_of(from_half(half) * power_of_two(*exponents++));
    largest = found > largest ? found : largest;
  }
  return largest;
}

static void add_scaled(float *to, const float *from, float factor, size_t count) {
  if (factor == 0.0f) return; /* whatever `from` is */
  for (size_t i = 0; i < count; i++) to[i] = to[i] + from[i] * factor;
}

static void add_constant(float *to, float constant, size_t count) {
  for (size_t i = 0; i < count; i++) to[i] = to[i] + constant;
}

static void multiply(float *to, const float *from, const float *by, size_t count) {
  for (size_t i = 0; i < count; i++) to[i] = from[i] * by[i];
}

static void divide(float *to, const float *from, const float *by, size_t count) {
  for (size_t i = 0; i < count; i++) to[i] = from[i] / by[i];
}

static void square_root(float *to, const float *from, size_t count) {
  for (size_t i = 0; i < count; i++) to[i] = sqrtf(from[i]);
}

/* A mean is no larger than the largest value in it: where rounding takes a quotient of a finite
   total beyond float32, it is the largest float32. */
static inline float no_larger(float quotient, float total) {
  uint32_t bits = bits_of(quotient);
  int is_beyond = (bits & 0x7fffffffu) == 0x7f800000u && (bits_of(total) & 0x7fffffffu) < 0x7f800000u;
  return float_of(is_beyond ? bits - 1u : bits);
}

static void mean(float *to, double divisor, size_t count) {
  float narrow = (float)divisor;
  if ((double)narrow == divisor)
    for (size_t i = 0; i < count; i++) to[i] = no_larger(to[i] / narrow, to[i]);
  else
    for (size_t i = 0; i < count; i++) to[i] = no_larger((float)((double)to[i] / divisor), to[i]);
}

static void clip(float *to, float bound, size_t count) {
  for (size_t i = 0; i < count; i++) { /* NaN stays */
    float value = to[i];
    value = value > bound ? bound : value;
    to[i] = value < -bound ? -bound : value;
  }
}

uint32_t VARIANT(const struct operation *operation, void *to, const void *from, const void *by,
                 size_t count) {
  const float factor = operation->factor;
  const struct exponents *exponents = by; /* of fp16 */
  const size_t block = exponents == NULL ? 0 : (size_t)operation->divisor;
  switch (operation->code) {
    case READ_FP32: read_fp32(to, from, factor, count); return 0;
    case READ_BF16: read_bf16(to, from, factor, count); return 0;
    case READ_FP16:
      read_fp16(to, from, exponents->from, block, count);
      scale(to, to, factor, count);
      return 0;
    case WRITE_FP32: write_fp32(to, from, factor, count); return 0;
    case WRITE_BF16: return write_bf16(to, from, count);
    case WRITE_FP16: return write_fp16(to, from, exponents->to, block, count);
    case READ_FP32_AWAY: read_fp32_away(to, from, factor, count); return 0;
    case READ_BF16_AWAY: read_bf16_away(to, from, factor, count); return 0;
    case READ_FP16_AWAY: read_fp16_away(to, from, exponents->from, block, count); return 0;
    case LOOK_FP16: return look_fp16(from, exponents->from, block, count);
    case COPY_FP16: case COPY_FP16_AWAY:
      if (operation->code == COPY_FP16) memmove(to, from, count * sizeof(uint16_t));
      else copy_16_away(to, from, count);
      memmove(exponents->to, exponents->from, (count + block - 1) / block);
      return 0;
    case LOOK_32: return look_32(from, count);
    case LOOK_16: return look_16(from, count);
    case COPY: case COPY_32: memmove(to, from, count * sizeof(float)); return 0;
    case COPY_16: memmove(to, from, count * sizeof(uint16_t)); return 0;
    case FILL:
      for (size_t i = 0; i < count; i++) ((float *)to)[i] = factor;
      return 0;
    case SCALE: scale(to, to, factor, count); return 0;
    case ADD_SCALED: add_scaled(to, from, factor, count); return 0;
    case ADD_CONSTANT: add_constant(to, factor, count); return 0;
    case MULTIPLY: multiply(to, from, by, count); return 0;
    case DIVIDE: divide(to, from, by, count); return 0;
    case SQUARE_ROOT: square_root(to, from, count); return 0;
    case MEAN: mean(to, operation->divisor, count); return 0;
    case CLIP: clip(to, factor, count); return 0;
    case COPY_32_AWAY: scale_away(to, from, 1.0f, count); return 0;
    case COPY_16_AWAY: copy_16_away(to, from, count); return 0;
  }
  return 0;
}

#define HASH_OF(VARIANT_NAME) VARIANT_NAME##_hash
#define HASH(VARIANT_NAME) HASH_OF(VARIANT_NAME)

/* Bytes as numbers of 16 bits, so that a compiler takes pairs of products in one instruction. */
void HASH(VARIANT)(const uint8_t *bytes, const int16_t *factors, size_t size,
                   uint32_t sums[HASH_COLUMNS]) {
  const int16_t *second = factors + size, *third = second + size, *fourth = third + size;
  int32_t a = 0, b = 0, c = 0, d = 0;
  for (size_t i = 0; i < size; i++) {
    const int16_t value = bytes[i];
    a += value * factors[i];
    b += value * second[i];
    c += value * third[i];
    d += value * fourth[i];
  }
  sums[0] = (uint32_t)a;
  sums[1] = (uint32_t)b;
  sums[2] = (uint32_t)c;
  sums[3] = (uint32_t)d;
}

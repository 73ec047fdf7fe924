/* CRC32C (Castagnoli), by carry-less multiplication. Compiled once for each width, as VARIANT.

   A piece of a message is a polynomial over two elements, whose bit i is the coefficient of
   x^(n-1-i). Sixteen bytes A = L x^64 + H that lie D bits before others can be added to those as
   L (x^(D+64) mod P) + H (x^D mod P), whose rest by P is the same: that is how a few sums run over
   a block side by side. What is left at the end are sixteen bytes, of which the processor's own
   instruction makes the CRC. A product of mirrored operands is x times too large, so the factors
   below are one power less. */
#include <string.h>

#include "kernels.h"

/* x^(D+63) and x^(D-1) by P, mirrored in 64 bits. tests/unit/numerics/test_native.py has P. */
#define BY_128 0x3743f7bd00000000, 0x3171d43000000000
#define BY_512 0x1c19243b00000000, 0x75bba45b00000000
#define BY_2048 0xe9a5d8be00000000, 0x1426a81500000000

/* Sixteen bytes, and what the processor does with them. */
enum { LANE = 16 };

#if defined(__x86_64__)

#include <immintrin.h>

typedef __m128i lane;

static inline lane load(const uint8_t *from) { return _mm_loadu_si128((const void *)from); }

static inline lane pair(uint64_t low, uint64_t high) {
  return _mm_set_epi64x((long long)high, (long long)low);
}

static inline uint64_t half(lane from, int is_high) {
  return (uint64_t)(is_high ? _mm_extract_epi64(from, 1) : _mm_cvtsi128_si64(from));
}

static inline lane sum_of(lane a, lane b) { return _mm_xor_si128(a, b); }

/* Both halves of `sum` times those of `by`. */
static inline lane product(lane sum, lane by) {
  return _mm_xor_si128(_mm_clmulepi64_si128(sum, by, 0x00), _mm_clmulepi64_si128(sum, by, 0x11));
}

static inline uint32_t of_eight(uint32_t crc, uint64_t part) {
  return (uint32_t)_mm_crc32_u64(crc, part);
}

static inline uint32_t of_one(uint32_t crc, uint8_t part) { return _mm_crc32_u8(crc, part); }

#else

#include <arm_acle.h>
#include <arm_neon.h>

typedef uint64x2_t lane;

static inline lane load(const uint8_t *from) { return vreinterpretq_u64_u8(vld1q_u8(from)); }

static inline lane pair(uint64_t low, uint64_t high) {
  return vcombine_u64(vcreate_u64(low), vcreate_u64(high));
}

static inline uint64_t half(lane from, int is_high) {
  return is_high ? vgetq_lane_u64(from, 1) : vgetq_lane_u64(from, 0);
}

static inline lane sum_of(lane a, lane b) { return veorq_u64(a, b); }

static inline lane product(lane sum, lane by) {
  poly128_t low = vmull_p64((poly64_t)half(sum, 0), (poly64_t)half(by, 0));
  poly128_t high = vmull_p64((poly64_t)half(sum, 1), (poly64_t)half(by, 1));
  return veorq_u64(vreinterpretq_u64_p128(low), vreinterpretq_u64_p128(high));
}

static inline uint32_t of_eight(uint32_t crc, uint64_t part) { return __crc32cd(crc, part); }

static inline uint32_t of_one(uint32_t crc, uint8_t part) { return __crc32cb(crc, part); }

#endif

static inline uint32_t by_eight(uint32_t crc, const uint8_t *from, size_t size) {
  for (; size >= 8; size -= 8, from += 8) {
    uint64_t part;
    memcpy(&part, from, sizeof part);
    crc = of_eight(crc, part);
  }
  for (; size > 0; size--, from++) crc = of_one(crc, *from);
  return crc;
}

/* Of four sums that lie one behind the other. */
static inline uint32_t of_lanes(lane a, lane b, lane c, lane d) {
  const lane by = pair(BY_128);
  lane sum = sum_of(product(a, by), b);
  sum = sum_of(product(sum, by), c);
  sum = sum_of(product(sum, by), d);
  return of_eight(of_eight(0, half(sum, 0)), half(sum, 1));
}

#if defined(__VPCLMULQDQ__)

static inline __m512i moved(__m512i sum, __m512i by, __m512i next) {
  __m512i low = _mm512_clmulepi64_epi128(sum, by, 0x00);
  __m512i high = _mm512_clmulepi64_epi128(sum, by, 0x11);
  return _mm512_ternarylogic_epi64(low, high, next, 0x96); /* exclusive or of all three */
}

uint32_t VARIANT(uint32_t crc, const uint8_t *from, size_t size) {
  enum { WIDE = 4 * LANE, ROUND = 4 * WIDE };
  if (size >= ROUND) {
    const __m512i by = _mm512_broadcast_i32x4(pair(BY_2048));
    const __m512i first = _mm512_zextsi128_si512(pair(crc, 0));
    __m512i a = _mm512_xor_si512(_mm512_loadu_si512(from), first);
    __m512i b = _mm512_loadu_si512(from + WIDE), c = _mm512_loadu_si512(from + 2 * WIDE);
    __m512i d = _mm512_loadu_si512(from + 3 * WIDE);
    for (size -= ROUND, from += ROUND; size >= ROUND; size -= ROUND, from += ROUND) {
      a = moved(a, by, _mm512_loadu_si512(from));
      b = moved(b, by, _mm512_loadu_si512(from + WIDE));
      c = moved(c, by, _mm512_loadu_si512(from + 2 * WIDE));
      d = moved(d, by, _mm512_loadu_si512(from + 3 * WIDE));
    }
    const __m512i by_one = _mm512_broadcast_i32x4(pair(BY_512));
    const __m512i sum = moved(moved(moved(a, by_one, b), by_one, c), by_one, d);
    crc = of_lanes(_mm512_castsi512_si128(sum), _mm512_extracti32x4_epi32(sum, 1),
                   _mm512_extracti32x4_epi32(sum, 2), _mm512_extracti32x4_epi32(sum, 3));
  }
  return by_eight(crc, from, size);
}

#else

uint32_t VARIANT(uint32_t crc, const uint8_t *from, size_t size) {
  enum { ROUND = 4 * LANE };
  if (size >= ROUND) {
    const lane by = pair(BY_512);
    lane a = sum_of(load(from), pair(crc, 0)), b = load(from + LANE);
    lane c = load(from + 2 * LANE), d = load(from + 3 * LANE);
    for (size -= ROUND, from += ROUND; size >= ROUND; size -= ROUND, from += ROUND) {
      a = sum_of(product(a, by), load(from));
      b = sum_of(product(b, by), load(from + LANE));
      c = sum_of(product(c, by), load(from + 2 * LANE));
      d = sum_of(product(d, by), load(from + 3 * LANE));
    }
    crc = of_lanes(a, b, c, d);
  }
  return by_eight(crc, from, size);
}

#endif

/* Elementwise arithmetic on blocks: what kernels.c computes, and dispatch.c chooses and checks. */
#ifndef SHARDWELL_KERNELS_H
#define SHARDWELL_KERNELS_H

#include <stddef.h>
#include <stdint.h>

enum { BLOCK = 2048 };   /* elements: 8 KiB of float32, so that a few arrays stay in the first-level cache */
enum { ARRAY_COUNT = 9 }; /* of one run at the most */

/* Formats of elements: EACH(NAME, name, bytes of an element). kernels.c has read_name, write_name and
   read_name_away of each; codes, and what dispatch.c and rows.c know of formats, are made of this. */
#define FORMATS(EACH) EACH(FP32, fp32, 4) EACH(FP16, fp16, 2) EACH(BF16, bf16, 2)
#define READ_CODE(NAME, NAME_IN_C, SIZE) READ_##NAME,
#define WRITE_CODE(NAME, NAME_IN_C, SIZE) WRITE_##NAME,
#define AWAY_CODE(NAME, NAME_IN_C, SIZE) READ_##NAME##_AWAY,

/* As in elementwise.py, which says what each does. */
enum code {
  FORMATS(READ_CODE)
  FORMATS(WRITE_CODE)
  LOOK_32, LOOK_16,
  COPY, FILL, SCALE, ADD_SCALED, ADD_CONSTANT, MULTIPLY, DIVIDE, SQUARE_ROOT, MEAN, CLIP,
  COPY_32, COPY_16, CHECK_32, CHECK_16, LOOK_FP16, COPY_FP16, CHECK_FP16,
  CODE_COUNT,
  /* What dispatch.c makes of some of them: the same, past the caches. */
  LAST_CODE = CODE_COUNT - 1,
  FORMATS(AWAY_CODE)
  COPY_32_AWAY, COPY_16_AWAY, COPY_FP16_AWAY,
  OWN_CODE_COUNT
};

struct operation {
  uint8_t code, to, from, by;
  float factor;
  double divisor; /* of MEAN; of fp16 the elements of a block */
};

/* The exponents of a payload of fp16, from a block on: where they are read, and written. */
struct exponents {
  const int8_t *from;
  int8_t *to;
};

/* Runs one operation on some elements; returns the largest magnitude that it
   saw, as bits, or 0 where it does not look. `to`, `from` and `by` may be the same memory; else
   they don't overlap. What works on fp16 begins with a block, or is of one; `by` is its exponents. */
typedef uint32_t run_block(const struct operation *operation, void *to, const void *from,
                           const void *by, size_t count);

run_block shardwell_avx512, shardwell_avx2, shardwell_neon;

enum { HASH_COLUMNS = 4 };

/* Sums of products of `size` bytes with as many factors of each column: exact while below 2^31. */
typedef void run_hash(const uint8_t *bytes, const int16_t *factors, size_t size,
                      uint32_t sums[HASH_COLUMNS]);

run_hash shardwell_avx512_hash, shardwell_avx2_hash, shardwell_neon_hash;

/* A CRC32C that goes on over bytes; before and after, as it is inside: not inverted. */
typedef uint32_t run_crc(uint32_t crc, const uint8_t *from, size_t size);

run_crc shardwell_crc_512, shardwell_crc_128;

/* What it runs on this processor; NULL: nothing. */
run_block *shardwell_chosen(void);
run_hash *shardwell_chosen_hash(void);
run_crc *shardwell_chosen_crc(void);

#endif

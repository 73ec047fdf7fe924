/* The one entry: checks every place and length, then runs all operations block by block. */
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include "kernels.h"

#define PUBLIC __attribute__((visibility("default")))

enum { INTERFACE = 4 }; /* As in __init__.py: another one is not used. */

PUBLIC int32_t shardwell_interface(void) { return INTERFACE; }

/* What it runs on this processor. */
static const char *const NAMES[] = {NULL, "AVX-512", "AVX2", "NEON"};
static run_block *const VARIANTS[] = {
  NULL,
#if defined(__x86_64__)
  shardwell_avx512, shardwell_avx2, NULL,
#else
  NULL, NULL, shardwell_neon,
#endif
};

/* The index of the best variant; 0: none. By cpuid, as not every compiler's runtime has
   __builtin_cpu_supports. */
static int best(void) {
#if defined(__x86_64__)
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
  const unsigned avx = 1u << 28, f16c = 1u << 29, osxsave = 1u << 27;
  if ((c & avx) == 0 || (c & f16c) == 0 || (c & osxsave) == 0) return 0;
  unsigned saved, high; /* the registers that the system saves: xmm and ymm, and those of AVX-512 */
  __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  if ((saved & 0x06u) != 0x06u || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
  const unsigned avx2 = 1u << 5, avx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31; /* F DQ BW VL */
#if !defined(WITHOUT_AVX512) /* so that tests try the others */
  if ((saved & 0xe6u) == 0xe6u && (b & avx512) == avx512) return 1;
#endif
  return (b & avx2) != 0 ? 2 : 0;
#elif defined(__aarch64__)
  return 3;
#else
  return 0;
#endif
}

static int CHOSEN = -1; /* The same whoever sets it. */

static int chosen(void) {
  if (CHOSEN < 0) CHOSEN = best();
  return CHOSEN;
}

/* How CRCs are computed here; NULL: they are not. */
static run_crc *best_crc(void) {
#if defined(__x86_64__)
  unsigned a, b, c, d;
  const unsigned pclmul = 1u << 1, sse42 = 1u << 20, vpclmul = 1u << 10;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & pclmul) == 0 || (c & sse42) == 0) return NULL;
  if (chosen() != 1 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return shardwell_crc_128;
  return (c & vpclmul) != 0 ? shardwell_crc_512 : shardwell_crc_128;
#elif defined(__aarch64__) && defined(__linux__)
  const unsigned long pmull = 1ul << 4, crc32 = 1ul << 7; /* of AT_HWCAP */
  return (~getauxval(AT_HWCAP) & (pmull | crc32)) == 0 ? shardwell_crc_128 : NULL;
#elif defined(__aarch64__) /* Apple's have both */
  return shardwell_crc_128;
#else
  return NULL;
#endif
}

static run_crc *CRC; /* The same whoever sets it. */

static run_crc *chosen_crc(void) {
  if (CRC == NULL) CRC = best_crc();
  return CRC;
}

run_block *shardwell_chosen(void) { return VARIANTS[chosen()]; }

run_crc *shardwell_chosen_crc(void) { return chosen_crc(); }

PUBLIC int32_t shardwell_checks(void) { return chosen_crc() != NULL; }

PUBLIC const char *shardwell_variant(void) { return NAMES[chosen()]; }

/* Bytes of an element of what an operation takes; 0: it takes nothing there. */
struct sizes { uint8_t to, from, by; };
static const struct sizes SIZES[CODE_COUNT] = {
  [READ_FP32] = {4, 4, 0}, [READ_FP16] = {4, 2, 0}, [READ_BF16] = {4, 2, 0},
  [WRITE_FP32] = {4, 4, 0}, [WRITE_FP16] = {2, 4, 0}, [WRITE_BF16] = {2, 4, 0},
  [LOOK_32] = {0, 4, 0}, [LOOK_16] = {0, 2, 0},
  [COPY] = {4, 4, 0}, [FILL] = {4, 0, 0}, [SCALE] = {4, 0, 0}, [ADD_SCALED] = {4, 4, 0},
  [ADD_CONSTANT] = {4, 0, 0}, [MULTIPLY] = {4, 4, 4}, [DIVIDE] = {4, 4, 4}, [SQUARE_ROOT] = {4, 4, 0},
  [MEAN] = {4, 0, 0}, [CLIP] = {4, 0, 0},
  [COPY_32] = {4, 4, 0}, [COPY_16] = {2, 2, 0}, [CHECK_32] = {0, 4, 0}, [CHECK_16] = {0, 2, 0},
};

enum { OPERATION_COUNT = 32, OWN_COUNT = 3 };
enum { CACHED_BYTES = 16 * 1024, LINE = 64 }; /* half of a small first-level cache; elements of a few lines */

struct arrays {
  uint64_t address[ARRAY_COUNT]; /* 0: a temporary, of which there are OWN_COUNT at the most */
  uint64_t bytes[ARRAY_COUNT];
};

static int is_fit(const struct arrays *arrays, uint8_t place, uint8_t size, uint64_t stop) {
  if (size == 0) return 1;
  if (place >= ARRAY_COUNT) return 0;
  uint64_t address = arrays->address[place];
  if (address == 0) return 1;
  return address % size == 0 && stop <= arrays->bytes[place] / size;
}

/* Where operations find a place's elements from `start` on. */
struct places {
  const struct arrays *arrays;
  float *own[ARRAY_COUNT]; /* blocks of temporaries */
};

static void *place_of(const struct places *places, uint8_t place, uint8_t size, uint64_t start) {
  if (size == 0) return NULL;
  uint64_t address = places->arrays->address[place];
  return address == 0 ? (void *)places->own[place] : (void *)(uintptr_t)(address + start * size);
}

/* Numbers a temporary; 0: there are no more. */
static int takes_block(const struct arrays *arrays, uint8_t owners[], int *count, uint8_t place,
                       uint8_t size) {
  if (size == 0 || arrays->address[place] != 0) return 1;
  for (int i = 0; i < *count; i++)
    if (owners[i] == place) return 1;
  if (*count == OWN_COUNT) return 0;
  owners[(*count)++] = place;
  return 1;
}

/* Elements of a block of a list that checks. The end of a CRC costs as much as 2 KiB of it, so they
   are as many as the first-level cache holds of all places together. */
static size_t checked_block(const uint8_t bytes[], int own_count) {
  size_t all = 0, most = OWN_COUNT * BLOCK / (size_t)(own_count > 0 ? own_count : 1);
  for (int i = 0; i < ARRAY_COUNT; i++) all += bytes[i];
  size_t block = CACHED_BYTES / all / LINE * LINE;
  block = block < BLOCK / 2 ? BLOCK / 2 : block;
  return block < most ? block : most;
}

/* Runs all operations on elements [start, stop) of all arrays.

   Returns the largest magnitude that operations saw which look, as bits, of which there are 31, and
   above them the CRC32C `crc` gone on over what operations saw which check; -1: something does not
   fit, and nothing was touched. */
PUBLIC int64_t shardwell_run(const void *packed, uint64_t operation_count, const void *packed_arrays,
                             uint64_t start, uint64_t stop, uint32_t crc) {
  float own[OWN_COUNT * BLOCK]; /* 24 KiB: threads may have little stack */
  uint8_t owners[OWN_COUNT];
  struct operation operations[OPERATION_COUNT];
  struct arrays arrays;
  struct places places = {&arrays, {NULL}};
  uint8_t bytes[ARRAY_COUNT] = {0}; /* of an element, by place */
  int own_count = 0, checks = 0;
  run_block *run = VARIANTS[chosen()];
  if (run == NULL || operation_count > OPERATION_COUNT || start > stop) return -1;
  memcpy(operations, packed, operation_count * sizeof operations[0]);
  memcpy(&arrays, packed_arrays, sizeof arrays);
  for (uint64_t i = 0; i < operation_count; i++) {
    const struct operation *each = &operations[i];
    if (each->code >= CODE_COUNT) return -1;
    checks |= each->code == CHECK_32 || each->code == CHECK_16;
    const struct sizes *sizes = &SIZES[each->code];
    if (!is_fit(&arrays, each->to, sizes->to, stop) ||
        !is_fit(&arrays, each->from, sizes->from, stop) || !is_fit(&arrays, each->by, sizes->by, stop))
      return -1;
    if (!takes_block(&arrays, owners, &own_count, each->to, sizes->to) ||
        !takes_block(&arrays, owners, &own_count, each->from, sizes->from) ||
        !takes_block(&arrays, owners, &own_count, each->by, sizes->by))
      return -1;
    if (sizes->to != 0) bytes[each->to] = sizes->to;
    if (sizes->from != 0) bytes[each->from] = sizes->from;
    if (sizes->by != 0) bytes[each->by] = sizes->by;
  }
  if (checks && chosen_crc() == NULL) return -1;
  const size_t block = checks ? checked_block(bytes, own_count) : BLOCK;
  for (int i = 0; i < own_count; i++) places.own[owners[i]] = own + i * block;
  uint32_t largest = 0, inside = ~crc;
  for (uint64_t first = start; first < stop; first += block) {
    size_t count = stop - first < block ? (size_t)(stop - first) : block;
    for (uint64_t i = 0; i < operation_count; i++) {
      const struct operation *each = &operations[i];
      const struct sizes *sizes = &SIZES[each->code];
      const void *from = place_of(&places, each->from, sizes->from, first);
      if (each->code == CHECK_32 || each->code == CHECK_16) {
        inside = chosen_crc()(inside, from, count * sizes->from);
        continue;
      }
      uint32_t found = run(each, place_of(&places, each->to, sizes->to, first), from,
                           place_of(&places, each->by, sizes->by, first), count);
      largest = found > largest ? found : largest;
    }
  }
  return (int64_t)(uint32_t)~inside << 31 | largest;
}

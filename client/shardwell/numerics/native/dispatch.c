/* Chooses kernels for this processor. `shardwell_run` checks every place and length, then runs all
   operations block by block. */
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include "kernels.h"
#include "objects.h"

enum { INTERFACE = 6 }; /* As in __init__.py: another one is not used. */

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

static run_hash *const HASHES[] = {
  NULL,
#if defined(__x86_64__)
  shardwell_avx512_hash, shardwell_avx2_hash, NULL,
#else
  NULL, NULL, shardwell_neon_hash,
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

static int CHOSEN = -1; /* The same whichever thread sets it. */

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

static run_crc *CRC; /* The same whichever thread sets it. */

static run_crc *chosen_crc(void) {
  if (CRC == NULL) CRC = best_crc();
  return CRC;
}

run_block *shardwell_chosen(void) { return VARIANTS[chosen()]; }

run_hash *shardwell_chosen_hash(void) { return HASHES[chosen()]; }

run_crc *shardwell_chosen_crc(void) { return chosen_crc(); }

PUBLIC int32_t shardwell_checks(void) { return chosen_crc() != NULL; }

PUBLIC const char *shardwell_variant(void) { return NAMES[chosen()]; }

/* Bytes of an element of what an operation takes; 0: it takes nothing there. */
struct sizes { uint8_t to, from, by; };
#define SIZES_OF(NAME, NAME_IN_C, SIZE) \
  [READ_##NAME] = {4, SIZE, 0}, [WRITE_##NAME] = {SIZE, 4, 0}, [READ_##NAME##_AWAY] = {4, SIZE, 0},
static const struct sizes SIZES[OWN_CODE_COUNT] = {
  FORMATS(SIZES_OF)
  [LOOK_32] = {0, 4, 0}, [LOOK_16] = {0, 2, 0},
  [COPY] = {4, 4, 0}, [FILL] = {4, 0, 0}, [SCALE] = {4, 0, 0}, [ADD_SCALED] = {4, 4, 0},
  [ADD_CONSTANT] = {4, 0, 0}, [MULTIPLY] = {4, 4, 4}, [DIVIDE] = {4, 4, 4}, [SQUARE_ROOT] = {4, 4, 0},
  [MEAN] = {4, 0, 0}, [CLIP] = {4, 0, 0},
  [COPY_32] = {4, 4, 0}, [COPY_16] = {2, 2, 0}, [CHECK_32] = {0, 4, 0}, [CHECK_16] = {0, 2, 0},
  [COPY_32_AWAY] = {4, 4, 0}, [COPY_16_AWAY] = {2, 2, 0},
  [LOOK_FP16] = {0, 2, 0}, [COPY_FP16] = {2, 2, 0}, [CHECK_FP16] = {0, 2, 0},
  [COPY_FP16_AWAY] = {2, 2, 0},
};

enum { OPERATION_COUNT = 32, OWN_COUNT = 3 };
#if !defined(AWAY_BYTES) /* so that tests try it with little */
#define AWAY_BYTES (1 << 20) /* written at once: a cache has lost it before the next read */
#endif
enum { CACHED_BYTES = 16 * 1024, LINE = 64 }; /* half of a small first-level cache; elements of a few lines */

struct arrays {
  uint8_t *address[ARRAY_COUNT]; /* NULL: a temporary, of which there are OWN_COUNT at the most */
  uint64_t bytes[ARRAY_COUNT];
};

static int is_fit(const struct arrays *arrays, uint8_t place, uint8_t size, uint64_t stop) {
  if (size == 0 || arrays->address[place] == NULL) return 1;
  return (uintptr_t)arrays->address[place] % size == 0 && stop <= arrays->bytes[place] / size;
}

/* Payloads of fp16: values, and behind them an exponent for each block. */

static int has_exponents(uint8_t code) {
  return code == READ_FP16 || code == READ_FP16_AWAY || code == WRITE_FP16 || code == LOOK_FP16 ||
         code == COPY_FP16 || code == COPY_FP16_AWAY || code == CHECK_FP16;
}

static int writes_exponents(uint8_t code) {
  return code == WRITE_FP16 || code == COPY_FP16 || code == COPY_FP16_AWAY;
}

/* Exponents of the payloads of one run, by place. */
struct tails {
  int8_t *first[ARRAY_COUNT];
  uint64_t elements[ARRAY_COUNT]; /* of the payload */
  uint64_t block[ARRAY_COUNT];
  int8_t *own; /* room for those of a payload that is copied to a temporary: of one */
  int is_own_taken;
};
enum { OWN_TAIL = 2 * BLOCK };

/* Sets a place's exponents; 0: another operation has others. */
static int set_tail(struct tails *tails, uint8_t place, int8_t *first, uint64_t elements, uint64_t block) {
  const int is_new = tails->first[place] == NULL;
  if (!is_new && (tails->first[place] != first || tails->block[place] != block)) return 0;
  tails->first[place] = first;
  tails->elements[place] = elements;
  tails->block[place] = block;
  return 1;
}

/* Finds the exponents of a payload; 0: it is none of whole blocks, or has no elements up to `stop`. */
static int find_tail(struct tails *tails, const struct arrays *arrays, uint8_t place, uint64_t block,
                     uint64_t stop) {
  uint8_t *address = arrays->address[place];
  if (address != NULL) {
    const uint64_t bytes = arrays->bytes[place], whole = 2 * block + 1;
    const uint64_t count = (bytes - bytes / whole - (bytes % whole != 0)) / 2;
    if (2 * count + (count + block - 1) / block != bytes) return 0;
    if (!set_tail(tails, place, (int8_t *)address + 2 * count, count, block)) return 0;
  }
  return tails->first[place] != NULL && tails->block[place] == block && stop <= tails->elements[place];
}

/* 0: the payloads of an operation do not fit it. `written` are the places that the run writes to. */
static int find_tails(struct tails *tails, const struct operation *each, const struct arrays *arrays,
                      int written, uint64_t start, uint64_t stop) {
  if (!has_exponents(each->code)) return 1;
  if (!(each->divisor >= 1 && each->divisor <= (double)UINT32_MAX)) return 0;
  const uint64_t block = (uint64_t)each->divisor;
  if (each->code == READ_FP16 && each->by != 0) { /* whose exponents lie elsewhere */
    int8_t *first = (int8_t *)arrays->address[each->by];
    return first != NULL && stop <= arrays->bytes[each->by] * block && set_tail(tails, each->from, first, 0, block);
  }
  if (each->code != WRITE_FP16 && !find_tail(tails, arrays, each->from, block, stop)) return 0;
  if (each->code == COPY_FP16 && arrays->address[each->to] == NULL) {
    const uint64_t elements = tails->elements[each->from], count = (elements + block - 1) / block;
    if (count > OWN_TAIL || tails->is_own_taken || (written >> each->from & 1) != 0) return 0;
    tails->is_own_taken = 1;
    memcpy(tails->own, tails->first[each->from], count);
    return set_tail(tails, each->to, tails->own, elements, block);
  }
  if (writes_exponents(each->code) && !find_tail(tails, arrays, each->to, block, stop)) return 0;
  return each->code != WRITE_FP16 || start % block == 0;
}

/* Where operations find a place's elements from `start` on. */
struct places {
  const struct arrays *arrays;
  float *own[ARRAY_COUNT]; /* blocks of temporaries */
};

static void *place_of(const struct places *places, uint8_t place, uint8_t size, uint64_t start) {
  if (size == 0) return NULL;
  uint8_t *address = places->arrays->address[place];
  return address == NULL ? (void *)places->own[place] : address + start * size;
}

/* Runs an operation on elements of fp16, which may begin within a block. */
static uint32_t run_blocks(run_block *run, const struct operation *each, const struct tails *tails,
                           uint8_t *to, const uint8_t *from, uint64_t first, size_t count) {
  const struct sizes *sizes = &SIZES[each->code];
  const uint64_t block = (uint64_t)each->divisor, inside = first % block, number = first / block;
  struct exponents at = {NULL, NULL};
  if (each->code != WRITE_FP16) at.from = tails->first[each->from] + number;
  if (writes_exponents(each->code)) at.to = tails->first[each->to] + number;
  if (at.to != NULL && tails->first[each->to] == tails->own) at.from = at.to; /* has them already */
  const size_t head = inside == 0 ? 0 : count < block - inside ? count : (size_t)(block - inside);
  uint32_t largest = 0;
  if (head > 0) {
    largest = run(each, to, from, &at, head);
    if (head == count) return largest;
    if (at.from != NULL) at.from++;
    if (at.to != NULL) at.to++;
    if (to != NULL) to += head * sizes->to;
    from += head * sizes->from;
  }
  const uint32_t found = run(each, to, from, &at, count - head);
  return found > largest ? found : largest;
}

/* Numbers a temporary; 0: there are no more. */
static int takes_block(const struct arrays *arrays, uint8_t owners[], int *count, uint8_t place,
                       uint8_t size) {
  if (size == 0 || arrays->address[place] != NULL) return 1;
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

/* Places that operations use, and those that they write to, as bits. */
struct uses { int all, written; };

/* 0: there is no such operation, or place. */
static int uses_of(const struct operation operations[], uint64_t count, struct uses *uses) {
  *uses = (struct uses){0, 0};
  for (uint64_t i = 0; i < count; i++) {
    const struct operation *each = &operations[i];
    if (each->code >= CODE_COUNT) return 0;
    const struct sizes *sizes = &SIZES[each->code];
    const uint8_t taken[3][2] = {{each->to, sizes->to}, {each->from, sizes->from}, {each->by, sizes->by}};
    for (int k = 0; k < 3; k++) {
      if (taken[k][1] == 0) continue;
      if (taken[k][0] >= ARRAY_COUNT) return 0;
      uses->all |= 1 << taken[k][0];
      if (k == 0) uses->written |= 1 << taken[k][0];
    }
    if (each->code == READ_FP16 && each->by != 0) {
      if (each->by >= ARRAY_COUNT) return 0;
      uses->all |= 1 << each->by;
    }
  }
  return 1;
}

/* The same operation, past the caches; 0: there is none. */
static uint8_t away_of(uint8_t code) {
  switch (code) {
#define AWAY_OF(NAME, NAME_IN_C, SIZE) case READ_##NAME: return READ_##NAME##_AWAY;
    FORMATS(AWAY_OF)
    case COPY_32: return COPY_32_AWAY;
    case COPY_16: return COPY_16_AWAY;
    case COPY_FP16: return COPY_FP16_AWAY;
    default: return 0;
  }
}

/* Whether a place is one operation's alone. */
static int is_used_once(const struct operation operations[], uint64_t count, uint8_t place) {
  int used = 0;
  for (uint64_t i = 0; i < count; i++) {
    const struct operation *each = &operations[i];
    const struct sizes *sizes = &SIZES[each->code];
    used += sizes->to != 0 && each->to == place;
    used += sizes->from != 0 && each->from == place;
    used += sizes->by != 0 && each->by == place;
  }
  return used == 1;
}

/* Has much that is only written go past the caches; whether something does. */
static int write_away(struct operation operations[], uint64_t count, const struct arrays *arrays,
                      uint64_t element_count) {
  int found = 0;
  for (uint64_t i = 0; i < count; i++) {
    struct operation *each = &operations[i];
    const uint8_t code = away_of(each->code);
    const int is_plain = each->code != READ_FP16 || each->factor == 1.0f;
    const int is_much = code != 0 && is_plain && element_count >= AWAY_BYTES / SIZES[code].to;
    if (is_much && arrays->address[each->to] != NULL && is_used_once(operations, count, each->to)) {
      each->code = code;
      found = 1;
    }
  }
  return found;
}

/* To be called before other threads learn of what was written past the caches. */
static void fence(void) {
#if defined(__x86_64__)
  __builtin_ia32_sfence();
#endif
}

_Static_assert(ARRAY_COUNT <= sizeof((struct objects *)0)->buffers / sizeof(python_buffer),
               "each array of a run takes a buffer");

static float NOTHING; /* where an array without elements may lie */

/* The memory of the arrays that are used: of float32 or bytes. 0, or why there is none. */
static int64_t find_arrays(struct objects *objects, void *tuple, const struct uses *uses,
                           struct arrays *arrays) {
  void *items[ARRAY_COUNT];
  if (!items_of(tuple, items, ARRAY_COUNT)) return MISFIT;
  for (int place = 0; place < ARRAY_COUNT; place++) {
    arrays->address[place] = NULL;
    if (items[place] == NULL || (uses->all >> place & 1) == 0) continue;
    const int before = objects->count;
    const int flags = CONTIGUOUS | FORMAT | (uses->written >> place & 1 ? WRITABLE : 0);
    uint8_t *memory = memory_of(objects, items[place], 1, flags, &arrays->bytes[place]);
    if (objects->count == before) return RAISED;
    const python_buffer *buffer = &objects->buffers[before];
    if (buffer->item_size != 1 && !is_float(buffer)) return MISFIT;
    arrays->address[place] = memory == NULL ? (uint8_t *)&NOTHING : memory;
  }
  return 0;
}

/* Runs all operations on elements [start, stop) of all arrays: a tuple of objects that have memory,
   by place, of which None is a temporary, as is what is beyond its end.

   Returns the largest magnitude that operations saw which look, as bits, of which there are 31, and
   above them the CRC32C `crc` gone on over what operations saw which check; or that something does
   not fit, and nothing was touched. */
PUBLIC int64_t shardwell_run(const void *packed, uint64_t operation_count, void *tuple, uint64_t start,
                             uint64_t stop, uint32_t crc) {
  float own[OWN_COUNT * BLOCK]; /* 24 KiB: threads may have little stack */
  uint8_t owners[OWN_COUNT];
  struct operation operations[OPERATION_COUNT];
  struct arrays arrays;
  struct uses uses;
  struct objects objects = {.count = 0};
  struct places places = {&arrays, {NULL}};
  uint8_t bytes[ARRAY_COUNT] = {0}; /* of an element, by place */
  int own_count = 0, checks = 0;
  uint64_t unit = 1, whole = 1; /* elements that are written at once; that had better be read so */
  int8_t own_tail[OWN_TAIL];
  struct tails tails = {{NULL}, {0}, {0}, own_tail, 0};
  run_block *run = VARIANTS[chosen()];
  if (run == NULL || operation_count > OPERATION_COUNT || start > stop) return MISFIT;
  memcpy(operations, packed, operation_count * sizeof operations[0]);
  if (!uses_of(operations, operation_count, &uses)) return MISFIT;
  const int64_t problem = find_arrays(&objects, tuple, &uses, &arrays);
  if (problem != 0) return ended(&objects, problem);
  for (uint64_t i = 0; i < operation_count; i++) {
    const struct operation *each = &operations[i];
    const struct sizes *sizes = &SIZES[each->code];
    checks |= each->code == CHECK_32 || each->code == CHECK_16 || each->code == CHECK_FP16;
    if (!find_tails(&tails, each, &arrays, uses.written, start, stop) || !is_fit(&arrays, each->to, sizes->to, stop) ||
        !is_fit(&arrays, each->from, sizes->from, stop) || !is_fit(&arrays, each->by, sizes->by, stop) ||
        !takes_block(&arrays, owners, &own_count, each->to, sizes->to) ||
        !takes_block(&arrays, owners, &own_count, each->from, sizes->from) ||
        !takes_block(&arrays, owners, &own_count, each->by, sizes->by))
      return ended(&objects, MISFIT);
    if (each->code == WRITE_FP16) unit = (uint64_t)each->divisor;
    if (has_exponents(each->code)) whole = (uint64_t)each->divisor;
    if (sizes->to != 0) bytes[each->to] = sizes->to;
    if (sizes->from != 0) bytes[each->from] = sizes->from;
    if (sizes->by != 0) bytes[each->by] = sizes->by;
  }
  if (checks && chosen_crc() == NULL) return ended(&objects, MISFIT);
  size_t block = checks ? checked_block(bytes, own_count) : BLOCK;
  if (block < unit && own_count > 0) return ended(&objects, MISFIT);
  block = block < unit ? (size_t)unit : (size_t)(block / unit * unit);
  if (unit == 1 && whole <= block) block = (size_t)(block / whole * whole);
  for (int i = 0; i < own_count; i++) places.own[owners[i]] = own + i * block;
  const int is_away = write_away(operations, operation_count, &arrays, stop - start);
  void *state = begun((stop - start) * sizeof(float), 0);
  uint32_t largest = 0, inside = ~crc;
  for (uint64_t first = start; first < stop; first += block) {
    size_t count = stop - first < block ? (size_t)(stop - first) : block;
    for (uint64_t i = 0; i < operation_count; i++) {
      const struct operation *each = &operations[i];
      const struct sizes *sizes = &SIZES[each->code];
      const void *from = place_of(&places, each->from, sizes->from, first);
      if (each->code == CHECK_32 || each->code == CHECK_16 || each->code == CHECK_FP16) {
        inside = chosen_crc()(inside, from, count * sizes->from);
        continue;
      }
      void *to = place_of(&places, each->to, sizes->to, first);
      uint32_t found =
        has_exponents(each->code)
          ? run_blocks(run, each, &tails, to, from, first, count)
          : run(each, to, from, place_of(&places, each->by, sizes->by, first), count);
      largest = found > largest ? found : largest;
    }
  }
  for (uint64_t i = 0; i < operation_count; i++) { /* exponents come behind all values */
    const struct operation *each = &operations[i];
    if (each->code != CHECK_FP16 || stop != tails.elements[each->from]) continue;
    const uint64_t size = (uint64_t)each->divisor;
    inside = chosen_crc()(inside, (const void *)tails.first[each->from], (stop + size - 1) / size);
  }
  if (is_away) fence();
  over(state);
  return ended(&objects, (int64_t)(uint32_t)~inside << 31 | largest);
}

/* Rows of tables: ids put in order and found, rows gathered, scattered, added up and spread.

   Every entry is given Python's own objects, and has their memory and its size from them. It checks
   all sizes and numbers before it touches anything: what does not fit is MISFIT, and what
   has no memory that may be used so is an exception of Python's. */
#include <string.h>

#include "kernels.h"
#include "objects.h"

enum { AHEAD = 8 }; /* rows that are asked for from memory before their turn */
enum { LINE = 64 };
enum { SEGMENT = 8, LEVEL_COUNT = 12 }; /* 8^12 gradients are more than there can be */

/* Whether so many rows of `stride` bytes are in `size` bytes. */
static int fits(uint64_t count, uint64_t stride, uint64_t size) {
  return stride != 0 && count <= size / stride;
}

static int are_below(const int64_t *places, uint64_t count, uint64_t bound, int64_t lowest) {
  int64_t low = 0, high = lowest;
  if (count == 0) return 1;
  for (uint64_t i = 0; i < count; i++) {
    low = places[i] < low ? places[i] : low;
    high = places[i] > high ? places[i] : high;
  }
  return low >= lowest && (high < 0 || (uint64_t)high < bound);
}

static inline void ask_for(const uint8_t *row, uint64_t stride) {
  for (uint64_t at = 0; at < stride && at < 8 * LINE; at += LINE) __builtin_prefetch(row + at);
}

static inline void ask_to_write(const uint8_t *row, uint64_t stride) {
  for (uint64_t at = 0; at < stride && at < 8 * LINE; at += LINE) __builtin_prefetch(row + at, 1);
}

static uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

static uint32_t look(run_block *run, const void *from, uint64_t count) {
  const struct operation looks = {.code = LOOK_32};
  return run(&looks, NULL, from, NULL, count);
}

/* Where ids are: see placement/rows.py. */

/* What divides by a number that stays, without a division (Granlund and Montgomery, 1994). */
struct divisor {
  uint64_t by, factor;
  int first, second;
};

static struct divisor divisor_of(uint64_t by) {
  int bits = 0;
  while (bits < 64 && ((unsigned __int128)1 << bits) < by) bits++;
  unsigned __int128 above = (((unsigned __int128)1 << bits) - by) << 64;
  return (struct divisor){by, (uint64_t)(above / by) + 1, bits < 1 ? bits : 1, bits > 1 ? bits - 1 : 0};
}

static inline uint64_t quotient(uint64_t value, const struct divisor *divisor) {
  uint64_t high = (uint64_t)(((unsigned __int128)divisor->factor * value) >> 64);
  return (high + ((value - high) >> divisor->first)) >> divisor->second;
}

static inline uint64_t rest(uint64_t value, const struct divisor *divisor) {
  return value - quotient(value, divisor) * divisor->by;
}

static inline uint64_t mix(uint64_t word) {
  word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9;
  word = (word ^ (word >> 27)) * 0x94d049bb133111eb;
  return word ^ (word >> 31);
}

/* The shard of an id, of which row_count says whether they are dealt or hashed. */
static inline uint64_t shard_of(uint64_t id, uint64_t row_count, const struct divisor *shards) {
  if (row_count == 0) return rest(mix(id), shards);
  return rest(rest(mix(quotient(id, shards)), shards) + id, shards);
}

/* Whether ids ascend, are in range and on a shard: 0, or REFUSED. */
PUBLIC int64_t shardwell_check_ids(void *ids_object, uint64_t row_count, uint64_t shard_count,
                                   uint64_t shard_index) {
  struct objects objects = {.count = 0};
  uint64_t count;
  const int64_t *ids = memory_of(&objects, ids_object, 8, 0, &count);
  if (ids == NULL) return ended(&objects, RAISED);
  if (shard_count == 0 || !is_aligned(ids, 8)) return ended(&objects, MISFIT);
  const struct divisor shards = divisor_of(shard_count);
  void *state = begun(count * sizeof *ids, 0);
  int is_fine = count == 0 || row_count == 0 ||
                (ids[0] >= 0 && (uint64_t)ids[count - 1] < row_count && ids[count - 1] >= 0);
  for (uint64_t i = 1; i < count; i++) is_fine &= ids[i] > ids[i - 1];
  if (is_fine && shard_count > 1)
    for (uint64_t i = 0; i < count; i++)
      is_fine &= shard_of((uint64_t)ids[i], row_count, &shards) == shard_index;
  over(state);
  return ended(&objects, is_fine ? 0 : REFUSED);
}

/* Sets the place of each id, by its number among the shard's: the mark there, of 4 or 8 bytes, less
   one. Returns how many have none. */
PUBLIC int64_t shardwell_find(void *ids_object, uint64_t shard_count, void *marks_object,
                              uint64_t mark_size, void *places_object) {
  struct objects objects = {.count = 0};
  uint64_t count, mark_count, place_count;
  const int64_t *ids = memory_of(&objects, ids_object, 8, 0, &count);
  if (ids == NULL) return ended(&objects, RAISED);
  const uint8_t *marks = memory_of(&objects, marks_object, mark_size, 0, &mark_count);
  if (marks == NULL) return ended(&objects, mark_size == 0 ? MISFIT : RAISED);
  int64_t *places = memory_of(&objects, places_object, 8, WRITABLE, &place_count);
  if (places == NULL) return ended(&objects, RAISED);
  if (shard_count == 0 || (mark_size != 4 && mark_size != 8) || place_count < count ||
      !is_aligned(ids, 8) || !is_aligned(places, 8) || !is_aligned(marks, mark_size))
    return ended(&objects, MISFIT);
  const struct divisor shards = divisor_of(shard_count);
  void *state = begun(count * sizeof *ids, 0);
  uint64_t last = 0;
  for (uint64_t i = 0; i < count; i++) {
    uint64_t row = quotient((uint64_t)ids[i], &shards);
    last = row > last ? row : last;
  }
  int is_fit = count == 0 || last < mark_count;
  int64_t missing = 0;
  for (uint64_t i = 0; is_fit && i < count; i++) {
    uint64_t row = quotient((uint64_t)ids[i], &shards);
    if (row >= mark_count) { /* another thread has changed the ids meanwhile */
      is_fit = 0;
      break;
    }
    __builtin_prefetch(marks + row * mark_size);
    places[i] = (int64_t)row;
  }
  for (uint64_t i = 0; is_fit && i < count; i++) {
    uint64_t row = (uint64_t)places[i];
    int64_t mark = mark_size == 4 ? ((const int32_t *)marks)[row] : ((const int64_t *)marks)[row];
    places[i] = mark - 1;
    missing += mark == 0;
  }
  over(state);
  return ended(&objects, is_fit ? missing : MISFIT);
}

/* Ids of a call. */

struct numbered {
  uint64_t key, place;
};

/* Sorts by key, equal ones staying in their order; `other` has as much room. Returns which. */
static struct numbered *sorted(struct numbered *from, struct numbered *other, uint64_t count,
                               uint64_t largest) {
  enum { DIGIT_MAX = 11 };
  const int digit = count < 1024 ? 8 : DIGIT_MAX;
  uint64_t ends[1 << DIGIT_MAX];
  for (int shift = 0; shift < 64 && largest >> shift != 0; shift += digit) {
    const uint64_t mask = ((uint64_t)1 << digit) - 1;
    memset(ends, 0, ((size_t)mask + 1) * sizeof ends[0]);
    for (uint64_t i = 0; i < count; i++) ends[from[i].key >> shift & mask]++;
    uint64_t sum = 0;
    for (uint64_t i = 0; i <= mask; i++) {
      uint64_t here = ends[i];
      ends[i] = sum;
      sum += here;
    }
    for (uint64_t i = 0; i < count; i++) other[ends[from[i].key >> shift & mask]++] = from[i];
    struct numbered *swapped = from;
    from = other, other = swapped;
  }
  return from;
}

/* Puts ids in the order in which they travel: each once, shard by shard, ascending.

   `numbers` has room for, one after another: shard_count + 1 bounds; n distinct ids; n + 1 starts;
   n places; n of the inverse; and 4 n to work with. Returns twice the number of distinct ids, and
   one more where the caller's order is that one. */
PUBLIC int64_t shardwell_sort_ids(void *ids_object, uint64_t row_count, uint64_t shard_count,
                                  void *numbers_object) {
  struct objects objects = {.count = 0};
  uint64_t count, room;
  const int64_t *ids = memory_of(&objects, ids_object, 8, 0, &count);
  if (ids == NULL) return ended(&objects, RAISED);
  int64_t *bounds = memory_of(&objects, numbers_object, 8, WRITABLE, &room);
  if (bounds == NULL) return ended(&objects, RAISED);
  if (shard_count == 0 || shard_count > UINT32_MAX || count > UINT32_MAX || !is_aligned(ids, 8) ||
      !is_aligned(bounds, 8) || room < 8 * count + shard_count + 2)
    return ended(&objects, MISFIT);
  void *state = begun(count * 8, 0);
  int64_t *distinct = bounds + shard_count + 1, *starts = distinct + count;
  int64_t *places = starts + count + 1, *inverse = places + count;
  struct numbered *from = (struct numbered *)(inverse + count);
  const struct divisor shards = divisor_of(shard_count);
  int64_t low = INT64_MAX, high = INT64_MIN;
  int ascends = 1;
  for (uint64_t i = 0; i < count; i++) {
    low = ids[i] < low ? ids[i] : low;
    high = ids[i] > high ? ids[i] : high;
    ascends &= i == 0 || ids[i] >= ids[i - 1];
  }
  for (uint64_t i = 0; i < count; i++)
    from[i] = (struct numbered){(uint64_t)ids[i] - (uint64_t)low, i};
  const struct numbered *order =
    ascends ? from : sorted(from, from + count, count, (uint64_t)high - (uint64_t)low);
  memset(bounds, 0, (shard_count + 1) * sizeof *bounds);
  /* First the distinct ids by id: their numbers here, where they begin, and how many a shard has. */
  uint64_t distinct_count = 0;
  for (uint64_t i = 0; i < count; i++) {
    if (i > 0 && order[i].key == order[i - 1].key) continue;
    uint64_t shard = shard_of(order[i].key + (uint64_t)low, row_count, &shards);
    bounds[shard + 1]++;
    inverse[distinct_count] = (int64_t)i;
    places[distinct_count++] = (int64_t)shard;
  }
  for (uint64_t shard = 0; shard < shard_count; shard++) bounds[shard + 1] += bounds[shard];
  /* Then in the order of shards: where each begins in that by id, bounds being where the next goes. */
  for (uint64_t i = 0; i < distinct_count; i++) starts[bounds[places[i]]++] = inverse[i];
  for (uint64_t shard = shard_count; shard > 0; shard--) bounds[shard] = bounds[shard - 1];
  bounds[0] = 0;
  uint64_t at = 0;
  int is_plain = distinct_count == count;
  for (uint64_t number = 0; number < distinct_count; number++) {
    uint64_t first = (uint64_t)starts[number];
    uint64_t key = order[first].key;
    distinct[number] = (int64_t)(key + (uint64_t)low);
    starts[number] = (int64_t)at;
    for (uint64_t i = first; i < count && order[i].key == key; i++) {
      uint64_t place = order[i].place;
      is_plain &= place == at;
      places[at++] = (int64_t)place;
      inverse[place] = (int64_t)number;
    }
  }
  starts[distinct_count] = (int64_t)at;
  over(state);
  return ended(&objects, (int64_t)(distinct_count << 1 | (uint64_t)is_plain));
}

/* Rows. */

/* Copies the rows of an array that are at `places` to the beginning of `into`; where a place is -1,
   nothing. Returns 0. With `may_wait`
   the array may have to come from a disk. */
PUBLIC int64_t shardwell_gather(void *array_object, uint64_t stride, void *places_object,
                                void *into_object, uint64_t may_wait) {
  struct objects objects = {.count = 0};
  uint64_t row_count, count, size;
  const uint8_t *array = memory_of(&objects, array_object, stride, 0, &row_count);
  if (array == NULL) return ended(&objects, stride == 0 ? MISFIT : RAISED);
  const int64_t *places = memory_of(&objects, places_object, 8, 0, &count);
  if (places == NULL) return ended(&objects, RAISED);
  uint8_t *into = memory_of(&objects, into_object, 1, WRITABLE, &size);
  if (into == NULL) return ended(&objects, RAISED);
  run_block *run = shardwell_chosen();
  if (run == NULL || !fits(count, stride, size) || !is_aligned(places, 8) ||
      !are_below(places, count, row_count, -1))
    return ended(&objects, MISFIT);
  void *state = begun(count * stride, may_wait != 0);
  const int is_number = stride == 8 && is_aligned(array, 8) && is_aligned(into, 8);
  for (uint64_t i = 0; is_number && i < count; i++)
    if (places[i] >= 0) ((uint64_t *)into)[i] = ((const uint64_t *)array)[places[i]];
  for (uint64_t i = 0; !is_number && i < count; i++) {
    if (i + AHEAD < count && places[i + AHEAD] >= 0)
      ask_for(array + (uint64_t)places[i + AHEAD] * stride, stride);
    if (places[i] < 0) continue;
    memcpy(into + i * stride, array + (uint64_t)places[i] * stride, stride);
  }
  over(state);
  return ended(&objects, 0);
}

/* Copies rows to `places` of an array; places are distinct. With `swaps`, the rows are then what was
   there. Returns 0. */
PUBLIC int64_t shardwell_scatter(void *array_object, uint64_t stride, void *places_object,
                                 void *rows_object, uint64_t swaps) {
  struct objects objects = {.count = 0};
  uint64_t row_count, count, size;
  uint8_t *array = memory_of(&objects, array_object, stride, WRITABLE, &row_count);
  if (array == NULL) return ended(&objects, stride == 0 ? MISFIT : RAISED);
  const int64_t *places = memory_of(&objects, places_object, 8, 0, &count);
  if (places == NULL) return ended(&objects, RAISED);
  uint8_t *rows = memory_of(&objects, rows_object, 1, swaps ? WRITABLE : 0, &size);
  if (rows == NULL) return ended(&objects, RAISED);
  if (!fits(count, stride, size) || !is_aligned(places, 8) || !are_below(places, count, row_count, 0))
    return ended(&objects, MISFIT);
  void *state = begun(count * stride, 0);
  for (uint64_t i = 0; i < count; i++) {
    if (i + AHEAD < count) ask_to_write(array + (uint64_t)places[i + AHEAD] * stride, stride);
    uint8_t *there = array + (uint64_t)places[i] * stride, *here = rows + i * stride;
    if (!swaps) {
      memcpy(there, here, stride);
      continue;
    }
    uint8_t before[256];
    for (uint64_t at = 0; at < stride; at += sizeof before) {
      uint64_t part = stride - at < sizeof before ? stride - at : sizeof before;
      memcpy(before, there + at, part);
      memcpy(there + at, here + at, part);
      memcpy(here + at, before, part);
    }
  }
  over(state);
  return ended(&objects, 0);
}

/* Whether operations are elementwise, on weights, gradients, a temporary and slots, as the places of
   update_rules.py: 0 to 3 or, without slots, 2. */
static int are_elementwise(const struct operation *operations, uint64_t count, uint8_t last) {
  for (uint64_t i = 0; i < count; i++) {
    const struct operation *each = &operations[i];
    if (each->code < COPY || each->code > CLIP || each->to > last || each->from > last ||
        each->by > last)
      return 0;
  }
  return 1;
}

/* Runs operations on the rows at `places` of weights and, with `has_slots`, of slots, and on
   gradients, which are overwritten; the rows before it go to `saved`. Places are distinct. Returns 0. */
PUBLIC int64_t shardwell_update(const void *packed, uint64_t operation_count, void *gradients_object,
                                void *places_object, uint64_t dim, void *weights_object,
                                void *saved_weights_object, uint64_t has_slots, void *slots_object,
                                void *saved_slots_object) {
  enum { WEIGHTS, GRADIENTS, TEMPORARY, SLOTS, PLACE_COUNT, OPERATION_COUNT = 32 };
  struct objects objects = {.count = 0};
  struct operation operations[OPERATION_COUNT];
  float weights_block[BLOCK], slots_block[BLOCK], temporary[BLOCK];
  uint64_t count, gradient_size, sizes[2], saved_sizes[2];
  float *gradients = memory_of(&objects, gradients_object, 4, WRITABLE, &gradient_size);
  if (gradients == NULL) return ended(&objects, RAISED);
  const int64_t *places = memory_of(&objects, places_object, 8, 0, &count);
  if (places == NULL) return ended(&objects, RAISED);
  void *array_objects[2] = {weights_object, slots_object};
  void *saved_objects[2] = {saved_weights_object, saved_slots_object};
  float *arrays[2], *saved[2], *blocks[2] = {weights_block, slots_block};
  const int array_count = has_slots ? 2 : 1;
  int fit = 1;
  for (int i = 0; i < array_count; i++) {
    arrays[i] = memory_of(&objects, array_objects[i], 4, WRITABLE, &sizes[i]);
    if (arrays[i] == NULL) return ended(&objects, RAISED);
    saved[i] = memory_of(&objects, saved_objects[i], 4, WRITABLE, &saved_sizes[i]);
    if (saved[i] == NULL) return ended(&objects, RAISED);
    fit &= is_aligned(arrays[i], 4) && is_aligned(saved[i], 4) && fits(count, dim, saved_sizes[i]) &&
           dim != 0 && are_below(places, count, sizes[i] / dim, 0);
  }
  run_block *run = shardwell_chosen();
  if (run == NULL || operation_count > OPERATION_COUNT || dim > UINT32_MAX || !fit ||
      !fits(count, dim, gradient_size) || !is_aligned(places, 8) || !is_aligned(gradients, 4))
    return ended(&objects, MISFIT);
  memcpy(operations, packed, operation_count * sizeof operations[0]);
  if (!are_elementwise(operations, operation_count, has_slots ? SLOTS : TEMPORARY))
    return ended(&objects, MISFIT);
  void *state = begun(count * dim * sizeof(float), 0);
  /* Some rows at a time, or a part of a row. */
  const uint64_t together = dim < BLOCK ? BLOCK / dim : 1, width = dim < BLOCK ? dim : BLOCK;
  for (uint64_t row = 0; row < count; row += together) {
    const uint64_t rows = count - row < together ? count - row : together;
    for (uint64_t column = 0; column < dim; column += width) {
      const uint64_t part = dim - column < width ? dim - column : width;
      for (int i = 0; i < array_count; i++)
        for (uint64_t r = 0; r < rows; r++) {
          if (row + r + AHEAD < count)
            ask_to_write((const uint8_t *)(arrays[i] + (uint64_t)places[row + r + AHEAD] * dim), 4 * part);
          const float *from = arrays[i] + (uint64_t)places[row + r] * dim + column;
          memcpy(blocks[i] + r * part, from, part * sizeof *from);
          memcpy(saved[i] + (row + r) * dim + column, from, part * sizeof *from);
        }
      float *at[PLACE_COUNT] = {weights_block, gradients + row * dim + column, temporary, slots_block};
      for (uint64_t i = 0; i < operation_count; i++) {
        const struct operation *each = &operations[i];
        run(each, at[each->to], at[each->from], at[each->by], rows * part);
      }
      for (int i = 0; i < array_count; i++)
        for (uint64_t r = 0; r < rows; r++)
          memcpy(arrays[i] + (uint64_t)places[row + r] * dim + column, blocks[i] + r * part,
                 part * sizeof(float));
    }
  }
  over(state);
  return ended(&objects, 0);
}

/* Whether starts [first, stop] of groups of places do not descend and end within `count`. */
static int are_starts(const int64_t *starts, uint64_t first, uint64_t stop, uint64_t count) {
  if (starts[first] < 0 || starts[stop] < 0 || (uint64_t)starts[stop] > count) return 0;
  int ascend = 1;
  for (uint64_t i = first; i < stop; i++) ascend &= starts[i] < starts[i + 1];
  return ascend;
}

#define ITEM_SIZE(NAME, NAME_IN_C, SIZE) [READ_##NAME] = SIZE,
static const uint8_t ITEM_SIZES[CODE_COUNT] = {FORMATS(ITEM_SIZE)};

/* Reads the rows of a payload, rows [first, stop) of a batch, into all of their places of `into`, and
   goes on with a CRC32C over it. `packed` is one operation that reads; a block of fp16 is a row. Returns
   the CRC. */
PUBLIC int64_t shardwell_spread(const void *packed, void *payload_object, uint64_t dim,
                                void *places_object, void *starts_object, uint64_t first,
                                uint64_t stop, void *into_object, uint32_t crc) {
  struct objects objects = {.count = 0};
  struct operation reads;
  uint64_t payload_size, count, start_count, size;
  memcpy(&reads, packed, sizeof reads);
  const uint8_t *payload = memory_of(&objects, payload_object, 1, 0, &payload_size);
  if (payload == NULL) return ended(&objects, RAISED);
  const int64_t *places = memory_of(&objects, places_object, 8, 0, &count);
  if (places == NULL) return ended(&objects, RAISED);
  const int64_t *starts = memory_of(&objects, starts_object, 8, 0, &start_count);
  if (starts == NULL) return ended(&objects, RAISED);
  float *into = memory_of(&objects, into_object, 4, WRITABLE, &size);
  if (into == NULL) return ended(&objects, RAISED);
  run_block *run = shardwell_chosen();
  run_crc *check = shardwell_chosen_crc();
  const uint64_t item = reads.code < CODE_COUNT ? ITEM_SIZES[reads.code] : 0;
  const uint64_t exponent = reads.code == READ_FP16; /* bytes of a row's */
  if (run == NULL || check == NULL || item == 0 || dim == 0 || dim > UINT32_MAX || first > stop ||
      stop >= start_count || payload_size % (item * dim + exponent) != 0 ||
      payload_size / (item * dim + exponent) != stop - first ||
      (exponent != 0 && reads.divisor != (double)dim) || !fits(count, dim, size) || !is_aligned(places, 8) ||
      !is_aligned(starts, 8) || !is_aligned(into, 4) || !is_aligned(payload, item) ||
      !are_starts(starts, first, stop, count))
    return ended(&objects, MISFIT);
  const uint64_t begin = (uint64_t)starts[first], end = (uint64_t)starts[stop];
  if (!are_below(places + begin, end - begin, size / dim, 0)) return ended(&objects, MISFIT);
  void *state = begun(payload_size, 0);
  const uint64_t row_bytes = item * dim;
  const uint64_t together = row_bytes < 4096 ? 4096 / row_bytes : 1;
  const int8_t *exponents = (const int8_t *)payload + (stop - first) * row_bytes;
  uint32_t inside = ~crc;
  for (uint64_t row = first; row < stop; row += together) {
    const uint64_t next = stop - row < together ? stop : row + together;
    const uint8_t *block = payload + (row - first) * row_bytes;
    inside = check(inside, block, (next - row) * row_bytes);
    for (uint64_t r = row; r < next; r++, block += row_bytes) {
      const int64_t *at = places + starts[r], *last = places + starts[r + 1];
      if ((uint64_t)starts[r] + AHEAD < end)
        ask_to_write((const uint8_t *)(into + (uint64_t)at[AHEAD] * dim), dim * sizeof *into);
      float *to = into + (uint64_t)*at * dim;
      const struct exponents its = {exponents + (r - first), NULL};
      run(&reads, to, block, &its, dim);
      while (++at < last) memcpy(into + (uint64_t)*at * dim, to, dim * sizeof *to);
    }
  }
  if (exponent != 0) inside = check(inside, (const uint8_t *)exponents, stop - first);
  over(state);
  return ended(&objects, (uint32_t)~inside);
}

/* A group's gradients added up in segments, and their sums again like that: see gradient_sums.py. */
struct sums {
  float *levels; /* LEVEL_COUNT rows */
  uint64_t dim;
  run_block *run;
  uint64_t counts[LEVEL_COUNT];
};

static void push(struct sums *sums, int level, const float *row) {
  const struct operation adds = {.code = ADD_SCALED, .factor = 1.0f};
  float *to = sums->levels + (uint64_t)level * sums->dim;
  if (sums->counts[level] == 0)
    memcpy(to, row, sums->dim * sizeof *to);
  else
    sums->run(&adds, to, row, NULL, sums->dim);
  if (++sums->counts[level] < SEGMENT) return;
  sums->counts[level] = 0;
  push(sums, level + 1, to);
}

static void add_group(struct sums *sums, const float *rows, const int64_t *places, uint64_t count,
                      float *into) {
  memset(sums->counts, 0, sizeof sums->counts);
  for (uint64_t i = 0; i < count; i++) push(sums, 0, rows + (uint64_t)places[i] * sums->dim);
  int level = 0;
  for (uint64_t left = count; left > 1; left = (left + SEGMENT - 1) / SEGMENT, level++)
    if (sums->counts[level] > 0) { /* the last segment, which is shorter */
      sums->counts[level] = 0;
      push(sums, level + 1, sums->levels + (uint64_t)level * sums->dim);
    }
  memcpy(into, sums->levels + (uint64_t)level * sums->dim, sums->dim * sizeof *into);
}

/* Adds up the rows of each group of places: (start_count - 1, dim) sums. `levels` is room for 12 rows.
   Returns the largest magnitude of sums of several, as bits. */
PUBLIC int64_t shardwell_add_up(void *rows_object, uint64_t dim, void *places_object,
                                void *starts_object, void *into_object, void *levels_object) {
  struct objects objects = {.count = 0};
  uint64_t size, count, start_count, into_size, level_size;
  const float *rows = memory_of(&objects, rows_object, 4, 0, &size);
  if (rows == NULL) return ended(&objects, RAISED);
  const int64_t *places = memory_of(&objects, places_object, 8, 0, &count);
  if (places == NULL) return ended(&objects, RAISED);
  const int64_t *starts = memory_of(&objects, starts_object, 8, 0, &start_count);
  if (starts == NULL) return ended(&objects, RAISED);
  float *into = memory_of(&objects, into_object, 4, WRITABLE, &into_size);
  if (into == NULL) return ended(&objects, RAISED);
  float *levels = memory_of(&objects, levels_object, 4, WRITABLE, &level_size);
  if (levels == NULL) return ended(&objects, RAISED);
  run_block *run = shardwell_chosen();
  if (run == NULL || dim == 0 || dim > UINT32_MAX || start_count == 0 || count > UINT32_MAX ||
      !fits(start_count - 1, dim, into_size) || !fits(LEVEL_COUNT, dim, level_size) ||
      !is_aligned(places, 8) || !is_aligned(starts, 8) || !is_aligned(rows, 4) ||
      !is_aligned(into, 4) || !is_aligned(levels, 4) || !are_starts(starts, 0, start_count - 1, count) ||
      !are_below(places, count, size / dim, 0))
    return ended(&objects, MISFIT);
  void *state = begun(count * dim * sizeof *rows, 0);
  struct sums sums = {.levels = levels, .dim = dim, .run = run};
  const uint64_t stride = dim * sizeof *rows, last = (uint64_t)starts[start_count - 1];
  uint32_t largest = 0;
  for (uint64_t group = 0; group + 1 < start_count; group++) {
    const uint64_t begin = (uint64_t)starts[group], end = (uint64_t)starts[group + 1];
    if (end + AHEAD < last)
      ask_for((const uint8_t *)rows + (uint64_t)places[end + AHEAD - 1] * stride, stride);
    float *to = into + group * dim;
    if (end - begin == 1) {
      memcpy(to, rows + (uint64_t)places[begin] * dim, stride);
      continue;
    }
    add_group(&sums, rows, places + begin, end - begin, to);
    for (uint64_t i = 0; i < dim; i += BLOCK)
      largest = larger(largest, look(run, to + i, dim - i < BLOCK ? dim - i : BLOCK));
  }
  over(state);
  return ended(&objects, largest);
}

/* Sets the sums of products of bytes [start, start + size) of each row, of `stride` bytes, with each
   column of factors: see row_checks.py. Sums are HASH_COLUMNS numbers of 4 bytes a row. */
PUBLIC int64_t shardwell_hash_rows(void *rows_object, uint64_t stride, uint64_t start, uint64_t size,
                                   void *factors_object, void *sums_object) {
  struct objects objects = {.count = 0};
  run_hash *hash = shardwell_chosen_hash();
  uint64_t byte_count, factor_count, sum_count;
  const uint8_t *rows = memory_of(&objects, rows_object, 1, 0, &byte_count);
  if (rows == NULL) return ended(&objects, RAISED);
  const int16_t *factors = memory_of(&objects, factors_object, 2, 0, &factor_count);
  if (factors == NULL) return ended(&objects, RAISED);
  uint32_t *sums = memory_of(&objects, sums_object, 4, WRITABLE, &sum_count);
  if (sums == NULL) return ended(&objects, RAISED);
  if (hash == NULL || stride == 0 || start > stride || size > stride - start ||
      byte_count % stride != 0 || sum_count / HASH_COLUMNS < byte_count / stride ||
      factor_count / HASH_COLUMNS < size || !is_aligned(factors, 2) || !is_aligned(sums, 4))
    return ended(&objects, MISFIT);
  void *state = begun(byte_count, 0);
  for (uint64_t i = 0; i < byte_count / stride; i++)
    hash(rows + i * stride + start, factors, size, sums + i * HASH_COLUMNS);
  over(state);
  return ended(&objects, 0);
}

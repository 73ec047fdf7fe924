/* Tensors that lie anywhere, as the one vector that they are: looked over, joined and parted.

   As in rows.c, every entry checks all that it is given before it touches anything. Tensors are a
   tuple of Python's, which no other thread can change, of NumPy's own arrays: `kind` is their type.
   What is not such an array of contiguous float32 is MISFIT, or an exception of NumPy's. */
#include <stdlib.h>
#include <string.h>

#include "objects.h"

enum { ADJACENT = 1, WRITABLE_ALL = 2, ALIGNED = 4 };

/* How many tensors there are; -1, and an exception of Python's: it is no tuple. */
static int64_t count_of(void *tensors) {
  return shardwell_python.count == NULL ? -1 : shardwell_python.count(tensors);
}

/* The memory of one, to be released if the result is 0. */
static int64_t tensor_at(void *tensors, int64_t index, void *kind, int flags,
                         python_buffer *buffer) {
  void *tensor = shardwell_python.item(tensors, index);
  if (tensor == NULL) return RAISED;
  void *type = shardwell_python.type(tensor);
  if (type == NULL) return RAISED;
  shardwell_python.drop(type); /* which the tensor keeps */
  if (type != kind) return MISFIT;
  if (shardwell_python.get(tensor, buffer, CONTIGUOUS | FORMAT | flags) != 0) return RAISED;
  if (is_float(buffer)) return 0;
  shardwell_python.release(buffer);
  return MISFIT;
}

/* Whether a tensor has the next shape: its number of dimensions, and they. */
static int has_shape(const python_buffer *buffer, const int64_t **shapes, const int64_t *end) {
  if (*shapes == end || **shapes != buffer->dimension_count) return 0;
  const int64_t *shape = *shapes + 1;
  if (end - shape < buffer->dimension_count) return 0;
  for (int i = 0; i < buffer->dimension_count; i++)
    if (shape[i] != buffer->shape[i]) return 0;
  *shapes = shape + buffer->dimension_count;
  return 1;
}

/* Whether all tensors have their shapes, and how they lie: ADJACENT, which is one behind the other,
   WRITABLE_ALL, ALIGNED. Sets the address of each. */
PUBLIC int64_t shardwell_look_over(void *tensors, void *kind, void *shapes_object,
                                   void *addresses_object) {
  struct objects objects = {.count = 0};
  uint64_t number_count, room, offset = 0, begin = 0;
  const int64_t *shapes = memory_of(&objects, shapes_object, 8, 0, &number_count);
  if (shapes == NULL) return ended(&objects, RAISED);
  int64_t *addresses = memory_of(&objects, addresses_object, 8, WRITABLE, &room);
  if (addresses == NULL) return ended(&objects, RAISED);
  const int64_t count = count_of(tensors);
  if (count < 0) return ended(&objects, RAISED);
  if (room < (uint64_t)count || !is_aligned(shapes, 8) || !is_aligned(addresses, 8))
    return ended(&objects, MISFIT);
  const int64_t *end = shapes + number_count;
  int64_t found = ADJACENT | WRITABLE_ALL | ALIGNED;
  for (int64_t i = 0; i < count; i++) {
    python_buffer buffer;
    const int64_t result = tensor_at(tensors, i, kind, 0, &buffer);
    if (result != 0) return ended(&objects, result);
    const int is_fit = has_shape(&buffer, &shapes, end);
    const uint64_t address = (uint64_t)(uintptr_t)buffer.memory, size = (uint64_t)buffer.size;
    if (buffer.is_read_only) found &= ~WRITABLE_ALL;
    if (!is_aligned(buffer.memory, sizeof(float))) found &= ~ALIGNED;
    shardwell_python.release(&buffer);
    if (!is_fit) return ended(&objects, MISFIT);
    addresses[i] = (int64_t)address;
    if (size == 0) continue; /* which lies anywhere */
    if (offset == 0) begin = address;
    if (address - offset != begin) found &= ~ADJACENT;
    offset += size;
  }
  return ended(&objects, shapes == end ? found : MISFIT);
}

/* Whether stops of tensors do not descend from 0 on. */
static int are_stops(const int64_t *stops, uint64_t count) {
  int64_t last = 0;
  for (uint64_t i = 0; i < count; last = stops[i++])
    if (stops[i] < last) return 0;
  return 1;
}

/* Copies elements [start, stop) of the vector that tensors are: to `values`, or, with `parts`, from
   them. Tensor i ends before stops[i]. Returns 0. */
PUBLIC int64_t shardwell_move(void *tensors, void *kind, void *stops_object, uint64_t start,
                              uint64_t stop, void *values_object, uint64_t parts) {
  struct objects objects = {.count = 0};
  uint64_t stop_count, value_count;
  const int64_t *stops = memory_of(&objects, stops_object, 8, 0, &stop_count);
  if (stops == NULL) return ended(&objects, RAISED);
  float *values = memory_of(&objects, values_object, sizeof *values, parts ? 0 : WRITABLE, &value_count);
  if (values == NULL) return ended(&objects, RAISED);
  const int64_t count = count_of(tensors);
  if (count < 0) return ended(&objects, RAISED);
  if ((uint64_t)count != stop_count || count == 0 || !is_aligned(stops, 8) ||
      !are_stops(stops, stop_count) || start > stop || stop > (uint64_t)stops[count - 1] ||
      value_count != stop - start)
    return ended(&objects, MISFIT);
  int64_t first = 0, last; /* those that have some of it */
  while (first < count && (uint64_t)stops[first] <= start) first++;
  for (last = first; last < count && (last == 0 || (uint64_t)stops[last - 1] < stop);) last++;
  const int64_t held_max = last - first;
  python_buffer *held = malloc((size_t)(held_max + 1) * sizeof *held);
  if (held == NULL) return ended(&objects, MISFIT);
  int64_t result = 0, held_count = 0;
  while (result == 0 && held_count < held_max) {
    const int64_t i = first + held_count;
    python_buffer *buffer = &held[held_count];
    result = tensor_at(tensors, i, kind, parts ? WRITABLE : 0, buffer);
    if (result != 0) break;
    held_count++;
    const int64_t size = stops[i] - (i > 0 ? stops[i - 1] : 0);
    if (buffer->size / (int64_t)sizeof(float) != size) result = MISFIT;
  }
  if (result == 0) {
    void *state = begun(value_count * sizeof *values, 0);
    float *at = values;
    for (int64_t i = first; i < last; i++) {
      const uint64_t before = i > 0 ? (uint64_t)stops[i - 1] : 0, end = (uint64_t)stops[i];
      const uint64_t from = before > start ? before : start, to = end < stop ? end : stop;
      char *tensor = (char *)held[i - first].memory + (from - before) * sizeof *values;
      const size_t bytes = (size_t)(to - from) * sizeof *values;
      memmove(parts ? tensor : (char *)at, parts ? (char *)at : tensor, bytes);
      at += to - from;
    }
    over(state);
  }
  while (held_count > 0) shardwell_python.release(&held[--held_count]);
  free(held);
  return ended(&objects, result);
}

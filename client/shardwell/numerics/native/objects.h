/* Python's objects and their memory: an entry takes the size of an argument from the
   object that owns the memory.

   Without Python.h: these are functions of Python's stable interface, and shardwell_attach says where
   they are. Callers hold the GIL; it is let go of for what takes long, while the objects'
   memory is held. */
#ifndef SHARDWELL_OBJECTS_H
#define SHARDWELL_OBJECTS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define PUBLIC __attribute__((visibility("default")))

enum { MISFIT = -1, RAISED = -2, REFUSED = -3 }; /* RAISED: by Python */
enum { WRITABLE = 1, FORMAT = 4, CONTIGUOUS = 0x38 }; /* PyBUF_...; 0 is PyBUF_SIMPLE: contiguous bytes */
enum { HELD_BYTES = 32 * 1024 }; /* Up to here it is over before the GIL could be taken back */

/* As in the stable interface of Python 3.11 and later. */
typedef struct {
  void *memory, *object;
  int64_t size, item_size;
  int is_read_only, dimension_count;
  char *format;
  int64_t *shape, *strides, *suboffsets;
  void *internal;
} python_buffer;

struct python {
  int (*get)(void *object, python_buffer *buffer, int flags);
  void (*release)(python_buffer *buffer);
  void *(*let_go)(void);
  void (*take_back)(void *state);
  int64_t (*count)(void *tuple);
  void *(*item)(void *tuple, int64_t index); /* borrowed */
  void *(*type)(void *object);
  void (*drop)(void *object);
  const void *none;
};

extern struct python shardwell_python; /* The same whichever thread sets it. */

/* The memory of a call's objects. */
struct objects {
  python_buffer buffers[9];
  int count;
};

/* The memory of one more, in elements of `size` bytes; NULL: it has none that can be used so. */
static inline void *memory_of(struct objects *objects, void *object, uint64_t size, int flags,
                              uint64_t *count) {
  python_buffer *buffer = &objects->buffers[objects->count];
  if (size == 0 || shardwell_python.get == NULL || shardwell_python.get(object, buffer, flags) != 0)
    return NULL;
  objects->count++;
  *count = (uint64_t)buffer->size / size;
  return buffer->memory;
}

static inline int64_t ended(struct objects *objects, int64_t result) {
  while (objects->count > 0) shardwell_python.release(&objects->buffers[--objects->count]);
  return result;
}

/* The items of a tuple, borrowed, and NULL for None and beyond its end; 0: it is none, or has more. */
int items_of(void *tuple, void *items[], int64_t most);

/* Whether a buffer is of float32 in this machine's order of bytes; NumPy has several words for it. */
static inline int is_float(const python_buffer *buffer) {
  const int is_little = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__;
  const char *format = buffer->format;
  if (format == NULL || buffer->item_size != sizeof(float)) return 0;
  if (*format == '@' || *format == '=' || *format == (is_little ? '<' : '>')) format++;
  return strcmp(format, "f") == 0;
}

static inline int is_aligned(const void *memory, uint64_t size) {
  return (uintptr_t)memory % size == 0;
}

/* Lets go of the GIL where so many bytes take long, or may have to come from a disk. */
static inline void *begun(uint64_t bytes, int may_wait) {
  return bytes > HELD_BYTES || may_wait ? shardwell_python.let_go() : NULL;
}

static inline void over(void *state) {
  if (state != NULL) shardwell_python.take_back(state);
}

#endif

/* Python's objects as memory: what an entry is given has its size from whoever has the memory. */
#ifndef SHARDWELL_OBJECTS_H
#define SHARDWELL_OBJECTS_H

#include <stdint.h>

#define PUBLIC __attribute__((visibility("default")))

enum { MISFIT = -1, RAISED = -2, REFUSED = -3 }; /* RAISED: by Python */
enum { WRITABLE = 1, TYPED = 12 }; /* PyBUF_WRITABLE; PyBUF_ND and PyBUF_FORMAT. Always contiguous */

/* As in the stable interface of Python 3.11 and later. */
typedef struct {
  void *memory, *object;
  int64_t size, item_size;
  int is_read_only, dimension_count;
  char *format;
  int64_t *shape, *strides, *suboffsets;
  void *internal;
} python_buffer;

/* The memory of a call's objects. */
struct objects {
  python_buffer buffers[8];
  int count;
};

/* The memory of one more, in elements of `size` bytes; NULL: it has none that can be used so. */
void *memory_of(struct objects *objects, void *object, uint64_t size, int flags,
                          uint64_t *count);

/* Gives all of it back; `result`. */
int64_t ended(struct objects *objects, int64_t result);

/* The items of a tuple, borrowed, NULL for None; 0: it is none, or has more than `most`. */
int items_of(void *tuple, void *items[], int64_t most);

/* Lets go of the GIL, and takes it back. */
void *let_go(void);
void take_back(void *state);

#endif

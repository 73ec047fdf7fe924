/* See objects.h. Python itself is not linked: whoever loads the library attaches what it uses of it. */
#include <stddef.h>
#include <string.h>

#include "objects.h"

static struct {
  int (*get)(void *object, python_buffer *buffer, int flags);
  void (*release)(python_buffer *buffer);
  void *(*let_go)(void);
  void (*take_back)(void *state);
  int64_t (*size)(void *tuple);
  void *(*item)(void *tuple, int64_t index);
  const void *none;
} PYTHON; /* The same whoever sets it. */

/* To be called first, with PyObject_GetBuffer, PyBuffer_Release, PyEval_SaveThread, PyEval_RestoreThread,
   PyTuple_Size and PyTuple_GetItem, and None. */
PUBLIC void shardwell_attach(void *get, void *release, void *let_go, void *take_back, void *size,
                             void *item, const void *none) {
  memcpy(&PYTHON.get, &get, sizeof get);
  memcpy(&PYTHON.release, &release, sizeof release);
  memcpy(&PYTHON.let_go, &let_go, sizeof let_go);
  memcpy(&PYTHON.take_back, &take_back, sizeof take_back);
  memcpy(&PYTHON.size, &size, sizeof size);
  memcpy(&PYTHON.item, &item, sizeof item);
  PYTHON.none = none;
}

void *memory_of(struct objects *objects, void *object, uint64_t size, int flags,
                          uint64_t *count) {
  python_buffer *buffer = &objects->buffers[objects->count];
  if (size == 0 || PYTHON.get == NULL || PYTHON.get(object, buffer, flags) != 0) return NULL;
  objects->count++;
  *count = (uint64_t)buffer->size / size;
  return buffer->memory;
}

int64_t ended(struct objects *objects, int64_t result) {
  while (objects->count > 0) PYTHON.release(&objects->buffers[--objects->count]);
  return result;
}

int items_of(void *tuple, void *items[], int64_t most) {
  if (PYTHON.size == NULL) return 0;
  const int64_t count = PYTHON.size(tuple);
  if (count < 0 || count > most) return 0;
  for (int64_t i = 0; i < most; i++) {
    items[i] = i < count ? PYTHON.item(tuple, i) : NULL;
    if (items[i] == PYTHON.none) items[i] = NULL;
  }
  return 1;
}

void *let_go(void) { return PYTHON.let_go(); }

void take_back(void *state) { PYTHON.take_back(state); }

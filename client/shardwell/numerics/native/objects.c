/* See objects.h. */
#include "objects.h"

struct python shardwell_python;

/* To be called first, with functions of Python's, and None: see native/__init__.py. */
PUBLIC void shardwell_attach(void *get, void *release, void *let_go, void *take_back, void *count,
                             void *item, void *type, void *drop, const void *none) {
  struct python *python = &shardwell_python;
  memcpy(&python->get, &get, sizeof get);
  memcpy(&python->release, &release, sizeof release);
  memcpy(&python->let_go, &let_go, sizeof let_go);
  memcpy(&python->take_back, &take_back, sizeof take_back);
  memcpy(&python->count, &count, sizeof count);
  memcpy(&python->item, &item, sizeof item);
  memcpy(&python->type, &type, sizeof type);
  memcpy(&python->drop, &drop, sizeof drop);
  python->none = none;
}

int items_of(void *tuple, void *items[], int64_t most) {
  const struct python *python = &shardwell_python;
  const int64_t count = python->count == NULL ? -1 : python->count(tuple);
  if (count < 0 || count > most) return 0;
  for (int64_t i = 0; i < most; i++) {
    items[i] = i < count ? python->item(tuple, i) : NULL;
    if (items[i] == python->none) items[i] = NULL;
  }
  return 1;
}

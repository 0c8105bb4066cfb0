// Lets the allocations of one library fail. Preloaded before the C library.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <string.h>

// From where on allocations fail: -1, never; else after so many more.
int failing_after = -1;
int failed = 0;

static int fails(const void* caller) {
  Dl_info info;
  if (failing_after < 0 || !dladdr(caller, &info) || !info.dli_fname) return 0;
  if (!strstr(info.dli_fname, "libflashxla_cpu.so")) return 0;
  if (failing_after-- > 0) return 0;
  failing_after = 0;
  ++failed;
  return 1;
}

void* malloc(size_t size) {
  static void* (*next)(size_t);
  if (!next) next = (void* (*)(size_t))dlsym(RTLD_NEXT, "malloc");
  return fails(__builtin_return_address(0)) ? NULL : next(size);
}

void* aligned_alloc(size_t alignment, size_t size) {
  static void* (*next)(size_t, size_t);
  if (!next) next = (void* (*)(size_t, size_t))dlsym(RTLD_NEXT, "aligned_alloc");
  return fails(__builtin_return_address(0)) ? NULL : next(alignment, size);
}

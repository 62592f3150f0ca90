// What this library was built from, see kernels/native.py.

#include "vector.h"

HEADRACE_API const char *headrace_sources() { return HEADRACE_SOURCES; }

#include <prometheus/registry.h>

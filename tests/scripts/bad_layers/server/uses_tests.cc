#include "tests/reference.h"

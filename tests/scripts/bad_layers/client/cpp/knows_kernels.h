#include <vector>
#  include "kernels/backend.h"

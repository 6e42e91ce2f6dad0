// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/row_loops.h"

#define LOSSD_ROW_LOOPS kRowLoopsAvx512
#define LOSSD_INSTRUCTION_SET "avx512"
#include "kernels/cpu/row_loops_body.inc"

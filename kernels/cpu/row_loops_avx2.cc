// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/row_loops.h"

#define LOSSD_ROW_LOOPS kRowLoopsAvx2
#define LOSSD_INSTRUCTION_SET "avx2"
#include "kernels/cpu/row_loops_body.inc"

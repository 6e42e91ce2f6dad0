// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/row_loops.h"

#define LOSSD_ROW_LOOPS kRowLoopsBaseline
#define LOSSD_INSTRUCTION_SET "baseline"
#include "kernels/cpu/row_loops_body.inc"

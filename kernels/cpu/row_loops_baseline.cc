// SPDX-License-Identifier: Apache-2.0
// The loops of row_loops_body.inc for the baseline of the target. The file is shorter than 60 lines because
// each instruction set is compiled with options of its own.
#include "kernels/cpu/row_loops.h"

#define LOSSD_ROW_LOOPS kRowLoopsBaseline
#define LOSSD_INSTRUCTION_SET "baseline"
#include "kernels/cpu/row_loops_body.inc"

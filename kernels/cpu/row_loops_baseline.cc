// SPDX-License-Identifier: Apache-2.0
// The loops of row_loops_body.inc for the baseline of the target. The code is in that file; this one only
// exists because the build compiles each instruction set with compiler options of its own. So it is
// shorter than 60 lines, for which scripts/check-sizes asks a reason.
#include "kernels/cpu/row_loops.h"

#define LOSSD_ROW_LOOPS kRowLoopsBaseline
#define LOSSD_INSTRUCTION_SET "baseline"
#include "kernels/cpu/row_loops_body.inc"

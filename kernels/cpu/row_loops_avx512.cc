// SPDX-License-Identifier: Apache-2.0
// The loops of row_loops_body.inc for AVX-512. The file is shorter than 60 lines because each instruction set
// is compiled with options of its own.
#include "kernels/cpu/row_loops.h"

#define LOSSD_ROW_LOOPS kRowLoopsAvx512
#define LOSSD_INSTRUCTION_SET "avx512"
#include "kernels/cpu/row_loops_body.inc"

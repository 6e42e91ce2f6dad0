// SPDX-License-Identifier: Apache-2.0
#include "server/app/process.h"

#include <signal.h>

#include "kernels/nccl_environment.h"
#include "server/app/heap.h"

namespace lossd::app {

void PrepareProcess() {
  BoundFreedMemory();
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);  // a file that may not grow is an error of the write, not the end of the server
  kernels::SetNcclDefaults();
}

}  // namespace lossd::app

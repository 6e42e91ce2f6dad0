// SPDX-License-Identifier: Apache-2.0
#include "server/app/process.h"

#include <signal.h>
#include <sys/resource.h>

#include <algorithm>

#include "kernels/nccl_environment.h"
#include "server/app/heap.h"

namespace lossd::app {

namespace {

// As many descriptors as the system lets the process have, up to what all connections together may take:
// 1,024, which shells and service managers give, is what the largest of their limits take alone.
void RaiseDescriptorLimit() {
  constexpr rlim_t kEnough = 65'536;
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= kEnough) return;
  limit.rlim_cur = std::min(kEnough, limit.rlim_max);
  setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace

void PrepareProcess() {
  RaiseDescriptorLimit();
  BoundFreedMemory();
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);  // a file that may not grow is an error of the write, not the end of the server
  kernels::SetNcclDefaults();
}

}  // namespace lossd::app

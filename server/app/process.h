// SPDX-License-Identifier: Apache-2.0
// What holds for the whole process of a server, whatever its flags.
#ifndef LOSSD_SERVER_APP_PROCESS_H_
#define LOSSD_SERVER_APP_PROCESS_H_

namespace lossd::app {

// Bounds freed memory (heap.h), has writes to what is closed or full fail instead of ending the process, and
// sets what NCCL reads from the environment (kernels/nccl_environment.h). To be called first, before there
// are other threads.
void PrepareProcess();

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_PROCESS_H_

// SPDX-License-Identifier: Apache-2.0
// fault_process: what tests of faults start to kill it.
#ifndef LOSSD_TESTS_FAULTS_FAULT_PROCESS_H_
#define LOSSD_TESTS_FAULTS_FAULT_PROCESS_H_

#include <string>

#include "absl/flags/declare.h"
#include "absl/status/status.h"

ABSL_DECLARE_FLAG(std::string, server);

namespace lossd::test {

absl::Status RunClients();  // client_process.cc
absl::Status RunTrainer();  // trainer_process.cc

}  // namespace lossd::test

#endif  // LOSSD_TESTS_FAULTS_FAULT_PROCESS_H_

// SPDX-License-Identifier: Apache-2.0
//   fault_process client|trainer [FLAG...]
//
// Exit status: 0 when it has done what its flags say, 1 after an error.
#include "tests/faults/fault_process.h"

#include <iostream>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"

ABSL_FLAG(std::string, server, "", "host:port");

int main(int argc, char** argv) {
  const std::vector<char*> arguments = absl::ParseCommandLine(argc, argv);
  const std::string kind = arguments.size() == 2 ? arguments[1] : "";
  if (kind != "client" && kind != "trainer") {
    std::cerr << "usage: fault_process client|trainer [FLAG...]\n";
    return 1;
  }
  const absl::Status status = kind == "client" ? lossd::test::RunClients() : lossd::test::RunTrainer();
  if (!status.ok()) std::cerr << "fault_process " << kind << ": " << status << "\n";
  return status.ok() ? 0 : 1;
}

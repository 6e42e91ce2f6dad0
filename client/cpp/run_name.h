// SPDX-License-Identifier: Apache-2.0
// Names that a client makes: of the program that trains, and of calls that a server does once.
//
// Functions are stateless and thread-safe. client/python/src/lossd/_run.py does the same for runs.
#ifndef LOSSD_CLIENT_CPP_RUN_NAME_H_
#define LOSSD_CLIENT_CPP_RUN_NAME_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace lossd::client::internal {

// INVALID_ARGUMENT naming options.run unless it has at most 128 printable characters.
absl::Status CheckRunName(absl::string_view run);

// So many random hexadecimal digits of the system's, a multiple of 8.
std::string RandomDigits(int digits);

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_RUN_NAME_H_

// SPDX-License-Identifier: Apache-2.0
// The lines of a file of tokens or roles: without the comments (#) and the empty ones.
//
// Stateless and thread-safe.
#ifndef LOSSD_SERVER_ACCESS_ACCESS_LINES_H_
#define LOSSD_SERVER_ACCESS_ACCESS_LINES_H_

#include <cstddef>
#include <vector>

#include "absl/strings/string_view.h"

namespace lossd::access {

struct AccessLine {
  size_t number = 0;       // from 1
  absl::string_view text;  // without spaces around it; of the text that was passed
};

std::vector<AccessLine> AccessLines(absl::string_view text);

}  // namespace lossd::access

#endif  // LOSSD_SERVER_ACCESS_ACCESS_LINES_H_

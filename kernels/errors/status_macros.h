// SPDX-License-Identifier: Apache-2.0
// Two statements that end the enclosing function with an error: LOSSD_RETURN_IF_ERROR and
// LOSSD_TRY. The function returns absl::Status or absl::StatusOr.
//
//   LOSSD_RETURN_IF_ERROR(CheckOptions(options));
//   LOSSD_TRY(const std::string text, ReadFile(path));  // of absl::StatusOr<std::string>
//
// LOSSD_TRY is a declaration, so it stands on a line of its own in a block. Errors that get more words on
// their way, or that end no function, are ordinary code. The file is shorter than 60 lines because it has
// these two alone, which most sources use.
#ifndef LOSSD_KERNELS_ERRORS_STATUS_MACROS_H_
#define LOSSD_KERNELS_ERRORS_STATUS_MACROS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

// Returns a Status that is not OK from the enclosing function.
#define LOSSD_RETURN_IF_ERROR(...)                                                          \
  do {                                                                                      \
    if (absl::Status lossd_status = (__VA_ARGS__); !lossd_status.ok()) return lossd_status; \
  } while (false)

// Evaluates an absl::StatusOr. Returns its status from the enclosing function unless it is OK; otherwise
// moves its value into what `declaration` declares (which has no comma) or names.
#define LOSSD_TRY(declaration, ...) LOSSD_TRY_AT(__LINE__, declaration, __VA_ARGS__)
#define LOSSD_TRY_AT(line, declaration, ...) LOSSD_TRY_IN(line, declaration, __VA_ARGS__)
#define LOSSD_TRY_IN(line, declaration, ...)                                     \
  auto lossd_result_##line = (__VA_ARGS__);                                      \
  if (!lossd_result_##line.ok()) return std::move(lossd_result_##line).status(); \
  declaration = *std::move(lossd_result_##line)

#endif  // LOSSD_KERNELS_ERRORS_STATUS_MACROS_H_

// SPDX-License-Identifier: Apache-2.0
// LOSSD_RETURN_IF_ERROR and LOSSD_TRY are two statements that return an error from the enclosing function.
// That function returns absl::Status or absl::StatusOr.
//
//   LOSSD_RETURN_IF_ERROR(CheckOptions(options));
//   LOSSD_TRY(const std::string text, ReadFile(path));  // ReadFile returns absl::StatusOr<std::string>
//
// LOSSD_TRY is a declaration, so it must be a statement of its own in a block. Write ordinary code if an
// error gets more text, or does not end the function. The file is shorter than 60 lines because it has these
// two macros alone, which most sources use.
#ifndef LOSSD_KERNELS_ERRORS_STATUS_MACROS_H_
#define LOSSD_KERNELS_ERRORS_STATUS_MACROS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

// If the expression is a Status that is not OK, returns it from the enclosing function.
#define LOSSD_RETURN_IF_ERROR(...)                                                          \
  do {                                                                                      \
    if (absl::Status lossd_status = (__VA_ARGS__); !lossd_status.ok()) return lossd_status; \
  } while (false)

// Evaluates an absl::StatusOr. If it has an error, returns the error from the enclosing function. Otherwise
// moves its value to the variable that `declaration` declares or names; `declaration` has no comma.
#define LOSSD_TRY(declaration, ...) LOSSD_TRY_AT(__LINE__, declaration, __VA_ARGS__)
#define LOSSD_TRY_AT(line, declaration, ...) LOSSD_TRY_IN(line, declaration, __VA_ARGS__)
#define LOSSD_TRY_IN(line, declaration, ...)                                     \
  auto lossd_result_##line = (__VA_ARGS__);                                      \
  if (!lossd_result_##line.ok()) return std::move(lossd_result_##line).status(); \
  declaration = *std::move(lossd_result_##line)

#endif  // LOSSD_KERNELS_ERRORS_STATUS_MACROS_H_

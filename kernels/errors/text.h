// SPDX-License-Identifier: Apache-2.0
// Text for people out of bytes that may be anything: names that clients sent, file names, contents of files.
//
// All functions are stateless and thread-safe.
#ifndef LOSSD_KERNELS_ERRORS_TEXT_H_
#define LOSSD_KERNELS_ERRORS_TEXT_H_

#include <cstddef>
#include <string>

#include "absl/strings/string_view.h"

namespace lossd::errors {

// `text` if it has at most `limit` bytes, else its beginning and "..." in at most `limit` bytes. The cut is
// never within a UTF-8 character. `limit` is at least 3; bytes that are not UTF-8 stay as they are.
std::string Shortened(absl::string_view text, size_t limit);

// `text` with the replacement character U+FFFD (three bytes) in place of every byte that is not part of a
// valid UTF-8 character. Overlong forms, surrogates and code points above U+10FFFF are not valid.
std::string ValidUtf8(absl::string_view text);

}  // namespace lossd::errors

#endif  // LOSSD_KERNELS_ERRORS_TEXT_H_

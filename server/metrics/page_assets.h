// SPDX-License-Identifier: Apache-2.0
// The script, the style sheet and the icon of the pages: the files in page/, which are built into the
// program. The header is shorter than 60 lines because CMake makes its source, which holds the files, from
// page_assets.cc.in.
//
// Stateless, thread-safe.
#ifndef LOSSD_SERVER_METRICS_PAGE_ASSETS_H_
#define LOSSD_SERVER_METRICS_PAGE_ASSETS_H_

#include "absl/strings/string_view.h"

namespace lossd::metrics {

absl::string_view PageScript();
absl::string_view PageStyle();
absl::string_view PageIcon();

}  // namespace lossd::metrics

#endif  // LOSSD_SERVER_METRICS_PAGE_ASSETS_H_

// SPDX-License-Identifier: Apache-2.0
// How far the training of a head has come. Plain data.
#ifndef LOSSD_SERVER_HEAD_PROGRESS_H_
#define LOSSD_SERVER_HEAD_PROGRESS_H_

#include <cstdint>

namespace lossd::head {

struct Progress {
  uint64_t step = 0;     // the open step: steps closed so far
  uint64_t updates = 0;  // of them, those that updated the weights (bias correction counts these)
  friend bool operator==(const Progress&, const Progress&) = default;
};

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_PROGRESS_H_

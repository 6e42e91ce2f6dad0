// SPDX-License-Identifier: Apache-2.0
// Where the values of a head come from: who applied its last step, and which checkpoint holds or held them.
// lossd.v1.HeadHistory, apart from the open step. Plain data.
#ifndef LOSSD_SERVER_HEAD_HISTORY_H_
#define LOSSD_SERVER_HEAD_HISTORY_H_

#include <cstdint>
#include <string>

namespace lossd::head {

struct History {
  std::string run;                      // that applied the last step; "": none was applied, or it named none
  int64_t applied_unix_seconds = 0;     // when; 0: not known
  std::string checkpoint;               // "<head>/<name>" that was saved or loaded last; "": none
  uint64_t checkpoint_step = 0;         // the step that was open in it
  int64_t checkpoint_unix_seconds = 0;  // when it was saved; 0: not known
  bool loaded = false;                  // from `checkpoint`; false: saved to it

  friend bool operator==(const History&, const History&) = default;
};

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_HISTORY_H_

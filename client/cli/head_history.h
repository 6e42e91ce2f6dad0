// SPDX-License-Identifier: Apache-2.0
// What a head's history (HeadHistory) says, for people and for scripts. Pure functions, thread-safe.
#ifndef LOSSD_CLIENT_CLI_HEAD_HISTORY_H_
#define LOSSD_CLIENT_CLI_HEAD_HISTORY_H_

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "lossd/v1/head.pb.h"

namespace lossd::cli {

// "2026-11-26 22:30:01Z"; empty for 0.
std::string UtcText(int64_t unix_seconds);

// One line: "run trainer-1, last step 2026-11-26 22:30:01Z; saved as lm/best (step 7) 2026-11-26 22:31:00Z".
// Empty if nothing is known.
std::string HistoryText(const v1::HeadHistory& history);
nlohmann::ordered_json HistoryJson(const v1::HeadHistory& history);

// Steps that were closed since the head was saved, or loaded; nullopt if no checkpoint is known, or if it is
// of another past of the head.
std::optional<uint64_t> StepsSinceSave(const v1::HeadDescription& head);

// `head "lm" is at step 180: 12 steps since checkpoint lm/best`, or `..., no checkpoint known`; with rows of
// the open step if there are any.
std::string WhatIsLost(const v1::HeadDescription& head);

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_HEAD_HISTORY_H_

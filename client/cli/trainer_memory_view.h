// SPDX-License-Identifier: Apache-2.0
// A trainer's memory (client/plan/trainer_memory.h) as text for people and as JSON for scripts. Pure
// functions; thread-safe.
#ifndef LOSSD_CLIENT_CLI_TRAINER_MEMORY_VIEW_H_
#define LOSSD_CLIENT_CLI_TRAINER_MEMORY_VIEW_H_

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "client/plan/model.h"
#include "client/plan/trainer_memory.h"

namespace lossd::cli {

// A section of the plan: a title, a table, and what its columns hold.
std::string TrainerMemoryText(const plan::TrainerMemory& memory, const plan::Model& model);
// In bytes and rows.
nlohmann::ordered_json TrainerMemoryJson(const plan::TrainerMemory& memory);

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_TRAINER_MEMORY_VIEW_H_

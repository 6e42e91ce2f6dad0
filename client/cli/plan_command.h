// SPDX-License-Identifier: Apache-2.0
// The command plan prints a plan (client/plan/plan.h) as text for people or as JSON for scripts: the whole
// plan, its pipelines, and the memory of a trainer (client/plan/model.h). Pure functions; thread-safe.
#ifndef LOSSD_CLIENT_CLI_PLAN_COMMAND_H_
#define LOSSD_CLIENT_CLI_PLAN_COMMAND_H_

#include <cstddef>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "client/cli/format.h"
#include "client/plan/measured.h"
#include "client/plan/model.h"
#include "client/plan/plan.h"

namespace lossd::cli {

// The memory of a trainer, a section of the plan: a title, a table, and what its columns hold.
std::string TrainerMemoryText(const plan::TrainerMemory& memory, const plan::Model& model);
// In bytes and rows.
nlohmann::ordered_json TrainerMemoryJson(const plan::TrainerMemory& memory);

// The indices of Measured::sources that the predictions are calibrated with, ascending.
std::vector<size_t> StepSources(const plan::Measured& measured);

// A paragraph with a table; `basis` names StepSources().
std::string PipelinesText(const plan::Plan& plan, const plan::Measured& measured, const std::string& basis);

// An entry for each pipeline.
Json PipelinesJson(const plan::Plan& plan);

// Every number with its basis, and the sources of those that were measured. `measured` as for MakePlan().
std::string PlanText(const plan::Plan& plan, const plan::Measured& measured);
// In bytes, seconds and rows per second; docs/plan.md describes the document.
nlohmann::ordered_json PlanJson(const plan::Plan& plan, const plan::Measured& measured);

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_PLAN_COMMAND_H_

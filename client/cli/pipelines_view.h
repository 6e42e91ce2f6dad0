// SPDX-License-Identifier: Apache-2.0
// What `lossctl plan` says of pipelines, for people and for programs. Pure functions; thread-safe.
#ifndef LOSSD_CLIENT_CLI_PIPELINES_VIEW_H_
#define LOSSD_CLIENT_CLI_PIPELINES_VIEW_H_

#include <cstddef>
#include <string>
#include <vector>

#include "client/cli/json.h"
#include "client/plan/measured.h"
#include "client/plan/plan.h"

namespace lossd::cli {

// The indices of Measured::sources that the predictions are calibrated with, ascending.
std::vector<size_t> StepSources(const plan::Measured& measured);

// A paragraph with a table; `basis` names StepSources().
std::string PipelinesText(const plan::Plan& plan, const plan::Measured& measured, const std::string& basis);

// An entry for each pipeline.
Json PipelinesJson(const plan::Plan& plan);

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_PIPELINES_VIEW_H_

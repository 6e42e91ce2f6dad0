// SPDX-License-Identifier: Apache-2.0
// A plan (client/plan/plan.h) as text for people and as JSON for scripts. Pure functions; thread-safe.
#ifndef LOSSD_CLIENT_CLI_PLAN_VIEW_H_
#define LOSSD_CLIENT_CLI_PLAN_VIEW_H_

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "client/plan/measured.h"
#include "client/plan/plan.h"

namespace lossd::cli {

// Every number with its basis, and the sources of those that were measured. `measured` as for MakePlan().
std::string PlanText(const plan::Plan& plan, const plan::Measured& measured);
// In bytes, seconds and rows per second; docs/plan.md describes the document.
nlohmann::ordered_json PlanJson(const plan::Plan& plan, const plan::Measured& measured);

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_PLAN_VIEW_H_

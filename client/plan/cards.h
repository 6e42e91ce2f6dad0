// SPDX-License-Identifier: Apache-2.0
// Cards that were not measured: bounds on their times, by what data sheets say of them and of a card that
// was.
//
// A kernel is limited by arithmetic or by memory at every moment, so its time on another card that runs the
// same code lies between two factors: the quotients of the cards' arithmetic and of their bandwidth. That
// holds as far as both cards come as near to their data sheets; one that has to lower its clock for want of
// power is slower. Only Hopper cards are here, because others run other kernels (docs/kernels/README.md).
//
// Pure functions; thread-safe.
#ifndef LOSSD_CLIENT_PLAN_CARDS_H_
#define LOSSD_CLIENT_PLAN_CARDS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/plan/measured.h"

namespace lossd::plan {

// "h100-nvl", "h100-sxm", "h200".
std::vector<std::string> CardNames();

// `measured` for that card: as it is, if it is of that card, else with Measured::bounds. What says nothing of
// another card is left out: several GPUs, and memory that they share with trainers. INVALID_ARGUMENT naming
// the field "card" if the name is none of CardNames, or if no data sheet is known of the card that was
// measured.
absl::StatusOr<Measured> OnCard(Measured measured, absl::string_view name);

}  // namespace lossd::plan

#endif  // LOSSD_CLIENT_PLAN_CARDS_H_

// SPDX-License-Identifier: Apache-2.0
// The program's clocks. Everything that waits, measures or expires goes by the steady clock, which nobody
// sets. The wall clock is for what people read, for dates that came from outside (certificates), and for
// comparing with times that files have. scripts/check-clocks (a test) finds code that asks the system past
// this file.
//
// All functions are thread-safe.
#ifndef LOSSD_KERNELS_CLOCKS_CLOCK_H_
#define LOSSD_KERNELS_CLOCKS_CLOCK_H_

#include "absl/time/time.h"

namespace lossd::clocks {

// Goes forward by a second each second. Two of its times may be compared and subtracted; one alone says
// nothing to people.
absl::Time SteadyNow();

// What a clock on the wall shows. It may jump, in both directions.
absl::Time WallNow();

// What the wall clock shows, or showed, at a time of the steady clock, as it is set now. Infinite times stay.
absl::Time OnTheWall(absl::Time steady);

// For tests: the wall clock of this process is set by so much. The last call counts; zero undoes it.
void SetWallClockForTesting(absl::Duration ahead);

}  // namespace lossd::clocks

#endif  // LOSSD_KERNELS_CLOCKS_CLOCK_H_
